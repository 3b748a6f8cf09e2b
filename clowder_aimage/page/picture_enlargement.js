// A picture made larger: painted around (expand), or with more pixels (upscale).

import { html, useEffect, useState } from './html.js';
import { Choice, NumberField, Slider } from './controls.js';
import { number, t } from './lang.js';
import { limitsOf, scaleOf } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';

const STEP = PARAMETERS.width.step;
const NOTHING = { expand: null, upscale: null };
const SIDES = ['left', 'top', 'right', 'bottom'];
export const NO_MASK = { mask: null, paste: false, feather: 0, crop: false };
export const TWICE = { ...NOTHING, ...NO_MASK, upscale: 2, strength: null };

/** Return the sides of a picture; null until they are known. */
export function useSize(blob) {
  const [size, setSize] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    createImageBitmap(blob).then((picture) => isCurrent && setSize([picture.width, picture.height]), () => {});
    return () => (isCurrent = false);
  }, [blob]);
  return size;
}

/** The controls. Props: `value`, the draft; `onChange`; `errors`; `size`, that of the picture, or null. */
export function Enlargement({ value, onChange, errors, size }) {
  const kind = value.expand ? 'expand' : value.upscale ? 'upscale' : '';
  const choose = (next) => {
    const [width, height] = size ?? [256, 256];
    const [across, down] = [width, height].map((side) => Math.max(STEP, Math.round(side / 4 / STEP) * STEP));
    const begin = { '': {}, expand: { expand: [across, down, across, down] }, upscale: { upscale: 2 } };
    onChange({ strength: null, ...NOTHING, ...(next ? NO_MASK : {}), ...begin[next] });
  };
  const options = ['', 'expand', 'upscale'].map((one) => ({ value: one, label: t(`enlarge.${one || 'not'}`) }));
  return html`<${Choice} label=${t('enlarge.title')} value=${kind} options=${options} onChange=${choose} />
    ${kind === 'expand' && html`<${Sides} ...${{ value, onChange }} error=${errors.expand} />`}
    ${kind === 'upscale' && html`<${Slider} label=${t('enlarge.factor')} error=${errors.upscale} ...${scaleOf(PARAMETERS.upscale, 0.25)}
      value=${value.upscale} format=${(each) => `× ${number(each)}`} onChange=${(upscale) => onChange({ upscale })} />`}
    ${kind && html`<p class="field-hint">${t(`enlarge.${kind}Hint`)} ${size && t('enlarge.result', result(value, size))}</p>`}`;
}

/** Return the sides of the result as texts. */
function result({ expand, upscale }, [width, height]) {
  const [left, top, right, bottom] = expand ?? [0, 0, 0, 0];
  const factor = upscale ?? 1;
  return { width: String(Math.round((width + left + right) * factor)), height: String(Math.round((height + top + bottom) * factor)) };
}

function Sides({ value, onChange, error }) {
  const change = (index, side) => onChange({ expand: value.expand.with(index, Math.round(side ?? 0)) });
  return html`<div class="pictures-sides">
      ${SIDES.map((name, index) => html`<${NumberField} key=${name} label=${t(`enlarge.${name}`)} value=${value.expand[index]}
        ...${limitsOf(PARAMETERS.expand.of)} step=${STEP} onChange=${(side) => change(index, side)} />`)}
    </div>
    ${error && html`<p class="field-error" role="alert">${error}</p>`}`;
}
