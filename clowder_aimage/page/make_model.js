// The choice of the model, with its size, its precision and whether it is in memory.

import { html } from './html.js';
import { Field } from './controls.js';
import { amount, bytes, t } from './lang.js';
import { label } from './parameter_control.js';
import { change, chosen, loaded, makesPictures, models } from './state.js';

const isLoaded = (model) => loaded.value.some((one) => one.digest === model.digest || [one.name, ...(one.variants ?? [])].includes(model.id));

/** Return the facts of a model, as words. */
function facts(model) {
  const found = [];
  if (model.size) found.push(bytes(model.size));
  if (model.details?.parameter_size) found.push(t('make.parameters', { n: amount(model.details.parameter_size) }));
  if (model.details?.quantization_level) found.push(model.details.quantization_level);
  found.push(t(isLoaded(model) ? 'make.loaded' : 'make.not-loaded'));
  return found;
}

/** The models in memory, and the others. */
function options(able) {
  return [true, false].map((isIn) => {
    const found = able.filter((one) => isLoaded(one) === isIn);
    return found.length > 0 && html`<optgroup key=${isIn} label=${t(isIn ? 'make.loaded' : 'make.not-loaded')}>
      ${found.map((one) => html`<option key=${one.id} value=${one.id}>${[one.id, one.size && bytes(one.size), one.details?.quantization_level].filter(Boolean).join(' · ')}</option>`)}
    </optgroup>`;
  });
}

export function ModelField({ value }) {
  const able = models.value.filter(makesPictures);
  const now = chosen.value;
  const isGone = value.model && !now && able.length > 0;
  const error = value.errors.model || (isGone ? t('make.model-gone') : '');
  return html`<div class="make-model">
    <${Field} label=${label('model')} error=${error}>
      ${(link) => html`<select ...${link} class="input" value=${now?.id ?? value.model} onChange=${(event) => change({ model: event.target.value })}>
        ${isGone && html`<option value=${value.model}>${value.model}</option>`}
        ${!able.length && html`<option value="">${t('make.no-model')}</option>`}
        ${options(able)}
      </select>`}
    <//>
    ${now && html`<ul class="make-facts" aria-label=${t('make.model-facts')}>${facts(now).map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}
  </div>`;
}
