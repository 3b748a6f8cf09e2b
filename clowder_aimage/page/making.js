// The request that is being made: its state, its start and its end. It goes on while other tabs are shown.

import { effect, signal } from './html.js';
import { ApiError, ConnectionError } from './api.js';
import { FIELDS, generate, inSlot } from './generation.js';
import { t } from './lang.js';
import { refresh } from './refresh.js';
import { change, chosen, draft, notice, online } from './state.js';
import { seedAfter } from './setting.js';
import { objectOf, TEXT, WHOLE } from './shape.js';
import { readTab, remember, writeTab } from './storage.js';

const DRAWN = 2 ** 32; // seeds of which one is drawn
const LONGEST = 5; // seconds between two tries: the queue may be shorter than was expected
const AGAIN = ['overloaded', 'unavailable', 'store_busy']; // refusals of a worker that will accept it later

const before = readTab('making', objectOf({ prompt: TEXT, n: WHOLE }));

/**
 * What is being made, or was made last; null before the first.
 *
 * phase: 'slot', 'sent', 'queued' {ahead}, 'pulling' {completed, total}, 'loading', 'started',
 * 'progress' {step, total, left}, 'full' {until}, 'offline', 'done', 'cancelled', 'failed' {message},
 * 'interrupted'. preview is a Blob, entries are pictures, warnings are sentences.
 */
export const run = signal(before ? { ...blank(before), phase: 'interrupted' } : null);

const ENDED = ['done', 'cancelled', 'failed', 'interrupted'];
export const isRunning = () => run.value !== null && !ENDED.includes(run.value.phase);

let control = null;

function blank(value) {
  return { draft: value, phase: 'sent', preview: null, entries: [], warnings: [], begun: Date.now() };
}

const set = (fields) => (run.value = { ...run.value, ...fields });

/** Return a random seed. */
export const drawSeed = () => Math.floor(Math.random() * DRAWN);

/** Make the pictures of the draft. */
export async function start() {
  if (isRunning()) return;
  const seed = draft.value.seedLocked && draft.value.seed !== null ? draft.value.seed : drawSeed();
  change({ seed, errors: {} });
  remember(draft.value.prompt, draft.value.negative);
  run.value = blank({ ...draft.value, model: chosen.value?.id ?? draft.value.model });
  writeTab('making', { prompt: draft.value.prompt, n: draft.value.n });
  control = new AbortController();
  await untilDone(run.value.draft, control.signal);
  writeTab('making', null);
  refresh(); // which models are in memory
}

/** End the request. */
export const cancel = () => control?.abort();

async function untilDone(value, signal) {
  for (;;) {
    try {
      await attempt(value, signal);
      return set({ phase: 'done', preview: null, seconds: (Date.now() - run.value.begun) / 1000 });
    } catch (error) {
      if (signal.aborted) return set({ phase: 'cancelled', preview: null });
      if (!(await worthAnother(error, signal))) return signal.aborted ? set({ phase: 'cancelled' }) : fail(error);
    }
  }
}

/** Make the pictures that an earlier attempt has not kept, with the prompt that was written for it. */
async function attempt(value, signal) {
  const count = run.value.entries.length;
  if (count && count >= value.n) return undefined;
  const rest = count ? { ...run.value.draft, n: value.n - count, seed: seedAfter(value.seed, count) } : value;
  set({ phase: 'slot', preview: null, warnings: [], first: null });
  return inSlot(signal, () => {
    set({ phase: 'sent' });
    return generate(rest, { signal, onEvent });
  });
}

/** Wait until the worker may accept the request; return false if it will not. */
async function worthAnother(error, signal) {
  if (error instanceof ConnectionError) {
    set({ phase: 'offline', preview: null });
    return until(signal, (done) => effect(() => void (online.value && queueMicrotask(done))));
  }
  if (!(error instanceof ApiError) || error.status !== 503 || !AGAIN.includes(error.code)) return false;
  const pause = Math.min(error.retryAfter ?? 5, LONGEST) * 1000;
  set({ phase: 'full', until: Date.now() + pause, message: error.message });
  return until(signal, (done) => {
    const timer = setTimeout(done, pause);
    return () => clearTimeout(timer);
  });
}

/** Wait until `begin` calls its argument, or the signal is aborted; return whether it was called. */
function until(signal, begin) {
  return new Promise((settle) => {
    const end = begin(() => finish(true));
    const finish = (value) => {
      queueMicrotask(() => end?.());
      settle(value);
    };
    signal.addEventListener('abort', () => finish(false), { once: true });
  });
}

function fail(error) {
  const field = FIELDS[error.field?.replace(/[[.].*/, '')] ?? null;
  if (field) change({ errors: { ...draft.value.errors, [field]: error.message } });
  set({ phase: 'failed', preview: null, message: error.message, field });
}

function onEvent({ kind, ...facts }) {
  if (kind === 'progress') return set({ phase: 'progress', ...measured(facts) });
  if (kind === 'preview') return set({ preview: facts.blob });
  if (kind === 'prompt') return wrote({ enhanced: facts.prompt, enhancedFrom: run.value.draft.prompt, enhancedBy: facts.enhancer });
  if (kind === 'picture') return took(facts);
  if (['queued', 'pulling', 'loading', 'started'].includes(kind)) set({ phase: kind, ...facts });
  return undefined;
}

function wrote(prompts) {
  set({ draft: { ...run.value.draft, ...prompts } });
  change(prompts);
}

/** Return the steps with the seconds that are left, by the time of the steps since the first. */
function measured({ step, total }) {
  const first = run.value.first ?? { step, at: performance.now() };
  const done = step - first.step;
  const each = done ? (performance.now() - first.at) / done : null;
  return { step, total, first, left: each === null ? null : (each * (total - step)) / 1000 };
}

function took({ entry, warnings }) {
  if (entry.id === null) notice(t('make.not-kept'), { kind: 'bad' });
  set({ entries: [...run.value.entries, entry], preview: null, warnings });
}
