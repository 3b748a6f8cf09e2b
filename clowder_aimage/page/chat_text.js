// The text of an answer: paragraphs and blocks of code. Everything is a text node, nothing is HTML.

import { html } from './html.js';
import { IconButton } from './controls.js';
import { t } from './lang.js';
import { copyText } from './picture_file.js';
import { notice } from './state.js';

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;

/** Split a text into {kind: 'text' or 'code', text, language}; a block without an end is code. */
export function partsOf(text) {
  const parts = [];
  let lines = [], fence = null;
  const close = (kind, language = '') => {
    const own = lines.join('\n');
    if (kind === 'code' || own.trim()) parts.push({ kind, text: kind === 'code' ? own : own.replace(/^\n+|\s+$/g, ''), language });
    lines = [];
  };
  for (const line of text.split('\n')) {
    const found = FENCE.exec(line);
    if (!fence && found) {
      close('text');
      fence = { mark: found[1], language: found[2].trim().split(/\s/)[0] };
    } else if (fence && found && found[1].startsWith(fence.mark) && !found[2]) {
      close('code', fence.language);
      fence = null;
    } else lines.push(line);
  }
  close(fence ? 'code' : 'text', fence?.language);
  return parts;
}

/** A text with its blocks of code, and `code` in lines. */
export function ChatText({ text }) {
  return html`${partsOf(text).map((part, index) => (part.kind === 'code'
    ? html`<${Code} key=${index} ...${part} />`
    : html`<div key=${index} class="chat-text">${inline(part.text)}</div>`))}`;
}

/** Return a text with the words between single backquotes as code. */
const inline = (text) => text.split(/`([^`\n]+)`/g).map((piece, index) => (index % 2 ? html`<code>${piece}</code>` : piece));

function Code({ text, language }) {
  return html`<figure class="chat-code">
    <figcaption><span>${language || t('chat.code')}</span>
      <${IconButton} icon="copy" size=${15} label=${t('chat.copyCode')} onClick=${() => copyAloud(text)} /></figcaption>
    <pre tabindex="0" aria-label=${t('chat.codeIn', { language: language || t('chat.code') })}><code>${text}</code></pre>
  </figure>`;
}

/** Copy a text, and say so. */
export async function copyAloud(text) {
  if (await copyText(text)) notice(t('facts.copied'));
  else notice(t('facts.notCopied'), { kind: 'bad' });
}
