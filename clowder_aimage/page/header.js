// The header: tabs, the state of the connection, language, theme and access.

import { html, signal, useState } from './html.js';
import { IconButton } from './controls.js';
import { Icon } from './icons.js';
import { language, LANGUAGES, speak, t } from './lang.js';
import { online, tab, TABS, theme, token } from './state.js';
import { SignInDialog } from './sign_in.js';

const ICONS = { make: 'make', gallery: 'gallery', models: 'models', chat: 'chat' };

export function Header() {
  const [isSigningIn, setSigningIn] = useState(false);
  return html`<header class="header">
    <a class="skip" href="#main" onClick=${skip}>${t('header.skip')}</a>
    <a class="header-name" href="#make">aimage</a>
    <nav class="tabs" aria-label=${t('header.parts')}>
      ${TABS.map((name) => html`<a key=${name} href=${`#${name}`} class="tab" title=${t(`tab.${name}`)}
        aria-current=${tab.value === name ? 'page' : undefined}>
        <${Icon} name=${ICONS[name]} /><span>${t(`tab.${name}`)}</span>
      </a>`)}
    </nav>
    <div class="header-end">
      <${Connection} />
      <${Language} />
      <${Theme} />
      ${token.value && html`<${IconButton} icon="key" label=${t('access.title')} onClick=${() => setSigningIn(true)} />`}
    </div>
    ${isSigningIn && html`<${SignInDialog} onClose=${() => setSigningIn(false)} />`}
  </header>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById('main').focus();
}

function Connection() {
  const text = online.value ? '' : t('connection.retrying');
  return html`<span class="connection" role="status">${text && html`<${Icon} name="warning" size=${16} /> ${text}`}</span>`;
}

function Language() {
  const next = language.value === 'en' ? 'de' : 'en';
  return html`<button type="button" class="icon-button header-language" lang=${next} title=${LANGUAGES[next]}
    aria-label=${t('header.language', { name: LANGUAGES[next], code: next.toUpperCase() })} onClick=${() => speak(next).catch(() => {})}>
    ${next.toUpperCase()}
  </button>`;
}

const system = matchMedia('(prefers-color-scheme: dark)');
const isSystemDark = signal(system.matches);
system.addEventListener('change', () => (isSystemDark.value = system.matches));

function Theme() {
  const isDark = theme.value === 'dark' || (theme.value === 'system' && isSystemDark.value);
  return html`<${IconButton} icon=${isDark ? 'sun' : 'moon'} label=${t(isDark ? 'header.light' : 'header.dark')}
    onClick=${() => (theme.value = isDark ? 'light' : 'dark')} />`;
}
