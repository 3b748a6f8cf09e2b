// The run of a grid: pictures of one draft in which two settings vary, made one after another.
//
// It goes on while other parts of the page are shown.

import { effect, signal } from './html.js';
import { generate, inSlot } from './generation.js';
import { t } from './lang.js';
import { readValue, readValues, withSetting } from './setting.js';
import { online } from './state.js';

/** The most pictures of a grid. */
export const MOST_CELLS = 100;
const TRIES = 5; // while the queue of the worker is full, or it does not answer

/** What a grid varies: {draft, name}; null while none is shown. */
export const gridBase = signal(null);

/** The run: {across, down, cells, done, isRunning, begun, draft}; an axis is {name, values}. */
export const gridRun = signal(null);
let abort = null;

/** Return an axis of a setting and written values; `wrong` are the values that it cannot have. */
export function readAxis(name, written) {
  if (!name) return { name: '', values: [null], wrong: [] };
  const texts = [...new Set(readValues(name, written))];
  const values = texts.map((text) => readValue(name, text));
  return { name, values: values.filter((value) => value !== null), wrong: texts.filter((_, index) => values[index] === null) };
}

/** Return the cells of two axes, row by row: {row, column, draft, state}. All have the same seed unless it varies. */
export function cellsOf(draft, across, down) {
  const seed = draft.seedLocked && draft.seed !== null ? draft.seed : crypto.getRandomValues(new Uint32Array(1))[0];
  const base = { ...draft, seed, seedLocked: true, n: 1, previews: 0 };
  const set = (from, axis, value) => (axis.name ? withSetting(from, axis.name, value) : from);
  return down.values.flatMap((high, row) =>
    across.values.map((wide, column) => ({ row, column, state: 'waiting', draft: set(set(base, across, wide), down, high) })));
}

const update = (fields) => (gridRun.value = { ...gridRun.value, ...fields });

function updateCell(index, fields) {
  const cells = [...gridRun.value.cells];
  cells[index] = { ...cells[index], ...fields };
  update({ cells, done: cells.filter((cell) => cell.state === 'made' || cell.state === 'failed').length });
}

/** Make a grid. */
export async function runGrid(draft, across, down) {
  abort?.abort();
  abort = new AbortController();
  const { signal: stop } = abort;
  gridRun.value = { across, down, cells: cellsOf(draft, across, down), done: 0, isRunning: true, begun: Date.now(), draft };
  for (const index of gridRun.value.cells.keys()) {
    if (stop.aborted) break;
    await makeCell(index, stop);
  }
  if (abort.signal === stop) update({ isRunning: false });
}

/** Stop a run; what it has made stays. */
export function stopGrid() {
  abort?.abort();
  if (!gridRun.value) return;
  const cells = gridRun.value.cells.map((cell) => (cell.state === 'running' ? { ...cell, state: 'waiting', share: 0 } : cell));
  update({ cells, isRunning: false });
}

async function makeCell(index, stop) {
  updateCell(index, { state: 'running', share: 0 });
  const { draft } = gridRun.value.cells[index];
  const progress = ({ kind, step, total }) => kind === 'progress' && !stop.aborted && updateCell(index, { share: step / total });
  for (let tries = 1; ; tries++) {
    try {
      const [entry] = await inSlot(stop, () => generate(draft, { onEvent: progress, signal: stop }));
      if (stop.aborted) return;
      updateCell(index, entry ? { state: 'made', entry } : { state: 'failed', error: t('grid.nothing') });
      return;
    } catch (error) {
      if (stop.aborted) return;
      const isBrief = error.status === 503 || error.name === 'ConnectionError';
      if (!isBrief || tries === TRIES) {
        updateCell(index, { state: 'failed', error: error.message });
        return;
      }
      await pause(error.retryAfter ?? 1, stop);
    }
  }
}

/** Wait some seconds, and until the worker answers. */
function pause(seconds, stop) {
  return new Promise((done) => {
    let end = () => {};
    const over = () => {
      clearTimeout(timer);
      end();
      done();
    };
    const timer = setTimeout(() => (end = effect(() => void (online.value && queueMicrotask(over)))), seconds * 1000);
    stop.addEventListener('abort', over, { once: true });
  });
}

/** Return the seconds that a run still takes, by those that it took; null before the first picture. */
export function secondsLeft({ begun, done, cells }) {
  return done ? ((Date.now() - begun) / 1000 / done) * (cells.length - done) : null;
}
