// The prompt with its history, the prompt that a language model writes, and the negative prompt.

import { html, useState } from './html.js';
import { Button, Dialog, Field, Fold, IconButton, Switch } from './controls.js';
import { t } from './lang.js';
import { hint, label } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';
import { forget, history } from './storage.js';
import { answersChats, change, draft, models, worker } from './state.js';

export function PromptField({ value }) {
  const [isOpen, setOpen] = useState(false);
  const aside = html`<${IconButton} icon="history" size=${16} label=${t('make.history')} class="icon-small" onClick=${() => setOpen(true)} />`;
  return html`<${Field} label=${label('prompt')} error=${value.errors.prompt} aside=${aside}>
      ${(link) => html`<textarea ...${link} class="input make-prompt" rows="4" maxlength=${PARAMETERS.prompt.most} value=${value.prompt}
        placeholder=${t('make.prompt-example')} onInput=${(event) => change({ prompt: event.target.value })}
        onKeyDown=${stepped}></textarea>`}
    <//>
    ${isOpen && html`<${History} onClose=${() => setOpen(false)} />`}`;
}

let place = -1; // in the history; -1 is what was typed
let typed = {};

/** Alt with the arrow keys goes through earlier prompts. */
function stepped(event) {
  if (!event.altKey || !['ArrowUp', 'ArrowDown'].includes(event.key)) return;
  event.preventDefault();
  const known = history();
  const { prompt, negative } = draft.value;
  if (known[place]?.prompt !== prompt || known[place].negative !== negative) [place, typed] = [-1, { prompt, negative }];
  place = Math.max(-1, Math.min(known.length - 1, place + (event.key === 'ArrowUp' ? 1 : -1)));
  change(known[place] ?? typed);
}

function History({ onClose }) {
  const [filter, setFilter] = useState('');
  const [known, setKnown] = useState(history());
  const found = known.filter((one) => `${one.prompt} ${one.negative}`.toLowerCase().includes(filter.toLowerCase()));
  const take = (one) => {
    change(one);
    onClose();
  };
  const drop = (prompt) => {
    forget(prompt);
    setKnown(history());
  };
  return html`<${Dialog} title=${t('make.history')} onClose=${onClose}>
    <${Field} label=${t('make.history-find')}>
      ${(link) => html`<input ...${link} class="input" type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} />`}
    <//>
    ${found.length
      ? html`<ul class="history">${found.map((one) => html`<li key=${one.prompt + one.negative}>
          <button type="button" class="history-take" onClick=${() => take(one)}>
            <span>${one.prompt}</span>${one.negative && html`<span class="dim">${label('negative')}: ${one.negative}</span>`}
          </button>
          <${IconButton} icon="trash" size=${16} label=${t('make.history-drop', { prompt: one.prompt.slice(0, 60) })} onClick=${() => drop(one.prompt)} />
        </li>`)}</ul>
        <div class="row"><${Button} kind="quiet" onClick=${() => drop(null)}>${t('make.history-clear')}<//></div>`
      : html`<p class="dim">${t(known.length ? 'make.history-none' : 'make.history-empty')}</p>`}
  <//>`;
}

/** The switch for a language model that writes a longer prompt, and what it wrote. */
export function EnhanceField({ value }) {
  const own = worker.value?.enhancer;
  const others = models.value.filter(answersChats);
  if (!own && !others.length && !value.enhance) return null;
  const name = value.enhancer || own || others[0]?.id;
  const turn = (enhance) => change({ enhance, enhancer: own ? '' : value.enhancer || others[0]?.id || '' });
  return html`<div class="make-enhance">
    <${Switch} label=${t('make.enhance')} checked=${value.enhance} onChange=${turn} hint=${value.enhance ? t('make.enhance-by', { name }) : ''} />
    ${value.errors.enhance && html`<p class="field-error" role="alert">${value.errors.enhance}</p>`}
    ${value.enhance && value.enhanced && html`<${Written} value=${value} />`}
  </div>`;
}

function Written({ value }) {
  const isOld = value.enhancedFrom !== value.prompt;
  const aside = html`<button type="button" class="link" onClick=${() => change({ enhanced: '' })}>${t('make.enhance-again')}</button>`;
  return html`<${Field} label=${t('make.enhanced')} aside=${aside} hint=${t(isOld ? 'make.enhanced-old' : 'make.enhanced-hint')}>
    ${(link) => html`<textarea ...${link} class=${`input ${isOld ? 'make-old' : ''}`} rows="4" maxlength=${PARAMETERS.prompt.most} value=${value.enhanced}
      onInput=${(event) => change({ enhanced: event.target.value, enhancedFrom: draft.value.prompt, enhancedBy: '' })}></textarea>`}
  <//>`;
}

export function NegativeField({ value }) {
  const { negative, errors } = value;
  return html`<${Fold} title=${label('negative')} aside=${negative.slice(0, 40)} isOpen=${negative || errors.negative ? true : undefined}>
    <${Field} label=${label('negative')} error=${errors.negative} hint=${hint('negative')} class="field-unlabelled">
      ${(link) => html`<textarea ...${link} class="input" rows="2" maxlength=${PARAMETERS.negative.most} value=${negative}
        onInput=${(event) => change({ negative: event.target.value })}></textarea>`}
    <//>
  <//>`;
}
