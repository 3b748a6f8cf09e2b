// The size of the pictures: an aspect ratio with the area of the model, or free.

import { effect, html } from './html.js';
import { Choice, IconButton, NumberField, Slider } from './controls.js';
import { number, t } from './lang.js';
import { label, limitsOf } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';
import { ASPECTS, SCALES, turned } from './setting.js';
import { change, chosen, draft } from './state.js';

const { width: WIDTH, height: HEIGHT } = PARAMETERS;
const rounded = (side) => Math.max(WIDTH.least, Math.round(side / WIDTH.step) * WIDTH.step);

/** Return the size of a model: of its own pictures. */
function ownSize(model) {
  return [model?.defaults?.width ?? WIDTH.default, model?.defaults?.height ?? HEIGHT.default];
}

/** Return the fields of the draft for an aspect such as '16:9', with the area of the model's size. */
function sizeFields(aspect, scale, model) {
  if (!aspect) return { aspect, scale: 1, width: null, height: null };
  if (aspect === 'free') return { aspect };
  const [across, down] = aspect.split(':').map(Number);
  const [width, height] = ownSize(model);
  const area = width * height * scale * scale;
  const side = Math.sqrt((area * across) / down);
  return { aspect, scale, width: rounded(side), height: rounded((side * down) / across) };
}

/** Return the aspect of the list ASPECTS that is this one or its turned one. */
const upright = (aspect) => (ASPECTS.includes(aspect) ? aspect : turned(aspect));

/** A size that follows from the model follows again when the model is known, or another one. */
effect(() => {
  const model = chosen.value;
  const { aspect, scale, width, height } = draft.peek();
  if (!model || !aspect || aspect === 'free') return;
  const found = sizeFields(aspect, scale, model);
  if (found.width !== width || found.height !== height) change(found);
});

export function SizeField({ value, model }) {
  const { aspect } = value;
  const isRatio = aspect && aspect !== 'free';
  const choose = (next) => change(next === 'free' ? free(value, model) : sizeFields(isRatio && next !== '' && upright(aspect) !== aspect ? turned(next) : next, value.scale, model));
  return html`<div class="make-size">
    <div class="make-size-head">
      <${Choice} label=${t('make.size')} value=${isRatio ? upright(aspect) : aspect} onChange=${choose} options=${options(value)} />
      ${isRatio && aspect !== '1:1' && html`<${IconButton} icon="again" label=${t('make.turn')} onClick=${() => change(sizeFields(turned(aspect), value.scale, model))} />`}
    </div>
    ${aspect === 'free' ? html`<${Free} value=${value} />` : html`<${Result} value=${value} model=${model} />`}
    ${value.errors.width && aspect !== 'free' && html`<p class="field-error" role="alert">${value.errors.width}</p>`}
  </div>`;
}

function options(value) {
  const ratios = ASPECTS.map((one) => ({ value: one, label: one, icon: html`<${Shape} aspect=${one} />` }));
  return [{ value: '', label: t(value.images.length ? 'make.size-picture' : 'make.size-model') }, ...ratios, { value: 'free', label: t('make.size-free') }];
}

/** A rectangle with the sides of an aspect. */
function Shape({ aspect }) {
  const [across, down] = aspect.split(':').map(Number);
  const width = 14, height = (14 * down) / across;
  return html`<svg class="shape" width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
    <rect x=${1} y=${(16 - height) / 2} width=${width} height=${height} rx="1.5" />
  </svg>`;
}

function free(value, model) {
  const [width, height] = ownSize(model);
  return { aspect: 'free', width: value.width ?? width, height: value.height ?? height };
}

function Free({ value }) {
  const swap = () => change({ width: value.height, height: value.width });
  return html`<div class="make-free">
    <${NumberField} label=${label('width')} value=${value.width} error=${value.errors.width} onChange=${(width) => change({ width })} ...${limitsOf(WIDTH)} />
    <${IconButton} icon="again" label=${t('make.turn')} onClick=${swap} />
    <${NumberField} label=${label('height')} value=${value.height} onChange=${(height) => change({ height })} ...${limitsOf(HEIGHT)} />
  </div>`;
}

/** The size that follows, and its scale. */
function Result({ value, model }) {
  if (!value.aspect) {
    const [width, height] = ownSize(model);
    return value.images.length || !model ? null : html`<p class="field-hint">${t('make.pixels', { width, height })}</p>`;
  }
  const index = Math.max(0, SCALES.indexOf(value.scale));
  const text = t('make.pixels', { width: String(value.width), height: String(value.height) });
  return html`<${Slider} label=${t('make.scale', { n: number(SCALES[index]) })} value=${index} min=${0} max=${SCALES.length - 1} step=${1}
    format=${() => text} onChange=${(next) => change(sizeFields(value.aspect, SCALES[next], model))} />`;
}
