// The facts of a picture, and the texts that make it again elsewhere.

import { html, useState } from './html.js';
import { Button, Choice, Fold } from './controls.js';
import { curlText, inputName, inputsOf, pythonText, runLine } from './copy_text.js';
import { moment, t } from './lang.js';
import { label } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';
import { copyText, save } from './picture_file.js';
import { checkedFacts, FACTS, isPicture } from './setting.js';
import { notice, token } from './state.js';

/** Return the label of a fact. */
export const factLabel = (name) => (name in PARAMETERS ? label(name) : t(`facts.${name}`));

const NOT_SHOWN = new Set(['width', 'height']);

/** Return the facts of an entry as `[name, text]`, in the order of FACTS. */
export function factTexts(entry) {
  const facts = checkedFacts(entry.facts);
  const [width, height] = entry.width ? [entry.width, entry.height] : [facts.width, facts.height]; // facts have that of tiles
  const size = ['size', width && height ? `${width} × ${height}` : ''];
  const found = Object.keys(FACTS).filter((name) => name in facts && !NOT_SHOWN.has(name)).map((name) => [name, textOf(facts[name])]);
  const at = found.findIndex(([name]) => name === 'steps');
  found.splice(at < 0 ? found.length : at, 0, size);
  return found.filter(([, text]) => text !== '');
}

function textOf(value) {
  if (value === true) return t('facts.yes');
  if (value === false || value === null) return '';
  if (!Array.isArray(value)) return String(value);
  return value.map((one) => (typeof one === 'object' ? `${one.model} ${one.strength ?? ''}`.trim() : String(one))).join(', ');
}

/** The facts of an entry as a list. */
export function Facts({ entry }) {
  return html`<dl class="facts">
    ${factTexts(entry).map(([name, text]) => html`<div key=${name} class="fact">
      <dt>${factLabel(name)}</dt>
      <dd class=${isPicture(FACTS[name] ?? {}) ? 'mono' : ''}>${text}</dd>
    </div>`)}
    ${entry.made && html`<div class="fact"><dt>${t('facts.made')}</dt><dd>${moment(entry.made)}</dd></div>`}
  </dl>`;
}

const WRITERS = { run: runLine, curl: curlText, python: pythonText };

/** Return a text that makes an entry again: of `run`, `curl` or `python`. */
export function entryText(entry, kind) {
  const names = Object.fromEntries(inputsOf(checkedFacts(entry.facts)).map(([, digest]) => [digest, inputName(digest, entry.inputs?.[digest]?.type)]));
  const host = location.protocol === 'https:' ? location.origin : location.host;
  const where = { host, origin: location.origin, names, hasToken: Boolean(token.value) };
  return WRITERS[kind](entry.facts, where);
}

/** A command that makes the picture again, and the pictures that it needs as files. */
export function Command({ entry }) {
  const [kind, setKind] = useState('run');
  const { reference, prompt } = checkedFacts(entry.facts);
  if (!reference || prompt === undefined) return null;
  const text = entryText(entry, kind);
  const inputs = inputsOf(checkedFacts(entry.facts));
  const copy = async () => {
    const isCopied = await copyText(text);
    notice(t(isCopied ? 'facts.copied' : 'facts.notCopied'), { kind: isCopied ? 'good' : 'bad' });
  };
  const options = Object.keys(WRITERS).map((value) => ({ value, label: t(`facts.as.${value}`) }));
  return html`<${Fold} title=${t('facts.command')}>
    <${Choice} label=${t('facts.language')} isLabelled=${false} value=${kind} options=${options} onChange=${setKind} />
    <pre class="command" tabindex="0" aria-label=${t('facts.command')}>${text}</pre>
    ${inputs.length > 0 && html`<div class="field-hint">${t('facts.inputs')} <${Inputs} entry=${entry} inputs=${inputs} /></div>`}
    ${token.value && html`<p class="field-hint">${t('facts.token')}</p>`}
    <div><${Button} icon="copy" onClick=${copy}>${t('facts.copy')}<//></div>
  <//>`;
}

function Inputs({ entry, inputs }) {
  return [...new Set(inputs.map(([, digest]) => digest))].map((digest) => {
    const blob = entry.inputs?.[digest];
    const name = inputName(digest, blob?.type);
    return blob
      ? html`<button key=${digest} type="button" class="chip" onClick=${() => save(blob, name)}>${name}</button> `
      : html`<span key=${digest} class="chip chip-plain" title=${digest}>${t('facts.noInput', { name })}</span> `;
  });
}
