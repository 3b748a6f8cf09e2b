// What the browser keeps: JSON in localStorage and sessionStorage. Both may be full or forbidden.

import { listOf, objectOf, readFields, readShape, TEXT } from './shape.js';

const PREFIX = 'aimage.';
const MOST_PROMPTS = 200;
const PROMPTS = listOf(objectOf({ prompt: TEXT, negative: TEXT }));

function get(place, name) {
  try {
    return JSON.parse(place().getItem(PREFIX + name));
  } catch {
    return null;
  }
}

function set(place, name, value) {
  try {
    if (value === null || value === undefined) place().removeItem(PREFIX + name);
    else place().setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const local = () => localStorage;
const tab = () => sessionStorage;

/** Return what all tabs keep under a name, if it has the shape `how`. Another version may have written it. */
export const read = (name, how, otherwise = null) => readShape(get(local, name), how, otherwise);

/** Keep a value for all tabs, also after the browser is closed; return whether it was kept. */
export const write = (name, value) => set(local, name, value);

/** Return what this tab keeps under a name, if it has the shape `how`: it survives a reload. */
export const readTab = (name, how, otherwise = null) => readShape(get(tab, name), how, otherwise);

/** Return the fields of what this tab keeps, else of what all tabs do, that have their shapes. */
export const readKept = (name, shapes, accepts) => readFields(get(tab, name) ?? get(local, name), shapes, accepts);

/** Keep a value for this tab; return whether it was kept. */
export const writeTab = (name, value) => set(tab, name, value);

/** Return the prompts that were used, the newest first, as {prompt, negative}. */
export const history = () => read('history', PROMPTS, []);

/** Add a prompt, or move it to the front. */
export function remember(prompt, negative = '') {
  if (!prompt.trim()) return;
  const others = history().filter((one) => one.prompt !== prompt || one.negative !== negative);
  write('history', [{ prompt, negative }, ...others].slice(0, MOST_PROMPTS));
}

/** Remove a prompt; all of them without one. */
export function forget(prompt = null) {
  write('history', prompt === null ? [] : history().filter((one) => one.prompt !== prompt));
}
