// The dialog with the artifacts that refer to a model: pictures, signatures, variants, adapters.

import { html, useEffect, useState } from './html.js';
import { call } from './api.js';
import { Button, Dialog } from './controls.js';
import { bytes, t } from './lang.js';
import { scopes } from './state.js';
import { hasRegistry } from './stock.js';

const KINDS = ['signature', 'attestation', 'sbom', 'pictures', 'variant', 'adapter', 'controlnet', 'image', 'text', 'embedder', 'aimage', 'other'];
const TITLES = ['org.opencontainers.image.title', 'org.opencontainers.image.description', 'vnd.clowder.aimage.variant'];

export function Referrers({ one, onClose }) {
  const name = one.names[0];
  const remote = one.names.find(hasRegistry);
  const [found, setFound] = useState(null);
  const [error, setError] = useState('');
  const [isAsking, setAsking] = useState(false);
  const ask = async (where) => {
    setError('');
    setAsking(true);
    try {
      const query = new URLSearchParams(where ? { model: remote, registry: 'true' } : { model: name });
      setFound((await call('GET', `/v1/referrers?${query}`)).data);
    } catch (failed) {
      setError(failed.message);
    }
    setAsking(false);
  };
  useEffect(() => void ask(false), [name]);
  return html`<${Dialog} title=${t('referrers.title')} class="models-dialog" onClose=${onClose}>
    <p class="models-name">${name}</p>
    <p class="dim">${t('referrers.about')}</p>
    ${error && html`<p class="field-error" role="alert">${error}</p>`}
    ${found?.length === 0 && html`<p>${t('referrers.none')}</p>`}
    ${found?.length > 0 && html`<ul class="models-referrers">
      ${sorted(found).map((each) => html`<${Referrer} key=${each.digest + each.name} each=${each} />`)}
    </ul>`}
    ${scopes.value.admin && remote && html`<div class="row">
      <${Button} icon="again" disabled=${isAsking} onClick=${() => ask(true)}>${t('referrers.registry')}<//>
      ${isAsking && html`<span class="dim" role="status">${t('referrers.asking')}</span>`}
    </div>`}
  <//>`;
}

const sorted = (list) => [...list].sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));

function Referrer({ each }) {
  const title = TITLES.map((key) => each.annotations[key]).find(Boolean);
  const kind = KINDS.includes(each.kind) ? each.kind : 'other';
  return html`<li class="models-referrer">
    <div class="models-line">
      <span class="models-kind">${t(`referrers.kind.${kind}`)}</span>
      <span class="models-name">${each.name ?? t('referrers.inRegistry')}</span>
    </div>
    ${title && html`<p>${title}</p>`}
    <p class="dim mono">${each.artifact_type ?? t('referrers.noType')}</p>
    <p class="dim mono">${each.digest.slice(0, 19)}… · ${bytes(each.size)}</p>
  </li>`;
}
