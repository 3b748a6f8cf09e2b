// The panel of adapters (LoRA): by group, on or off, with a weight, their trigger words and tags.

import { html, useEffect, useId, useState } from './html.js';
import { adapters, findAdapters, hasPhrase, onScale, SCALE, tagOf, togglePhrase } from './adapters.js';
import { Fold, IconButton, Slider, Switch } from './controls.js';
import { Icon } from './icons.js';
import { fixed, number, quoting, t } from './lang.js';
import { change, draft, models, scopes } from './state.js';

const FEW = 8; // adapters that are shown without a search and with all groups open

/** The adapters of a draft. Props: `value`, a list of {model, strength, on}; `onChange`; `model`. */
export function LoraPanel({ value, onChange, model }) {
  const { list, error } = adapters.value;
  const on = value.filter((one) => one.on !== false);
  const aside = on.length ? t('lora.on', { n: on.length }) : undefined;
  const [folded, setFolded] = useState(null); // null: nobody has folded it
  const fault = problem(draft.value.errors ?? {});
  const isOpen = Boolean(fault) || (folded === null ? on.length > 0 : !folded);
  const isAsked = isOpen && scopes.value.infer && (!model || models.value.some((one) => one.id === model));
  const count = models.value.length; // an adapter may have been pulled
  useEffect(() => void (isAsked && findAdapters(model)), [model, isAsked, count]);
  return html`<div class="lora">
    <${Fold} title=${t('lora.title')} aside=${aside} isOpen=${isOpen} onToggle=${(open) => setFolded(!open)}>
      ${fault && html`<p class="field-error" role="alert">${fault}</p>`}
      ${error && html`<p class="field-error">${t('lora.failed', { reason: error })}</p>`}
      ${list === null ? !error && html`<p class="dim">${t('lora.loading')}</p>`
        : html`<${Adapters} ...${{ list, value, onChange }} />`}
    <//>
  </div>`;
}

/** Return the message of a request that concerns an adapter. */
const problem = (errors) => Object.entries(errors).find(([field]) => field.startsWith('loras'))?.[1];

function Adapters({ list, value, onChange }) {
  const [words, setWords] = useState('');
  const missing = value.filter((use) => !list.some((one) => one.id === use.model));
  if (!list.length && !missing.length) return html`<p class="dim">${t('lora.none')}</p>`;
  const found = list.filter((one) => matches(one, words));
  const isShort = list.length <= FEW || words.trim() !== '';
  return html`
    ${list.length > FEW && html`<input class="input" type="search" placeholder=${t('lora.search')} aria-label=${t('lora.search')}
      value=${words} onInput=${(event) => setWords(event.target.value)} />`}
    ${missing.map((use) => html`<${Missing} key=${use.model} use=${use}
      onRemove=${() => onChange(value.filter((one) => one.model !== use.model))} />`)}
    ${groupsOf(found).map(([group, members]) => html`<${Group} key=${group}
      ...${{ group, members, value, onChange, isShort }} />`)}
    ${!found.length && html`<p class="dim">${t('lora.noneFound')}</p>`}
    <${Tags} value=${value} />`;
}

const matches = (one, words) => words.toLowerCase().split(/\s+/).every((word) =>
  [one.id, one.title ?? '', ...one.triggers].some((text) => text.toLowerCase().includes(word)));

/** Return pairs of the name of a group and its adapters; those that suit the model come first. */
function groupsOf(list) {
  const groups = new Map();
  for (const one of list) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  for (const members of groups.values()) members.sort((a, b) => (a.suitable === false) - (b.suitable === false));
  return [...groups];
}

function Group({ group, members, value, onChange, isShort }) {
  const on = members.filter((one) => value.some((use) => use.model === one.id && use.on !== false)).length;
  const [isOpen, setOpen] = useState(null);
  const isShown = isOpen ?? (isShort || on > 0);
  const title = group || t('lora.ungrouped');
  const count = on ? t('lora.onOf', { n: on, of: members.length }) : String(members.length);
  return html`<section class="lora-group" aria-label=${title}>
    <button type="button" class="lora-group-head" aria-expanded=${isShown} onClick=${() => setOpen(!isShown)}>
      <${Icon} name="chevron" size=${14} /><span class="lora-group-name">${title}</span><span class="dim">${count}</span>
    </button>
    ${isShown && html`<ul class="lora-list">
      ${members.map((one) => html`<${Adapter} key=${one.id} ...${{ one, value, onChange }} />`)}
    </ul>`}
  </section>`;
}

function Adapter({ one, value, onChange }) {
  const use = value.find((each) => each.model === one.id);
  const isOn = Boolean(use && use.on !== false);
  const isUnfit = one.suitable === false;
  const put = (fields) => {
    const own = { model: one.id, strength: onScale(one.weight), ...use, ...fields };
    onChange([...value.filter((each) => each.model !== one.id), own]);
  };
  return html`<li class=${`lora-one ${isUnfit ? 'lora-unfit' : ''}`}>
    <div class="lora-head">
      <${Switch} label=${html`<${Name} one=${one} />`} checked=${isOn} disabled=${isUnfit && !isOn}
        onChange=${(on) => put({ on })} />
      <span class="lora-facts dim">${factsOf(one)}</span>
    </div>
    ${isUnfit && html`<p class=${`lora-reason ${isOn ? 'lora-wrong' : ''}`}>${quoting('lora.unfit', 'reason', one.reason)}</p>`}
    ${isOn && html`<${Slider} label=${t('lora.weight')} value=${use.strength} ...${SCALE}
      format=${fixed} onChange=${(strength) => put({ strength })} />`}
    ${(isOn || !isUnfit) && one.triggers.length > 0 && html`<${Triggers} ...${{ one, isOn }} />`}
  </li>`;
}

const stem = (name) => name.slice(name.lastIndexOf('/') + 1);

function Name({ one }) {
  return html`<span class="lora-name"><span>${one.title || stem(one.id)}</span>
    ${one.title && one.title !== one.id && html`<span class="dim mono">${one.id}</span>`}</span>`;
}

const factsOf = (one) => [one.type, one.rank && t('lora.rank', { n: one.rank }),
  one.weight !== null && t('lora.recommended', { weight: number(one.weight) })].filter(Boolean).join(' · ');

/** The trigger words of an adapter, as buttons that put them into the prompt, or take them out. */
function Triggers({ one, isOn }) {
  const id = useId();
  const prompt = draft.value.prompt;
  return html`<div class="lora-triggers" role="group" aria-labelledby=${id}>
    <span id=${id} class="field-hint">${t('lora.triggers')}</span>
    ${one.triggers.map((word) => html`<button type="button" key=${word} class=${`chip lora-chip ${isOn ? 'lora-chip-on' : ''}`}
      aria-pressed=${hasPhrase(prompt, word)} onClick=${() => change({ prompt: togglePhrase(prompt, word) })}>
      <${Icon} name=${hasPhrase(prompt, word) ? 'check' : 'plus'} size=${12} />${word}
    </button>`)}
  </div>`;
}

function Missing({ use, onRemove }) {
  return html`<div class="lora-missing">
    <p class="lora-reason lora-wrong">${t('lora.missing', { name: use.model })}</p>
    <${IconButton} icon="trash" label=${t('lora.remove', { name: use.model })} onClick=${onRemove} />
  </div>`;
}

/** The adapters that are on, as tags that other programs understand. */
function Tags({ value }) {
  const on = value.filter((one) => one.on !== false);
  if (!on.length) return null;
  return html`<div class="lora-tags">
    <span class="field-hint">${t('lora.tags')}</span>
    ${on.map((one) => html`<code key=${one.model} class="lora-tag">${tagOf(one.model, one.strength ?? 1)}</code>`)}
  </div>`;
}
