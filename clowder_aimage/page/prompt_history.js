// The prompts that were used, the newest first, for all tabs.

import { read, write } from './storage.js';

const MOST = 200;

/** Return the prompts, as {prompt, negative}. */
export const history = () => read('history', []);

/** Add a prompt, or move it to the front. */
export function remember(prompt, negative = '') {
  if (!prompt.trim()) return;
  const others = history().filter((one) => one.prompt !== prompt || one.negative !== negative);
  write('history', [{ prompt, negative }, ...others].slice(0, MOST));
}

/** Remove a prompt; all of them without one. */
export function forget(prompt = null) {
  write('history', prompt === null ? [] : history().filter((one) => one.prompt !== prompt));
}
