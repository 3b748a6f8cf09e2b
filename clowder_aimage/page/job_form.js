// The dialogs that begin a job: a model quantized, or adapters fused into its weights.

import { html, useEffect, useState } from './html.js';
import { adapters, findAdapters, onScale, SCALE } from './adapters.js';
import { Choice, Dialog, Field, Slider, Switch } from './controls.js';
import { fixed, t } from './lang.js';
import { beginJob } from './jobs.js';
import { draft, notice } from './state.js';
import { stock } from './stock.js';
import { FLAG, listOf, NUMBER, objectOf, optional, readFields, TEXT } from './shape.js';
import { readTab, writeTab } from './storage.js';

const TYPES = ['int8', 'int4', 'fp8', 'mxfp8', 'nvfp4', 'bf16', 'f16'];
const FLOATS = ['bf16', 'f16'];
const GROUPS = [32, 64, 128];
const CONVERT = {
  target: optional(TEXT),
  type: { kind: 'one', of: TYPES },
  group: { kind: 'one', of: GROUPS },
  isWide: FLAG,
  isAttached: FLAG,
};
const FUSE = { target: optional(TEXT), chosen: listOf(objectOf({ model: TEXT, strength: NUMBER })) };
const readJobs = () => readTab('jobs', objectOf({}), {});

/**
 * Return the fields of a dialog for a model, and a function that changes some of them.
 *
 * They survive a reload, until `change(null)`: the job has begun.
 */
function useKept(kind, name, shapes, first) {
  const key = `${kind} ${name}`;
  const [fields, setFields] = useState(() => ({ target: null, ...first(), ...readFields(readJobs()[key], shapes) }));
  const change = (more) => {
    setFields({ ...fields, ...more });
    writeTab('jobs', { ...readJobs(), [key]: more ? { ...fields, ...more } : undefined });
  };
  return [fields, change];
}

/** Return a name that the store lacks for a new model: the old one with a word at the end of its tag. */
function newName(name, word) {
  const [, path, tag] = /^(.*?)(?::([^:/@]+))?$/.exec(name.split('@')[0]);
  const wanted = `${path}:${!tag || tag === 'latest' ? '' : `${tag}-`}${word}`;
  const taken = new Set((stock.value?.data ?? []).flatMap((each) => each.names));
  let found = wanted;
  for (let count = 2; taken.has(found); count++) found = `${wanted}-${count}`;
  return found;
}

/** The frame of both dialogs: the name of the result, its error, and the button. */
function JobDialog({ title, one, word, about, typed, onTyped, fields, isReady = true, children, onClose }) {
  const [error, setError] = useState(null);
  const [isSending, setSending] = useState(false);
  const target = typed.target ?? newName(one.names[0], word);
  const submit = async (event) => {
    event.preventDefault();
    setSending(true);
    try {
      await beginJob({ model: one.names[0], target: target.trim(), ...fields });
      onTyped(null);
      notice(t('jobs.begun', { name: target }));
      onClose();
    } catch (failed) {
      setError(failed);
      setSending(false);
    }
  };
  const isOfName = error?.field === 'target';
  return html`<${Dialog} title=${title} class="models-dialog" onClose=${onClose}>
    <form class="stack" onSubmit=${submit}>
      <p class="models-name">${one.names[0]}</p>
      <p class="dim">${about}</p>
      ${children}
      <${Field} label=${t('jobs.name')} error=${isOfName ? error.message : ''}>
        ${(link) => html`<input ...${link} class="input" autocomplete="off" autocapitalize="off" spellcheck=${false}
          value=${target} onInput=${(event) => (onTyped({ target: event.target.value }), setError(null))} />`}
      <//>
      ${error && !isOfName && html`<p class="field-error" role="alert">${error.message}</p>`}
      <div class="row models-dialog-end">
        <button class="button button-primary" disabled=${!isReady || isSending || !target.trim()}>${t('jobs.begin')}</button>
      </div>
    </form>
  <//>`;
}

/** Convert the weights of a model. */
export function Quantize({ one, onClose }) {
  const [typed, onTyped] = useKept('convert', one.names[0], CONVERT, () => ({ type: 'int8', group: 64, isWide: false, isAttached: true }));
  const { type, group, isWide, isAttached } = typed;
  const isFloat = FLOATS.includes(type);
  const isPicture = one.kind === 'image';
  const fields = { kind: 'convert', attach: isAttached };
  if (isFloat) fields.dtype = type;
  else fields.quantize = isPicture && isWide ? `transformer=${type},text_encoder=${type}` : type;
  if (type.startsWith('int')) fields.group_size = group;
  const options = (list, key) => list.map((value) => ({ value, label: key ? t(`${key}.${value}`) : String(value) }));
  return html`<${JobDialog} ...${{ one, onClose, fields, typed, onTyped }} title=${t('quantize.title')} word=${type} about=${t('quantize.about')}>
    <${Choice} label=${t('quantize.type')} value=${type} options=${options(TYPES)} onChange=${(value) => onTyped({ type: value })} />
    <p class="field-hint">${t(`quantize.hint.${type}`)}</p>
    ${type.startsWith('int') && html`<${Choice} label=${t('quantize.group')} value=${group} options=${options(GROUPS)} onChange=${(value) => onTyped({ group: value })} />`}
    ${isPicture && !isFloat && html`<${Switch} label=${t('quantize.encoder')} hint=${t('quantize.encoderHint')} checked=${isWide} onChange=${(value) => onTyped({ isWide: value })} />`}
    <${Switch} label=${t('quantize.attach')} hint=${t('quantize.attachHint')} checked=${isAttached} onChange=${(value) => onTyped({ isAttached: value })} />
  <//>`;
}

/** Add adapters to the weights of a model. */
export function Fuse({ one, onClose }) {
  const name = one.names[0];
  const [typed, onTyped] = useKept('fuse', name, FUSE, () => ({ chosen: preset(name) }));
  const { chosen } = typed;
  useEffect(() => void findAdapters(name), [name]);
  const { list, error } = adapters.value;
  const fitting = (list ?? []).filter((each) => each.suitable !== false);
  const loras = chosen.filter((use) => fitting.some((each) => each.id === use.model));
  const put = (use) => onTyped({ chosen: [...chosen.filter((each) => each.model !== use.model), use] });
  const drop = (model) => onTyped({ chosen: chosen.filter((each) => each.model !== model) });
  return html`<${JobDialog} ...${{ one, onClose, typed, onTyped }} title=${t('fuse.title')} word="fused" about=${t('fuse.about')}
    fields=${{ kind: 'fuse', loras }} isReady=${loras.length > 0}>
    ${error && html`<p class="field-error">${error}</p>`}
    ${list === null ? html`<p class="dim">${t('lora.loading')}</p>` : !fitting.length && html`<p>${t('fuse.none')}</p>`}
    <ul class="models-fuse">${fitting.map((each) => html`<${Choosable} key=${each.id} each=${each}
      use=${chosen.find((use) => use.model === each.id)} onPut=${put} onDrop=${drop} />`)}</ul>
  <//>`;
}

/** Return the adapters that the form Make has on for a model. */
const preset = (name) => (draft.value.model !== name ? [] : draft.value.loras.filter((use) => use.on !== false)
  .map(({ model, strength }) => ({ model, strength: onScale(strength) })));

function Choosable({ each, use, onPut, onDrop }) {
  const label = html`<span class="models-name">${each.title ? `${each.title} (${each.id})` : each.id}</span>`;
  const turn = (isOn) => (isOn ? onPut({ model: each.id, strength: onScale(each.weight) }) : onDrop(each.id));
  return html`<li>
    <${Switch} label=${label} checked=${Boolean(use)} onChange=${turn} />
    ${use && html`<${Slider} label=${t('lora.weight')} ...${SCALE} value=${use.strength}
      format=${fixed} onChange=${(strength) => onPut({ ...use, strength })} />`}
  </li>`;
}
