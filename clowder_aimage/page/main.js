// Starts the page: its frame, its tabs, and what it knows of the worker.

import { html, render, useEffect } from './html.js';
import { Chat } from './chat.js';
import { DropAnywhere } from './drop_anywhere.js';
import { Gallery } from './gallery.js';
import { Header } from './header.js';
import { Make } from './make.js';
import { Models } from './models.js';
import { Notices } from './notices.js';
import { keepDraftPictures } from './picture_draft.js';
import { refresh, watch } from './refresh.js';
import { scopes, tab, token, worker } from './state.js';
import { SignIn } from './sign_in.js';

const PARTS = { make: Make, gallery: Gallery, models: Models, chat: Chat };

function Page() {
  useEffect(watch, []);
  useEffect(() => void keepDraftPictures(), []);
  useEffect(() => void refresh(), [token.value]);
  const Part = PARTS[tab.value];
  const isOut = worker.value && !scopes.value.infer;
  return html`<${Header} />
    <main class=${`main main-${tab.value}`} id="main" tabindex="-1">
      ${isOut ? html`<${SignIn} />` : html`<${Part} />`}
    </main>
    <${DropAnywhere} />
    <${Notices} />`;
}

render(html`<${Page} />`, document.getElementById('page'));
