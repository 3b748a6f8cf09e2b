// The seed, and the settings that are folded away.

import { html } from './html.js';
import { IconButton, NumberField } from './controls.js';
import { t } from './lang.js';
import { drawSeed } from './making.js';
import { change } from './state.js';

/** The seed: locked, or drawn for each request. */
export function SeedField({ value }) {
  const { seed, seedLocked } = value;
  const hint = seedLocked ? t(value.n > 1 ? 'make.seed-locked-n' : 'make.seed-locked', { last: value.n - 1 }) : t('make.seed-drawn');
  const lock = () => change({ seedLocked: !seedLocked, seed: seed ?? drawSeed() });
  return html`<div class="make-seed">
    <${NumberField} label=${t('make.seed')} value=${seed} placeholder=${t('make.seed-random')} error=${value.errors.seed} hint=${hint}
      min="0" step="1" onChange=${(next) => change({ seed: next, seedLocked: next !== null })} />
    <${IconButton} icon=${seedLocked ? 'lock' : 'unlock'} label=${t('make.seed-lock')} aria-pressed=${seedLocked ? 'true' : 'false'} onClick=${lock} />
    <${IconButton} icon="dice" label=${t('make.seed-draw')} onClick=${() => change({ seed: drawSeed() })} />
  </div>`;
}

/** [field of the draft, its default in the model, limits of the control] */
const SETTINGS = [
  ['guidance', 'guidance', { min: 0, max: 30, step: 'any' }],
  ['guidanceEnd', 'guidance_end', { min: 0, max: 1, step: 'any' }],
  ['shift', null, { min: 0.001, max: 1000, step: 'any' }],
  ['cacheThreshold', 'cache_threshold', { min: 0, max: 10, step: 'any' }],
  ['cfgNormalization', null, { min: 0, max: 10000, step: 'any' }],
];

export function Advanced({ value, model }) {
  return html`
    ${SETTINGS.map(([name, own, limits]) => html`<${NumberField} key=${name} label=${t(`make.${name}`)} hint=${t(`make.${name}-hint`)}
      value=${value[name]} placeholder=${placeholder(own, model)} error=${value.errors[name]}
      onChange=${(next) => change({ [name]: next })} ...${limits} />`)}
    <${NumberField} label=${t('make.previews')} hint=${t('make.previews-hint')} value=${value.previews} min="0" max="3" step="1"
      onChange=${(previews) => change({ previews: Math.max(0, Math.min(3, previews ?? 0)) })} />`;
}

function placeholder(own, model) {
  const value = own && model?.defaults?.[own];
  return value === null || value === undefined ? t('make.of-model') : t('make.of-model-is', { value });
}
