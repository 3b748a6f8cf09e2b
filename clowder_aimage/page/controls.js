// Controls that all parts use: fields with labels and errors, switches, sliders, dialogs.

import { html, useEffect, useId, useRef, useState } from './html.js';
import { Icon } from './icons.js';
import { t } from './lang.js';

/** A component of a module that is loaded when it is first shown. Props: `load`, its `name`, and those of the component. */
export function Later({ load, name, ...props }) {
  const [Part, setPart] = useState(null);
  useEffect(() => void load().then((module) => setPart(() => module[name]), () => {}), []);
  return Part && html`<${Part} ...${props} />`;
}

/** A button. `kind` is 'primary', 'quiet' or 'danger'; `icon` is a name of icons.js. */
export function Button({ kind = '', icon, children, class: more = '', ...rest }) {
  return html`<button type="button" class=${`button ${kind && `button-${kind}`} ${more}`} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${children}
  </button>`;
}

/** A button that shows only an icon; `label` is its name, which is also its tooltip. */
export function IconButton({ icon, label, class: more = '', size = 18, ...rest }) {
  return html`<button type="button" class=${`icon-button ${more}`} aria-label=${label} title=${label} ...${rest}>
    <${Icon} name=${icon} size=${size} />
  </button>`;
}

/**
 * A label with a control under it, and a hint or an error.
 *
 * `children` is a function that takes the attributes that connect the control with its texts.
 */
export function Field({ label, hint, error, aside, class: more = '', children }) {
  const id = useId();
  const note = error || hint;
  const link = { id, 'aria-invalid': error ? 'true' : undefined, 'aria-describedby': note ? `${id}-note` : undefined };
  return html`<div class=${`field ${error ? 'field-bad' : ''} ${more}`}>
    ${label && html`<div class="field-head"><label for=${id}>${label}</label>${aside}</div>`}
    ${children(link)}
    ${note && html`<p class=${error ? 'field-error' : 'field-hint'} id=${`${id}-note`} role=${error ? 'alert' : undefined}>${note}</p>`}
  </div>`;
}

/**
 * A field for a number; null while it is empty, which the placeholder explains.
 *
 * What is typed is passed on when it is a number; the worker checks its range.
 */
export function NumberField({ label, value, onChange, placeholder, hint, error, aside, class: more, ...limits }) {
  const [text, setText] = useState(null);
  const typed = (event) => {
    const raw = event.target.value;
    setText(raw);
    const number = raw.trim() === '' ? null : Number(raw);
    if (!Number.isNaN(number)) onChange(number);
  };
  return html`<${Field} label=${label} hint=${hint} error=${error} aside=${aside} class=${more}>
    ${(link) => html`<input ...${link} class="input" type="number" inputmode="decimal" value=${text ?? value ?? ''}
      placeholder=${placeholder} onInput=${typed} onBlur=${() => setText(null)} ...${limits} />`}
  <//>`;
}

/** A slider with its value beside it, which can be typed too. */
export function Slider({ label, value, onChange, min, max, step, hint, error, format = (each) => each, disabled }) {
  const typed = (event) => onChange(Number(event.target.value));
  return html`<${Field} label=${label} hint=${hint} error=${error}
    aside=${html`<output class="slider-value">${format(value)}</output>`}>
    ${(link) => html`<input ...${link} class="slider" type="range" min=${min} max=${max} step=${step}
      value=${value} disabled=${disabled} onInput=${typed} />`}
  <//>`;
}

/** A choice of two states with a label beside it. */
export function Switch({ label, checked, onChange, hint, disabled }) {
  const id = useId();
  return html`<div class="switch-field">
    <label class="switch">
      <input type="checkbox" role="switch" checked=${checked} disabled=${disabled}
        aria-describedby=${hint ? id : undefined} onChange=${(event) => onChange(event.target.checked)} />
      <span class="switch-track" aria-hidden="true"></span>
      <span>${label}</span>
    </label>
    ${hint && html`<p class="field-hint" id=${id}>${hint}</p>`}
  </div>`;
}

/** A choice of a few: `options` are {value, label, icon}. */
export function Choice({ label, value, options, onChange, isLabelled = true, class: more = '' }) {
  const id = useId();
  return html`<div class=${`field ${more}`} role="radiogroup" aria-label=${label}>
    ${isLabelled && html`<div class="field-head"><span class="field-label" aria-hidden="true">${label}</span></div>`}
    <div class="choice">
      ${options.map((one) => html`<label key=${one.value} class="choice-option" title=${one.title}>
        <input type="radio" name=${id} value=${one.value} checked=${one.value === value}
          onChange=${() => onChange(one.value)} />
        <span>${one.icon}${one.label}</span>
      </label>`)}
    </div>
  </div>`;
}

/** A bar; `value` is 0 to 1, or null while the end is unknown. `label` is its name. */
export function Bar({ value, label, text }) {
  const now = value === null ? undefined : Math.round(value * 100);
  return html`<div class=${`bar ${value === null ? 'bar-unknown' : ''}`} role="progressbar" aria-label=${label}
    aria-valuemin="0" aria-valuemax="100" aria-valuenow=${now} aria-valuetext=${text}>
    <div class="bar-done" style=${{ width: `${(value ?? 0) * 100}%` }}></div>
  </div>`;
}

/** What is shown where there is nothing yet. */
export function Empty({ icon, title, children }) {
  return html`<div class="empty">
    ${icon && html`<${Icon} name=${icon} size=${28} />`}
    <p class="empty-title">${title}</p>
    <div class="empty-text">${children}</div>
  </div>`;
}

/** A modal dialog. The browser keeps the focus in it; Esc and the button close it. */
export function Dialog({ title, onClose, children, class: more = '' }) {
  const element = useRef(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  const pressed = (event) => event.target === element.current && onClose();
  return html`<dialog ref=${element} class=${`dialog ${more}`} aria-labelledby=${id} onClose=${onClose} onClick=${pressed}>
    <div class="dialog-body">
      <div class="dialog-head">
        <h2 id=${id}>${title}</h2>
        <${IconButton} icon="close" label=${t('dialog.close')} onClick=${onClose} />
      </div>
      ${children}
    </div>
  </dialog>`;
}

/** Call `act` when Esc is pressed, unless a dialog is open. */
export function useEscape(act) {
  useEffect(() => {
    const pressed = (event) => event.key === 'Escape' && !document.querySelector('dialog[open]') && act();
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  }, []);
}

/** Send the form of a field with Ctrl-Enter, as Enter begins a line in it. */
export const sendKey = (event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && event.target.form.requestSubmit();

/** A part that is folded away. `onToggle` takes whether it is open. */
export function Fold({ title, aside, isOpen, onToggle, children }) {
  return html`<details class="fold" open=${isOpen} onToggle=${(event) => onToggle?.(event.currentTarget.open)}>
    <summary><${Icon} name="chevron" size=${16} /><span>${title}</span>${aside && html`<span class="fold-aside">${aside}</span>`}</summary>
    <div class="fold-body">${children}</div>
  </details>`;
}
