// The sign-in field. The token is kept for this tab, and checked by what the worker allows with it.

import { html, useState } from './html.js';
import { Button, Dialog, Field } from './controls.js';
import { t } from './lang.js';
import { refresh } from './refresh.js';
import { scopes, token, worker } from './state.js';

function SignInForm({ onDone }) {
  const [text, setText] = useState('');
  const [error, setError] = useState('');
  const submit = async (event) => {
    event.preventDefault();
    token.value = text.trim();
    await refresh();
    if (scopes.value.infer) onDone?.();
    else setError(t('access.unknown'));
  };
  return html`<form class="stack" onSubmit=${submit}>
    <${Field} label=${t('access.token')} hint=${t('access.hint')} error=${error}>
      ${(link) => html`<input ...${link} class="input" type="password" autocomplete="off" spellcheck=${false}
        value=${text} onInput=${(event) => setText(event.target.value)} />`}
    <//>
    <div class="row"><button class="button button-primary" disabled=${!text.trim()}>${t('access.enter')}</button></div>
  </form>`;
}

/** The page for those who have no access yet. */
export function SignIn() {
  return html`<section class="panel sign-in">
    <h1>${t('access.title')}</h1>
    <p class="dim">${t('access.needed')}</p>
    <${SignInForm} />
  </section>`;
}

/** The dialog to change the token. */
export function SignInDialog({ onClose }) {
  const scope = worker.value?.scope;
  const leave = () => {
    token.value = '';
    refresh();
    onClose();
  };
  return html`<${Dialog} title=${t('access.title')} onClose=${onClose}>
    <p>${scope ? t(`access.scope.${scope}`) : t('access.needed')}</p>
    <${SignInForm} onDone=${onClose} />
    ${token.value && html`<div class="row"><${Button} kind="quiet" onClick=${leave}>${t('access.leave')}<//></div>`}
  <//>`;
}
