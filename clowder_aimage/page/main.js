// Starts the page: its frame, its tabs, and what it knows of the worker.

import { html, render, signal, useEffect } from './html.js';
import { IconButton } from './controls.js';
import { DropAnywhere } from './drop_anywhere.js';
import { Header } from './header.js';
import { Make } from './make.js';
import { t } from './lang.js';
import { keepDraftPictures } from './picture_draft.js';
import { isAsked, refresh, watch } from './refresh.js';
import { dismiss, notices, online, scopes, tab, token, worker } from './state.js';
import { SignIn } from './sign_in.js';

const LATER = { gallery: 'Gallery', models: 'Models', chat: 'Chat' };
const parts = signal({ make: Make });

/** Load a part: when it is shown, or when the browser has nothing else to do. */
async function load(name) {
  if (parts.value[name]) return;
  const module = await import(`./${name}.js`);
  parts.value = { ...parts.value, [name]: module[LATER[name]] };
}

/** Load the other parts after the answers of the worker, so that they are there also while it is not. */
async function loadAll() {
  for (const name of Object.keys(LATER)) await load(name).catch(() => {});
}

// Messages at the edge of the page.
function Notices() {
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.value.map((one) => html`<div key=${one.id} class=${`notice notice-${one.kind}`}>
      <p>${one.text}</p>
      <${IconButton} icon="close" size=${16} label=${t('dialog.close')} onClick=${() => dismiss(one.id)} />
    </div>`)}
  </div>`;
}

function Page() {
  useEffect(watch, []);
  useEffect(() => void keepDraftPictures(), []);
  useEffect(() => void (online.value && refresh()), [token.value, online.value]);
  useEffect(() => void load(tab.value).catch(() => {}), [tab.value, online.value]);
  useEffect(() => void (isAsked.value && (self.requestIdleCallback ?? setTimeout)(loadAll)), [isAsked.value]);
  const Part = parts.value[tab.value];
  const isOut = worker.value && !scopes.value.infer;
  return html`<${Header} />
    <main class=${`main main-${tab.value}`} id="main" tabindex="-1">
      ${isOut ? html`<${SignIn} />` : Part && isAsked.value && html`<${Part} />`}
    </main>
    <${DropAnywhere} />
    <${Notices} />`;
}

render(html`<${Page} />`, document.getElementById('page'));
