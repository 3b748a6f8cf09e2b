// What the worker's store has, and the changes of it that need no job.

import { signal } from './html.js';
import { call } from './api.js';
import { t } from './lang.js';
import { refresh } from './refresh.js';
import { loaded, notice } from './state.js';

const SOON = 300; // milliseconds after which a change shows in the figures

/** What `GET /v1/store` says; null until it has answered. */
export const stock = signal(null);

/** What is being done with a model, by its digest: {what, stop}; what is 'loading', 'unloading' or 'deleting'. */
export const doing = signal({});

/** Return whether a name begins with the host of a registry. */
export const hasRegistry = (name) => /^([^/]*[.:][^/]*|localhost)\//.test(name);

/** Short names of this store are shown before those of registries. */
const weight = (name) => name.length + (hasRegistry(name) ? 1000 : 0);

/** Ask what the store has. */
export async function look() {
  try {
    const found = await call('GET', '/v1/store');
    for (const one of found.data) one.names.sort((a, b) => weight(a) - weight(b) || a.localeCompare(b));
    stock.value = found;
  } catch {
    // A lost connection is shown; the figures are asked again
  }
}

/** Return the place of a manifest in memory: an entry of `GET /api/ps`, or undefined. */
export const placeOf = (one) => loaded.value.find((each) => `sha256:${each.digest}` === one.digest || each.digest === one.digest);

async function act(one, what, request) {
  const controller = new AbortController();
  doing.value = { ...doing.value, [one.digest]: { what, stop: () => controller.abort() } };
  setTimeout(look, SOON);
  try {
    return await request(controller.signal);
  } catch (error) {
    if (error.name !== 'AbortError') notice(t(`models.failed.${what}`, { name: one.names[0], reason: error.message }), { kind: 'bad' });
    return null;
  } finally {
    const { [one.digest]: _, ...rest } = doing.value;
    doing.value = rest;
    await Promise.all([look(), refresh()]);
  }
}

/** Load a model into memory. */
export const load = (one) =>
  act(one, 'loading', (signal) => call('POST', '/api/generate', { body: { model: one.names[0], stream: false }, signal }));

/** Unload a model, after its running requests. */
export const unload = (one) =>
  act(one, 'unloading', () => call('POST', '/api/generate', { body: { model: one.names[0], keep_alive: 0, stream: false } }));

/** Remove a name, and the blobs that nothing else needs; return whether it was removed. */
export async function removeName(one, name) {
  const removed = await act(one, 'deleting', async () => {
    await call('DELETE', '/api/delete', { body: { model: name } });
    return true;
  });
  if (removed) notice(t('models.deleted', { name }), { kind: 'good' });
  return Boolean(removed);
}
