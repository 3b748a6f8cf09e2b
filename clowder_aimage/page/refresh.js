// What the page knows of the worker, asked again when it may have changed.

import { batch, signal } from './html.js';
import { call } from './api.js';
import { loaded, mayInfer, models, online, worker } from './state.js';

const PAUSE = 10_000; // milliseconds
const LATE = 1000; // milliseconds after which the page is shown without answers

/** Whether the worker has been asked: parts are shown with what it has answered, so that nothing moves. */
export const isAsked = signal(false);

/** Ask what the worker is, which models it has and which of them are in memory. */
export async function refresh() {
  let found = worker.value, lists = null;
  try {
    found = await call('GET', '/v1/worker');
    if (mayInfer(found)) lists = await Promise.all(['/v1/models', '/api/tags', '/api/ps'].map((path) => call('GET', path)));
  } catch {
    // The worker does not answer, which is shown, or refuses, which the next request shows
  }
  batch(() => {
    worker.value = found;
    isAsked.value = true;
    if (!lists) return;
    const [known, sizes, memory] = lists;
    const facts = new Map(sizes.models.map((one) => [one.name, one]));
    models.value = known.data.map((one) => ({ ...facts.get(one.id), ...one }));
    loaded.value = memory.models;
  });
}

/** Refresh now and then while the page is visible. Returns the end. */
export function watch() {
  const look = () => document.visibilityState === 'visible' && online.value && refresh();
  const timer = setInterval(look, PAUSE);
  document.addEventListener('visibilitychange', look);
  setTimeout(() => (isAsked.value = true), LATE);
  return () => {
    clearInterval(timer);
    document.removeEventListener('visibilitychange', look);
  };
}
