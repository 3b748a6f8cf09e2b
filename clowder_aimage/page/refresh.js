// What the page knows of the worker, asked again when it may have changed.

import { effect } from './html.js';
import { call } from './api.js';
import { loaded, models, online, scopes, worker } from './state.js';

const PAUSE = 10_000; // milliseconds

/** Ask what the worker is, which models it has and which of them are in memory. */
export async function refresh() {
  try {
    worker.value = await call('GET', '/v1/worker');
    if (!scopes.value.infer) return;
    const [known, sizes, memory] = await Promise.all([
      call('GET', '/v1/models'), call('GET', '/api/tags'), call('GET', '/api/ps'),
    ]);
    const facts = new Map(sizes.models.map((one) => [one.name, one]));
    models.value = known.data.map((one) => ({ ...facts.get(one.id), ...one }));
    loaded.value = memory.models;
  } catch {
    // The worker does not answer, which is shown, or refuses, which the next request shows
  }
}

/** Refresh now and then while the page is visible, and after a lost connection. Returns the end. */
export function watch() {
  const look = () => document.visibilityState === 'visible' && online.value && refresh();
  const timer = setInterval(look, PAUSE);
  document.addEventListener('visibilitychange', look);
  const stop = effect(() => void (online.value && queueMicrotask(look)));
  return () => {
    clearInterval(timer);
    document.removeEventListener('visibilitychange', look);
    stop();
  };
}
