// Pulls that this tab has begun: progress, time left, cancel. They go on while other parts are shown.

import { html, signal } from './html.js';
import { events } from './api.js';
import { Bar, Button, Field, IconButton } from './controls.js';
import { bytes, duration, t } from './lang.js';
import { refresh } from './refresh.js';
import { notice } from './state.js';
import { look } from './stock.js';
import { TEXT } from './shape.js';
import { readTab, writeTab } from './storage.js';

const WINDOW = 8000; // milliseconds over which the rate is measured

/** The pulls: {id, name, status, completed, size, rate, isOver, error, stop}. */
export const pulls = signal([]);
let count = 0;

const typed = signal(readTab('pull', TEXT, '')); // a name; it survives a reload
const type = (name) => writeTab('pull', (typed.value = name));

function update(id, fields) {
  pulls.value = pulls.value.map((one) => (one.id === id ? { ...one, ...fields } : one));
}

const forget = (id) => (pulls.value = pulls.value.filter((one) => one.id !== id));

/** Pull a model, and show its progress; a second pull of a name joins the first one. */
export async function pull(name) {
  if (pulls.value.some((one) => one.name === name && !one.isOver)) return;
  const controller = new AbortController();
  const id = ++count;
  const one = { id, name, status: '', completed: 0, size: 0, rate: 0, isOver: false, error: '', stop: () => controller.abort() };
  pulls.value = [...pulls.value.filter((each) => each.name !== name), one];
  try {
    await follow(id, events('/api/pull', { model: name }, { signal: controller.signal }));
    forget(id);
    notice(t('models.pulled', { name }), { kind: 'good' });
  } catch (error) {
    if (error.name === 'AbortError') forget(id);
    else update(id, { isOver: true, error: error.message });
  }
  await Promise.all([look(), refresh()]);
}

/** Note the lines of a pull. */
async function follow(id, lines) {
  const blobs = new Map();
  const passed = [[performance.now(), 0]];
  for await (const { data } of lines) {
    if (data.digest) blobs.set(data.digest, data.completed);
    const completed = [...blobs.values()].reduce((sum, each) => sum + each, 0);
    const now = performance.now();
    passed.push([now, completed]);
    while (passed.length > 2 && now - passed[0][0] > WINDOW) passed.shift();
    const rate = (1000 * (completed - passed[0][1])) / Math.max(now - passed[0][0], 100);
    update(id, { status: data.status, completed, rate, ...(data.size ? { size: data.size } : {}) });
  }
}

/** The field for a name, and the pulls. */
export function Pulls() {
  const name = typed.value;
  const submit = (event) => {
    event.preventDefault();
    pull(name.trim());
    type('');
  };
  return html`<section class="panel models-pull" aria-labelledby="models-pull">
    <h2 id="models-pull">${t('models.pull')}</h2>
    <form class="models-pull-form" onSubmit=${submit}>
      <${Field} label=${t('models.pullName')} hint=${t('models.pullHint')}>
        ${(link) => html`<input ...${link} class="input" autocomplete="off" autocapitalize="off" spellcheck=${false}
          placeholder="registry.example.com/team/model:v1" value=${name} onInput=${(event) => type(event.target.value)} />`}
      <//>
      <button class="button button-primary" disabled=${!name.trim()}>${t('models.pullGo')}</button>
    </form>
    ${pulls.value.length > 0 && html`<ul class="models-pulls">
      ${pulls.value.map((one) => html`<${Progress} key=${one.id} one=${one} />`)}
    </ul>`}
  </section>`;
}

function Progress({ one }) {
  const share = one.size ? Math.min(1, one.completed / one.size) : null;
  const left = one.rate > 0 && one.size ? duration((one.size - one.completed) / one.rate) : '';
  const text = one.size ? t('models.pulling', { done: bytes(one.completed), size: bytes(one.size) }) : t('models.resolving');
  const more = one.rate > 0 && share < 1 ? t('models.pullRate', { rate: bytes(one.rate), left }) : '';
  return html`<li class="models-pull-one">
    <div class="models-line">
      <span class="models-name">${one.name}</span>
      ${one.error ? html`<${Button} icon="again" onClick=${() => pull(one.name)}>${t('models.again')}<//>` : ''}
      <${IconButton} icon="close" label=${t(one.error ? 'models.dismiss' : 'models.pullStop', { name: one.name })}
        onClick=${() => (one.error ? forget(one.id) : one.stop())} />
    </div>
    ${one.error ? html`<p class="field-error" role="alert">${one.error}</p>`
      : html`<${Bar} value=${share} label=${t('models.pullOf', { name: one.name })} text=${text} />
        <p class="models-line dim"><span>${text}</span><span>${more}</span></p>`}
  </li>`;
}
