// The pictures that the form begins with: dropped, pasted or chosen, with a mask, and a control picture.

import { html, useEffect, useId, useRef, useState } from './html.js';
import { call, pictureUrl } from './api.js';
import { Field, Fold, IconButton, Later, Slider, Switch } from './controls.js';
import { Icon } from './icons.js';
import { fixed, t } from './lang.js';
import { MaskEditor } from './mask_editor.js';
import { Enlargement, NO_MASK, useSize } from './picture_enlargement.js';
import { mostImages, readPicture } from './picture_draft.js';
import { online } from './state.js';
import { hint, label, scaleOf } from './parameter_control.js';
import { PARAMETERS, STRENGTHS } from './parameters.js';

const ACCEPTED = 'image/png,image/jpeg,image/webp,image/avif,image/gif,image/bmp';

/** The pictures of a draft. Props: `value`, the draft; `onChange`, which takes changed fields. */
export function PictureInput({ value, onChange }) {
  const most = mostImages(value.model);
  const errors = value.errors ?? {};
  const isEdit = most > 1;
  const count = value.images.length;
  return html`<${Part} title=${t(isEdit ? 'pictures.references' : 'pictures.image')} count=${count} isWrong=${errors.images || errors.mask || errors.strength || errors.expand || errors.upscale}>
      <${Pictures} ...${{ value, onChange, most }} error=${errors.images} />
      ${count > 0 && !isEdit && html`<${Beginning} ...${{ value, onChange, errors }} />`}
      ${isEdit && (value.mask || value.control) && html`<p class="field-hint">${t('pictures.unused')}</p>`}
    <//>
    ${!isEdit && html`<${Part} title=${label('control')} count=${value.control ? 1 : 0} isWrong=${errors.control || errors.controlnet || errors.control_strength}>
      <${Control} ...${{ value, onChange, errors }} />
    <//>`}`;
}

/** A part that is folded away while it has no pictures; what is wrong opens it. */
function Part({ title, count, isWrong, children }) {
  const [isOpen, setOpen] = useState(count > 0);
  useEffect(() => {
    if (count > 0 || isWrong) setOpen(true);
  }, [count, Boolean(isWrong)]);
  return html`<${Fold} title=${title} aside=${count ? t('pictures.count', { n: count }) : ''} isOpen=${isOpen} onToggle=${setOpen}>${children}<//>`;
}

/** Read chosen files; what they hold, or why not, is passed on. */
async function readFiles(files, onPictures, onError) {
  const pictures = [];
  let message = '';
  for (const file of files) {
    try {
      pictures.push(await readPicture(file));
    } catch (error) {
      message = error.message;
    }
  }
  onError(message);
  if (pictures.length) onPictures(pictures);
}

/** A place where pictures are dropped, pasted or chosen. */
function Drop({ label, hint, error, onPictures, isMultiple = false, class: more = '' }) {
  const [isOver, setOver] = useState(false);
  const [message, setMessage] = useState('');
  const id = useId();
  const take = (files) => readFiles([...files].slice(0, isMultiple ? 8 : 1), onPictures, setMessage);
  const over = (event) => {
    event.preventDefault();
    setOver(true);
  };
  const dropped = (event) => {
    event.preventDefault();
    event.stopPropagation();
    setOver(false);
    take(event.dataTransfer.files);
  };
  const chosen = (event) => {
    take(event.target.files);
    event.target.value = '';
  };
  const pasted = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    event.stopPropagation();
    take(event.clipboardData.files);
  };
  const note = message || error;
  return html`<div class=${`pictures-drop ${isOver ? 'pictures-over' : ''} ${more}`} onPaste=${pasted}
    onDragEnter=${over} onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${dropped}>
    <label class="pictures-choose">
      <input type="file" class="hidden-text" accept=${ACCEPTED} multiple=${isMultiple} onChange=${chosen}
        aria-describedby=${`${id}-hint`} />
      <${Icon} name="upload" /><span>${label}</span>
    </label>
    <p class="field-hint" id=${`${id}-hint`}>${hint}</p>
    ${note && html`<p class="field-error" role="alert">${note}</p>`}
  </div>`;
}

function Pictures({ value, onChange, most, error }) {
  const { images } = value;
  const isEdit = most > 1;
  const replace = (next) => onChange(isEdit ? { images: next } : { images: next, mask: null, ...(next.length ? {} : { expand: null, upscale: null }) });
  const move = (from, to) => {
    const next = [...images];
    next.splice(to, 0, ...next.splice(from, 1));
    replace(next);
  };
  return html`<div class="field">
    ${images.length > 0 && html`<ol class="pictures-list" aria-label=${t(isEdit ? 'pictures.references' : 'pictures.image')}>
      ${images.map((blob, index) => html`<${Chosen} key=${pictureUrl(blob)} ...${{ blob, index, images, move }}
        isExtra=${index >= most} onRemove=${() => replace(images.filter((one) => one !== blob))} />`)}
    </ol>`}
    ${images.map((blob) => html`<${Later} key=${pictureUrl(blob)} load=${() => import('./origin.js')} name="OriginLine" blob=${blob} />`)}
    ${images.length < most && html`<${Drop} isMultiple=${isEdit} error=${error}
      label=${t(isEdit && images.length ? 'pictures.another' : 'pictures.choose')}
      hint=${isEdit ? t('pictures.referencesHint', { most }) : t('pictures.imageHint')}
      onPictures=${(pictures) => replace([...images, ...pictures].slice(0, most))} />`}
    ${images.length >= most && error && html`<p class="field-error" role="alert">${error}</p>`}
    ${images.length > most && html`<p class="field-error" role="alert">${t('pictures.tooMany', { most })}</p>`}
  </div>`;
}

/** A picture that was chosen: moved by its buttons, or by dragging it over another. */
function Chosen({ blob, index, images, move, onRemove, isExtra }) {
  const [size, setSize] = useState('');
  const loaded = (event) => setSize(`${event.target.naturalWidth} × ${event.target.naturalHeight}`);
  const dropped = (event) => {
    const from = Number(event.dataTransfer.getData('text/x-aimage-picture') || NaN);
    if (!Number.isInteger(from)) return;
    event.preventDefault();
    event.stopPropagation();
    move(from, index);
  };
  const name = t('pictures.number', { n: index + 1 });
  const isSorted = images.length > 1;
  return html`<li class=${`pictures-chosen ${isExtra ? 'pictures-extra' : ''}`} draggable=${isSorted}
    onDragStart=${(event) => event.dataTransfer.setData('text/x-aimage-picture', String(index))}
    onDragOver=${(event) => isSorted && event.preventDefault()} onDrop=${dropped}>
    <img src=${pictureUrl(blob)} alt=${name} onLoad=${loaded} draggable=${false} />
    <span class="pictures-size">${isSorted ? `${index + 1} · ` : ''}${size}</span>
    <span class="pictures-acts">
      ${isSorted && html`<${IconButton} icon="arrowLeft" label=${t('pictures.earlier', { n: index + 1 })}
        disabled=${index === 0} onClick=${() => move(index, index - 1)} />
      <${IconButton} icon="arrowRight" label=${t('pictures.later', { n: index + 1 })}
        disabled=${index === images.length - 1} onClick=${() => move(index, index + 1)} />`}
      <${IconButton} icon="close" label=${t('pictures.remove', { n: index + 1 })} onClick=${onRemove} />
    </span>
  </li>`;
}

/** What is set for a picture that a model begins with. */
function Beginning({ value, onChange, errors }) {
  const strength = value.strength ?? (value.mask || value.expand ? 1 : value.upscale ? STRENGTHS.upscale : STRENGTHS.image);
  const isEnlarged = Boolean(value.expand || value.upscale);
  const size = useSize(value.images[0]);
  const isFitted = size && value.width && value.height && (size[0] !== value.width || size[1] !== value.height);
  return html`
    <${Slider} label=${label('strength')} hint=${hint('strength')} error=${errors.strength}
      ...${scaleOf(PARAMETERS.strength, 0.01)} value=${strength} format=${fixed}
      onChange=${(next) => onChange({ strength: next })} />
    <${Enlargement} ...${{ value, onChange, errors, size }} />
    ${isFitted && !isEnlarged && html`<${Fit} ...${{ value, onChange, size }} />`}
    ${!isEnlarged && html`<${Mask} ...${{ value, onChange, errors, size }} />`}
    ${value.fine && html`<${Fine} onChange=${onChange} />`}`;
}

function Fit({ value, onChange, size }) {
  const sizes = t('pictures.fitHint', { own: `${size[0]} × ${size[1]}`, size: `${value.width} × ${value.height}` });
  return html`<${Field} label=${label('fit')} hint=${sizes}>
    ${(link) => html`<select ...${link} class="input" value=${value.fit} onChange=${(event) => onChange({ fit: event.target.value })}>
      ${PARAMETERS.fit.of.map((name) => html`<option key=${name} value=${name}>${t(`pictures.fit.${name}`)}</option>`)}
    </select>`}
  <//>`;
}

function Mask({ value, onChange, errors, size }) {
  const [isOpen, setOpen] = useState(Boolean(value.mask));
  const toggle = (next) => {
    setOpen(next);
    if (!next) onChange(NO_MASK);
    else onChange({ paste: true, feather: Math.min(8, Math.round(Math.max(...(size ?? [256])) / 32)) });
  };
  return html`<${Switch} label=${t('mask.paint')} hint=${t('mask.paintHint')} checked=${isOpen} onChange=${toggle} />
    ${errors.mask && html`<p class="field-error" role="alert">${errors.mask}</p>`}
    ${isOpen && html`<${MaskEditor} image=${value.images[0]} mask=${value.mask} feather=${value.feather}
      onChange=${(mask) => onChange({ mask })}
      onFeather=${(feather) => onChange({ feather, ...(feather && !value.crop ? { paste: true } : {}) })} />
    <${Switch} label=${t('mask.paste')} checked=${value.paste} onChange=${(paste) => onChange({ paste, ...(paste ? {} : { feather: 0 }) })} />
    <${Switch} label=${t('mask.crop')} hint=${t('mask.cropHint')} checked=${value.crop} onChange=${(crop) => onChange({ crop })} />`}`;
}

/** A setting of a loaded picture that has no control here: shown, and removed. */
function Fine({ onChange }) {
  const text = t('pictures.fine');
  return html`<span class="pictures-carried">${text}
    <${IconButton} icon="close" size=${14} label=${t('pictures.without', { what: text })} onClick=${() => onChange({ fine: false })} />
  </span>`;
}

function Control({ value, onChange, errors }) {
  const strength = value.control_strength ?? STRENGTHS.control;
  const clear = () => onChange({ control: null });
  return html`<div class="field">
    ${value.control
      ? html`<ol class="pictures-list" aria-label=${label('control')}>
          <${Chosen} blob=${value.control} index=${0} images=${[value.control]} move=${() => {}} onRemove=${clear} />
        </ol>
        ${errors.control && html`<p class="field-error" role="alert">${errors.control}</p>`}`
      : html`<${Drop} class="pictures-small" label=${t('pictures.choose')} hint=${hint('control')} error=${errors.control}
          onPictures=${([control]) => onChange({ control })} />`}
  </div>
  ${value.control && html`<${ControlNet} ...${{ value, onChange }} error=${errors.controlnet} />
    <${Slider} label=${label('control_strength')} error=${errors.control_strength} ...${scaleOf(PARAMETERS.control_strength, 0.05)}
      value=${strength} format=${fixed} onChange=${(next) => onChange({ control_strength: next })} />`}`;
}

/** The name of a ControlNet; names of the store are suggested, those that look like one first. */
function ControlNet({ value, onChange, error }) {
  const [names, setNames] = useState([]);
  const list = useId();
  const asked = useRef(false);
  useEffect(() => {
    if (asked.current || !online.value) return;
    asked.current = true;
    call('GET', '/api/tags').then(({ models }) => setNames(models.map((one) => one.name).filter((name) => /control/i.test(name))), () => {});
  }, [online.value]);
  return html`<${Field} label=${label('controlnet')} hint=${hint('controlnet')} error=${error}>
    ${(link) => html`<input ...${link} class="input" list=${list} value=${value.controlnet} spellcheck=${false} autocomplete="off"
      onInput=${(event) => onChange({ controlnet: event.target.value })} />
      <datalist id=${list}>${names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>`}
  <//>`;
}
