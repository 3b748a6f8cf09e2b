// What is being made: its state, its preview, and the pictures when they are done.

import { html, useEffect, useState } from './html.js';
import { pictureUrl } from './api.js';
import { Bar, Button, Empty } from './controls.js';
import { bytes, duration, t, worded } from './lang.js';
import { isRunning, run, start } from './making.js';
import { ResultActions } from './result_actions.js';
import { chosen, draft, models, online, scopes, show, worker } from './state.js';

export function Preview() {
  const now = run.value;
  if (now === null) return html`<section class="make-stage" aria-label=${t('make.result')}><${Start} /></section>`;
  return html`<section class="make-stage" aria-label=${t('make.result')}>
    <${State} now=${now} />
    <${Pictures} now=${now} />
    ${now.warnings.map((one) => html`<p key=${one} class="make-warning">${worded(null, one)}</p>`)}
  </section>`;
}

/** What to do first: write, or get a model. */
function Start() {
  const isKnown = worker.value !== null && online.value;
  if (isKnown && models.value.length && !chosen.value && draft.value.model) return html`<${Empty} icon="models" title=${t('make.model-gone')} />`;
  if (isKnown && models.value && !chosen.value) {
    return html`<${Empty} icon="models" title=${t('make.no-model')}>
      <p>${t(scopes.value.admin ? 'make.no-model-admin' : 'make.no-model-other')}</p>
      ${scopes.value.admin && html`<${Button} kind="primary" onClick=${() => show('models')}>${t('make.to-models')}<//>`}
    <//>`;
  }
  return html`<${Empty} icon="make" title=${t('make.empty')}><p>${t('make.empty-text')}</p><//>`;
}

function State({ now }) {
  const isActive = isRunning();
  return html`<div class="make-state">
    <p role="status" class=${now.phase === 'failed' ? 'make-state-bad' : ''}>${words(now)}<${Countdown} now=${now} /></p>
    ${isActive && html`<${Bar} value=${share(now)} label=${t('make.progress')} text=${words(now)} />`}
    ${now.phase === 'interrupted' && html`<div class="row"><${Button} icon="again" onClick=${start}>${t('make.resume')}<//></div>`}
  </div>`;
}

function words(now) {
  const { phase } = now;
  if (phase === 'queued') return now.ahead ? t('make.queued', { n: now.ahead }) : t('make.next');
  if (phase === 'pulling') return t('make.pulling', { done: bytes(now.completed), total: bytes(now.total) });
  if (phase === 'progress') return t('make.step', { step: now.step, total: now.total }) + (now.left === null ? '' : ` · ${t('make.left', { time: duration(now.left) })}`);
  if (phase === 'done') return t(now.entries.length === 1 ? 'make.done' : 'make.done-n', { n: now.entries.length, time: duration(now.seconds) });
  if (phase === 'failed') return now.field ? t('make.failed-field') : t('make.failed');
  return t(`make.${phase}`);
}

function share(now) {
  if (now.phase === 'progress') return now.step / now.total;
  if (now.phase === 'pulling' && now.total) return now.completed / now.total;
  return null;
}

/** The seconds until the next try at a full worker. */
function Countdown({ now }) {
  const [, tick] = useState(0);
  useEffect(() => {
    if (now.phase !== 'full') return undefined;
    const timer = setInterval(() => tick((each) => each + 1), 1000);
    return () => clearInterval(timer);
  }, [now.phase]);
  return now.phase === 'full' ? ` ${t('make.full-again', { time: duration((now.until - Date.now()) / 1000) })}` : null;
}

function Pictures({ now }) {
  const [at, setAt] = useState(null);
  const { entries, preview } = now;
  useEffect(() => setAt(null), [now.begun]);
  const index = Math.min(at ?? entries.length - 1, entries.length - 1);
  const shown = preview && at === null ? null : entries[index];
  const blob = shown?.blob ?? preview;
  const frame = ratio(shown?.facts.width ? shown.facts : now.draft);
  if (!blob) return html`<div class="make-frame" style=${frame} aria-hidden="true"></div>`;
  return html`
    <figure class="make-frame" style=${frame}>
      <img class=${shown ? 'make-picture' : 'make-picture make-forming'} src=${pictureUrl(blob)}
        alt=${shown ? t('make.alt', { prompt: shown.facts.prompt ?? now.draft.prompt }) : t('make.alt-preview')} />
    </figure>
    ${entries.length > 1 && html`<div class="make-strip" role="group" aria-label=${t('make.pictures')}>
      ${entries.map((one, place) => html`<button key=${one.made + place} type="button" class="make-thumb" aria-pressed=${place === index && shown ? 'true' : 'false'}
        aria-label=${t('make.show', { n: place + 1 })} onClick=${() => setAt(place)}><img src=${pictureUrl(one.blob)} alt="" /></button>`)}
    </div>`}
    ${shown && html`<${ResultActions} entry=${shown} />`}`;
}

/** The frame of a picture: its aspect, as large as the window has room for. */
function ratio({ width, height }) {
  const own = chosen.value?.defaults;
  const aspect = (width ?? own?.width ?? 1) / (height ?? own?.height ?? 1);
  return { aspectRatio: String(aspect), maxWidth: `calc(var(--room) * ${aspect})` };
}
