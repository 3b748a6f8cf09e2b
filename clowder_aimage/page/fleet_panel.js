// A fleet behind a gateway: its workers, what they have, and the jobs that wait.

import { html, useEffect, useState } from './html.js';
import { call } from './api.js';
import { t } from './lang.js';
import { online } from './state.js';

const PAUSE = 2000; // milliseconds between two questions

/** The panel; nothing until the gateway has answered `GET /v1/fleet`. */
export function Fleet() {
  const [fleet, setFleet] = useState(null);
  useEffect(() => {
    const look = () => call('GET', '/v1/fleet').then(setFleet, () => {}); // a lost connection is shown
    look();
    const timer = setInterval(() => document.visibilityState === 'visible' && online.value && look(), PAUSE);
    return () => clearInterval(timer);
  }, [online.value]);
  if (!fleet) return null;
  const rate = fleet.workers.reduce((sum, one) => sum + one.rate, 0);
  return html`<section class="panel models-stock" aria-labelledby="models-fleet">
    <h2 id="models-fleet">${t('fleet.title', { name: fleet.fleet })}</h2>
    <p class="models-facts"><span>${t('fleet.jobs', { n: fleet.jobs })}</span>
      <span>${t('fleet.rate', { n: rate })}</span>
    </p>
    <ul class="models-list">${fleet.workers.map((one) => html`<${Member} key=${one.id} one=${one} />`)}</ul>
  </section>`;
}

function Member({ one }) {
  const names = Object.entries(one.models).map(([name, digest]) => (one.loaded.includes(digest) ? t('fleet.loaded', { name }) : name));
  return html`<li class="models-one" data-name=${one.id}>
    <div class="models-about">
      <p class="models-line"><span class="models-name models-title">${one.id}</span></p>
      <p class="models-facts">${one.is_draining && html`<span class="models-kind">${t('fleet.draining')}</span>`}
        <span>${t('fleet.running', { n: one.running, most: one.slots })}</span></p>
      <p class="models-name dim">${names.join(', ')}</p>
    </div>
  </li>`;
}
