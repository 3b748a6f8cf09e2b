// The seed, and the settings that are folded away.

import { html } from './html.js';
import { Field, IconButton, NumberField } from './controls.js';
import { t } from './lang.js';
import { drawSeed } from './making.js';
import { readSeed } from './setting.js';
import { change } from './state.js';

/** The seed: locked, or drawn for each request. It may have more digits than a number holds. */
export function SeedField({ value }) {
  const { seed, seedLocked } = value;
  const hint = seedLocked ? t(value.n > 1 ? 'make.seed-locked-n' : 'make.seed-locked') : t('make.seed-drawn');
  const lock = () => change({ seedLocked: !seedLocked, seed: seed ?? drawSeed() });
  const typed = (event) => {
    const next = readSeed(event.target.value.trim());
    change({ seed: next, seedLocked: next !== null });
  };
  return html`<div class="make-seed">
    <${Field} label=${t('make.seed')} error=${value.errors.seed} hint=${hint}>
      ${(link) => html`<input ...${link} class="input" inputmode="numeric" pattern="[0-9]{1,20}" maxlength="20" autocomplete="off"
        value=${seed ?? ''} placeholder=${t('make.seed-random')} onInput=${typed} />`}
    <//>
    <${IconButton} icon=${seedLocked ? 'lock' : 'unlock'} label=${t('make.seed-lock')} aria-pressed=${seedLocked ? 'true' : 'false'} onClick=${lock} />
    <${IconButton} icon="dice" label=${t('make.seed-draw')} onClick=${() => change({ seed: drawSeed(), seedLocked: true })} />
  </div>`;
}

/** [field of the draft, the name of its default, limits of the control] */
const SETTINGS = [
  ['guidance', 'guidance', { min: 0, max: 30, step: 'any' }],
  ['guidanceEnd', 'guidance_end', { min: 0, max: 1, step: 'any' }],
  ['shift', null, { min: 0.001, max: 1000, step: 'any' }],
  ['cacheThreshold', 'cache_threshold', { min: 0, max: 10, step: 'any' }],
  ['cfgNormalization', 'cfg_normalization', { min: 0, max: 10000, step: 'any' }],
];

export function Advanced({ value, model }) {
  return html`
    ${SETTINGS.map(([name, own, limits]) => html`<${NumberField} key=${name} label=${t(`make.${name}`)} hint=${t(`make.${name}-hint`)}
      value=${value[name]} placeholder=${placeholder(own, model)} error=${value.errors[name]}
      onChange=${(next) => change({ [name]: next })} ...${limits} />`)}
    <${NumberField} label=${t('make.previews')} hint=${t('make.previews-hint')} value=${value.previews} min="0" max="3" step="1"
      onChange=${(previews) => change({ previews: Math.max(0, Math.min(3, previews ?? 0)) })} />`;
}

const defaultOf = (own, model) => ({ cfg_normalization: 0, ...model?.defaults })[own] ?? null;

function placeholder(own, model) {
  const value = defaultOf(own, model);
  return value === null ? t('make.of-model') : t('make.of-model-is', { value });
}

/** Return how many of these settings differ from those of the model, in words. */
export function changedText(value, model) {
  const n = SETTINGS.filter(([name, own]) => ![null, defaultOf(own, model)].includes(value[name])).length;
  return n ? t('make.changed', { n }) : '';
}
