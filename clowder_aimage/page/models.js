// The part Models: what the store has and what is in memory, and the ways to change both.

import { html, signal, useEffect, useState } from './html.js';
import { Button, Choice, Dialog, Empty, IconButton } from './controls.js';
import { Jobs, jobs } from './jobs.js';
import { bytes, t } from './lang.js';
import { Meters } from './meter.js';
import { Pulls, pull, pulls } from './pulls.js';
import { loaded, notice, online, scopes, worker } from './state.js';
import { doing, load, look, placeOf, removeName, stock, unload } from './stock.js';

const PAUSE = 5000; // milliseconds between two questions
const KINDS = ['image', 'text', 'embedder', 'adapter', 'controlnet', 'other'];
const RUNNABLE = ['image', 'text', 'embedder'];
const CHANGEABLE = ['image', 'text', 'embedder', 'controlnet'];
const FEW = 6; // entries that are shown without a search
// What only some need is loaded when it is needed
const LATER = {
  Fuse: () => import('./job_form.js'),
  Quantize: () => import('./job_form.js'),
  Referrers: () => import('./referrers.js'),
  Fleet: () => import('./fleet_panel.js'),
};
const parts = signal({ Removal });

async function need(name) {
  if (!parts.value[name]) parts.value = { ...parts.value, ...(await LATER[name]()) };
}

export function Models() {
  const [dialog, setDialog] = useState(null); // {name, one}
  const isFleet = Boolean(worker.value?.fleet); // which has no store of its own
  useEffect(() => {
    if (isFleet || !worker.value) return undefined;
    look();
    const timer = setInterval(() => document.visibilityState === 'visible' && online.value && look(), PAUSE);
    return () => clearInterval(timer);
  }, [online.value, loaded.value.length, isFleet, !worker.value]);
  useEffect(() => void (isFleet && need('Fleet').catch(() => {})), [isFleet, online.value]);
  const isAdmin = scopes.value.admin;
  const { Fleet, [dialog?.name]: Opened } = parts.value;
  const isKnown = isFleet || (stock.value !== null && (jobs.value !== null || !isAdmin)); // shown at once, so that nothing moves
  return html`<h1 class="hidden-text">${t('tab.models')}</h1>
  ${!isKnown && html`<p class="dim" role="status">${t('models.looking')}</p>`}
  <div class="models" hidden=${!isKnown}>
    <div class="models-side">
      <${Meters} />
      ${isAdmin && html`<${Pulls} />`}
      ${!isFleet && html`<${Jobs} />`}
      ${!isAdmin && html`<p class="dim models-note">${t('models.readOnly')}</p>`}
    </div>
    ${isFleet ? Fleet && html`<${Fleet} />` : html`<${Stock} onDialog=${setDialog} />`}
    ${Opened && html`<${Opened} one=${dialog.one} onClose=${() => setDialog(null)} />`}
  </div>`;
}

function Stock({ onDialog }) {
  const [words, setWords] = useState('');
  const [kind, setKind] = useState('all');
  if (stock.value === null) return null;
  const all = stock.value.data;
  if (!all.length) return html`<section class="panel"><${Empty} icon="models" title=${t('models.none')}>${t('models.noneText')}<//></section>`;
  const kinds = KINDS.filter((each) => all.some((one) => one.kind === each));
  const found = all.filter((one) => (kind === 'all' || one.kind === kind) && one.names.some((name) => name.toLowerCase().includes(words.toLowerCase())));
  found.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind) || a.names[0].localeCompare(b.names[0]));
  const options = ['all', ...kinds].map((value) => ({ value, label: t(`models.kinds.${value}`) }));
  return html`<section class="panel models-stock" aria-labelledby="models-stock">
    <div class="models-stock-head">
      <h2 id="models-stock">${t('models.stock')}</h2>
      ${kinds.length > 1 && html`<${Choice} label=${t('models.kind')} isLabelled=${false} value=${kind} options=${options} onChange=${setKind} />`}
      ${all.length > FEW && html`<input class="input models-search" type="search" placeholder=${t('models.search')}
        aria-label=${t('models.search')} value=${words} onInput=${(event) => setWords(event.target.value)} />`}
    </div>
    <ul class="models-list">${found.map((one) => html`<${Entry} key=${one.digest} ...${{ one, onDialog }} />`)}</ul>
    ${!found.length && html`<p class="dim">${t('models.noneFound')}</p>`}
  </section>`;
}

function Entry({ one, onDialog }) {
  const place = placeOf(one);
  const [name, ...others] = one.names;
  return html`<li class="models-one" data-name=${name}>
    <div class="models-about">
      <p class="models-line"><span class="models-name models-title">${name}</span></p>
      ${others.length > 0 && html`<p class="models-name dim">${t('models.also', { names: others.join(', ') })}</p>`}
      <p class="models-facts">
        <span class="models-kind">${t(`models.kind.${one.kind}`)}</span>
        ${one.precision && html`<span>${one.precision}</span>`}
        ${one.family && html`<span>${one.family}</span>`}
        <span>${bytes(one.size)}</span>
        ${one.shared > 0 && html`<span title=${t('models.sharedHint')}>${t('models.shared', { size: bytes(one.shared) })}</span>`}
      </p>
      ${place && html`<p class="models-loaded"><span class="models-dot" aria-hidden="true"></span>
        ${t('models.loaded', { size: bytes(place.size), device: place.device || '?' })}</p>`}
      ${one.missing.blobs > 0 && html`<p class="field-error">${t('models.missing', { n: one.missing.blobs, size: bytes(one.missing.size) })}</p>`}
    </div>
    <${Actions} ...${{ one, place, onDialog }} />
  </li>`;
}

function Actions({ one, place, onDialog }) {
  const { what, stop } = doing.value[one.digest] ?? {};
  const name = one.names[0];
  const isWhole = one.missing.blobs === 0;
  const { admin } = scopes.value;
  const open = (part) => () =>
    need(part).then(() => onDialog({ name: part, one }), () => notice(t('connection.lost'), { kind: 'bad' }));
  const isPulling = pulls.value.some((each) => each.name === name && !each.isOver);
  return html`<div class="models-actions" role="group" aria-label=${t('models.actions', { name })}>
    <span class="hidden-text" role="status">${what ? t(`models.${what}`) : ''}</span>
    ${RUNNABLE.includes(one.kind) && isWhole && !place && html`<${Button} disabled=${Boolean(what)} onClick=${() => load(one)}>${t(what ? `models.${what}` : 'models.load')}<//>`}
    ${what === 'loading' && html`<${IconButton} icon="close" label=${t('models.loadStop', { name })} onClick=${stop} />`}
    ${place && admin && html`<${Button} disabled=${Boolean(what)} onClick=${() => unload(one)}>${t(what ? `models.${what}` : 'models.unload')}<//>`}
    ${admin && !isWhole && html`<${Button} disabled=${isPulling} onClick=${() => pull(name)}>${t('models.complete')}<//>`}
    ${admin && isWhole && CHANGEABLE.includes(one.kind) && html`<${Button} kind="quiet" onClick=${open('Quantize')}>${t('models.quantize')}<//>`}
    ${admin && isWhole && one.kind === 'image' && html`<${Button} kind="quiet" onClick=${open('Fuse')}>${t('models.fuse')}<//>`}
    <${Button} kind="quiet" onClick=${open('Referrers')}>${t('models.referrers')}<//>
    ${admin && html`<${IconButton} icon="trash" label=${t('models.delete', { name })} disabled=${what === 'deleting'} onClick=${open('Removal')} />`}
  </div>`;
}

/** The dialog that asks before names of a model are removed. */
function Removal({ one, onClose }) {
  const [chosen, setChosen] = useState(one.names.length === 1 ? one.names : []);
  const isAll = chosen.length === one.names.length;
  const turn = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  const remove = async () => {
    onClose();
    for (const name of chosen) if (!(await removeName(one, name))) return;
  };
  return html`<${Dialog} title=${t('removal.title')} class="models-dialog" onClose=${onClose}>
    ${one.names.length === 1 ? html`<p class="models-name">${one.names[0]}</p>` : html`<p>${t('removal.which')}</p>
      ${one.names.map((name) => html`<label key=${name} class="models-check">
        <input type="checkbox" checked=${chosen.includes(name)} onChange=${() => turn(name)} /><span class="models-name">${name}</span></label>`)}`}
    ${chosen.length > 0 && html`<p>${isAll ? t('removal.frees', { size: bytes(one.unique) }) : t('removal.keeps')}</p>`}
    ${isAll && one.shared > 0 && html`<p class="dim">${t('removal.shared', { size: bytes(one.shared) })}</p>`}
    <div class="row models-dialog-end">
      <${Button} onClick=${onClose}>${t('removal.cancel')}<//>
      <${Button} kind="danger" icon="trash" disabled=${!chosen.length} onClick=${remove}>${t('removal.go')}<//>
    </div>
  <//>`;
}
