// The part Chat: a conversation with a language model.

import { html, useEffect, useLayoutEffect, useRef, useState } from './html.js';
import { Button, Dialog, Empty, Field, Fold, IconButton, Switch, useEscape } from './controls.js';
import { chatModels, clear, modelOf, regenerate, say, send, sending, stop, talk } from './chat_request.js';
import { ChatText, copyAloud } from './chat_text.js';
import { number, t } from './lang.js';
import { Icon } from './icons.js';
import { loaded, models } from './state.js';

const isTouch = matchMedia('(pointer: coarse)').matches; // Enter begins a line on keyboards of screens
const NEAR = 80; // pixels from the end within which new text is followed

export function Chat() {
  const known = chatModels();
  useEscape(stop);
  if (!known.length && !talk.value.messages.length) {
    return html`<section class="panel"><${Empty} icon="chat" title=${t('chat.none')}>${t('chat.noneText')}<//></section>`;
  }
  return html`<div class="chat">
    <h1 class="hidden-text">${t('tab.chat')}</h1>
    <${Settings} known=${known} />
    <${Talk} />
    <${Composer} isReady=${known.some((one) => one.id === modelOf())} />
  </div>`;
}

function Settings({ known }) {
  const { system, thinks, messages } = talk.value;
  const [isAsking, setAsking] = useState(false);
  const model = modelOf();
  const isGone = !known.some((one) => one.id === model);
  const canThink = known.find((one) => one.id === model)?.capabilities.includes('thinking');
  const restart = () => {
    clear();
    setAsking(false);
  };
  return html`<section class="panel chat-settings" aria-label=${t('chat.settings')}>
    <div class="chat-settings-row">
      <${Field} label=${t('chat.model')} class="chat-model" error=${isGone && models.value.length ? t('chat.gone', { model }) : ''}>
        ${(link) => html`<select ...${link} class="input" value=${model} onChange=${(event) => say({ model: event.target.value })}>
          ${isGone && html`<option value=${model}>${model}</option>`}
          ${known.map((one) => html`<option key=${one.id} value=${one.id}>${labelOf(one)}</option>`)}
        </select>`}
      <//>
      ${canThink && html`<${Switch} label=${t('chat.thinks')} checked=${thinks} onChange=${(on) => say({ thinks: on })} />`}
      ${messages.length > 0 && html`<${Button} icon="plus" class="chat-new" onClick=${() => setAsking(true)}>${t('chat.new')}<//>`}
    </div>
    <${Fold} title=${t('chat.system')} aside=${system.trim() ? t('chat.systemSet') : ''}>
      <${Field} label=${t('chat.systemLabel')} hint=${t('chat.systemHint')}>
        ${(link) => html`<textarea ...${link} class="input" rows="3" value=${system} onInput=${(event) => say({ system: event.target.value })}></textarea>`}
      <//>
    <//>
    ${isAsking && html`<${Dialog} title=${t('chat.new')} onClose=${() => setAsking(false)}>
      <p>${t('chat.newAsk')}</p>
      <div class="row chat-dialog-end">
        <${Button} onClick=${() => setAsking(false)}>${t('chat.newKeep')}<//>
        <${Button} kind="danger" onClick=${restart}>${t('chat.newGo')}<//>
      </div>
    <//>`}
  </section>`;
}

const labelOf = (one) => (loaded.value.some((each) => each.name === one.id) ? t('chat.inMemory', { model: one.id }) : one.id);

function Talk() {
  const { messages } = talk.value;
  const end = useRef(null);
  const isNear = useRef(true);
  useEffect(() => {
    const moved = () => (isNear.current = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR);
    addEventListener('scroll', moved, { passive: true });
    return () => removeEventListener('scroll', moved);
  }, []);
  useLayoutEffect(() => {
    if (isNear.current && messages.length) scrollTo({ top: document.documentElement.scrollHeight });
  }, [messages]);
  if (!messages.length) return html`<${Empty} icon="chat" title=${t('chat.empty')}>${t('chat.emptyText')}<//>`;
  return html`<ol class="chat-messages" aria-label=${t('chat.messages')} ref=${end}>
    ${messages.map((one, index) => html`<${Message} key=${index} one=${one} isLast=${index === messages.length - 1} />`)}
  </ol>`;
}

function Message({ one, isLast }) {
  const isAnswer = one.role === 'assistant';
  return html`<li class=${`chat-message chat-${one.role}`} aria-busy=${one.isOpen ? 'true' : 'false'}>
    <h2 class="chat-who">${isAnswer ? one.model : t('chat.you')}</h2>
    ${one.thinking && html`<${Thoughts} one=${one} />`}
    ${isAnswer ? html`<${ChatText} text=${one.content} />` : html`<div class="chat-text">${one.content}</div>`}
    ${one.isOpen && !one.content && html`<p class="chat-waiting" role="status">${one.thinking ? t('chat.thinking') : sending.value?.waiting}</p>`}
    ${isAnswer && !one.isOpen && html`<${Ending} one=${one} isLast=${isLast} />`}
  </li>`;
}

/** What the model has thought before its answer, folded away. */
function Thoughts({ one }) {
  const isThinking = one.isOpen && !one.content;
  return html`<details class="chat-thoughts">
    <summary><${Icon} name="chevron" size=${14} />${isThinking ? t('chat.thinking') : t('chat.thoughts')}</summary>
    <div class="chat-text dim">${one.thinking.trim()}</div>
  </details>`;
}

/** Why an answer ended, how fast it was, and what can be done with it. */
function Ending({ one, isLast }) {
  const reason = { stopped: t('chat.stopped'), length: t('chat.length') }[one.end] ?? '';
  const error = one.error === 'reload' ? t('chat.reloaded') : one.error;
  const { tokens = 0, seconds = 0 } = one.usage ?? {};
  const rate = tokens && seconds ? t('chat.rate', { tokens, rate: number(tokens / seconds, 1) }) : '';
  return html`${error && html`<p class="field-error" role="alert">${error}</p>`}
    <div class="chat-ending">
      ${one.content && html`<${IconButton} icon="copy" size=${16} label=${t('chat.copy')} onClick=${() => copyAloud(one.content)} />`}
      ${isLast && html`<${Button} kind="quiet" icon="again" disabled=${Boolean(sending.value)} onClick=${regenerate}>${t('chat.regenerate')}<//>`}
      <span class="dim">${[reason, rate].filter(Boolean).join(' · ')}</span>
    </div>`;
}

function Composer({ isReady }) {
  const { typed } = talk.value;
  const field = useRef(null);
  useLayoutEffect(() => {
    const element = field.current;
    element.style.height = 'auto';
    element.style.height = `${Math.min(element.scrollHeight + 2, innerHeight / 3)}px`;
  }, [typed]);
  const pressed = (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing || isTouch) return;
    event.preventDefault();
    if (isReady) send();
  };
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  return html`<form class="chat-composer" onSubmit=${submit}>
    <textarea ref=${field} class="input" rows="1" aria-label=${t('chat.message')} placeholder=${isTouch ? '' : t('chat.placeholder')}
      value=${typed} onInput=${(event) => say({ typed: event.target.value })} onKeyDown=${pressed}></textarea>
    ${sending.value
      ? html`<${Button} icon="stop" onClick=${stop}>${t('chat.stop')}<//>`
      : html`<button class="button button-primary" disabled=${!isReady || !typed.trim()}>${t('chat.send')}</button>`}
  </form>`;
}
