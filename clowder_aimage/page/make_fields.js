// The seed, and the settings that are folded away.

import { html } from './html.js';
import { Field, IconButton, NumberField } from './controls.js';
import { t } from './lang.js';
import { drawSeed } from './making.js';
import { hint, label, limitsOf } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';
import { isNumeric, PLAIN } from './setting.js';
import { readSeed } from './shape.js';
import { change, EMPTY } from './state.js';

/** The seed: locked, or drawn for each request. It may have more digits than a number holds. */
export function SeedField({ value }) {
  const { seed, seedLocked } = value;
  const note = seedLocked ? t(value.n > 1 ? 'make.seed-locked-n' : 'make.seed-locked') : t('make.seed-drawn');
  const lock = () => change({ seedLocked: !seedLocked, seed: seed ?? drawSeed() });
  const typed = (event) => {
    const next = readSeed(event.target.value.trim());
    change({ seed: next, seedLocked: next !== null });
  };
  return html`<div class="make-seed">
    <${Field} label=${label('seed')} error=${value.errors.seed} hint=${note}>
      ${(link) => html`<input ...${link} class="input" inputmode="numeric" pattern="[0-9]+" maxlength=${PARAMETERS.seed.most.length} autocomplete="off"
        value=${seed ?? ''} placeholder=${t('make.seed-random')} onInput=${typed} />`}
    <//>
    <${IconButton} icon=${seedLocked ? 'lock' : 'unlock'} label=${t('make.seed-lock')} aria-pressed=${seedLocked ? 'true' : 'false'} onClick=${lock} />
    <${IconButton} icon="dice" label=${t('make.seed-draw')} onClick=${() => change({ seed: drawSeed(), seedLocked: true })} />
  </div>`;
}

const GROUPS = ['guidance', 'sampling', 'output'];
const ELSEWHERE = ['width', 'height', 'steps', 'n']; // in the form
const FOLDED = GROUPS.flatMap((group) => PLAIN.filter(([name, one]) => one.group === group && isNumeric(one) && !ELSEWHERE.includes(name)));

/** The numbers that have no place of their own in the form. */
export function Advanced({ value, model }) {
  return FOLDED.map(([name, one]) => html`<${NumberField} key=${name} label=${label(name)} hint=${hint(name)} value=${value[name]}
    placeholder=${placeholder(name, model)} error=${value.errors[name]} onChange=${(next) => change({ [name]: next })} ...${limitsOf(one)} />`);
}

/** Return the default of a parameter: of the model, if it may state one. */
function defaultOf(name, model) {
  const { ofModel, default: usual } = PARAMETERS[name];
  return (ofModel ? model?.defaults?.[name] : usual) ?? null;
}

function placeholder(name, model) {
  const value = defaultOf(name, model);
  if (value === null) return t('make.of-model');
  return t(PARAMETERS[name].ofModel ? 'make.of-model-is' : 'make.default-is', { value });
}

/** Return how many of these settings were changed, in words. */
export function changedText(value, model) {
  const n = FOLDED.filter(([name]) => ![null, EMPTY[name] ?? defaultOf(name, model)].includes(value[name])).length;
  return n ? t('make.changed', { n }) : '';
}
