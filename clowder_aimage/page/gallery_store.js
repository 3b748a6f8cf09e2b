// The pictures that this browser keeps, in IndexedDB. `changed` counts changes of all tabs.
//
// What a list needs is apart from the pictures, so that thousands are listed at once.

import { signal } from './html.js';

const NAME = 'aimage', VERSION = 1;
const ENTRIES = 'entries', BLOBS = 'blobs', THUMBS = 'thumbs', INPUTS = 'inputs', DRAFTS = 'drafts';
const KEPT = [ENTRIES, BLOBS, THUMBS, INPUTS];
const THUMB = 320; // pixels of the longer side

/** The most pictures that are kept. */
export const MOST = 5000;

export const changed = signal(0);
const channel = 'BroadcastChannel' in self ? new BroadcastChannel('aimage-gallery') : null;
if (channel) channel.onmessage = () => changed.value++;

let opened = null;

function open() {
  opened ??= new Promise((done, fail) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      const entries = request.result.createObjectStore(ENTRIES, { keyPath: 'id', autoIncrement: true });
      entries.createIndex('inputs', 'inputs', { multiEntry: true });
      for (const name of [BLOBS, THUMBS, INPUTS, DRAFTS]) request.result.createObjectStore(name);
    };
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
  }).catch((error) => {
    opened = null;
    throw error;
  });
  return opened;
}

const settled = (request) =>
  new Promise((done, fail) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
  });

const ended = (transaction) =>
  new Promise((done, fail) => {
    transaction.oncomplete = () => done();
    transaction.onabort = transaction.onerror = () => fail(transaction.error);
  });

const store = async (name, mode = 'readonly') => (await open()).transaction(name, mode).objectStore(name);

function announce() {
  changed.value++;
  channel?.postMessage('changed');
}

/**
 * Keep a picture and return its id.
 *
 * `inputs` are the pictures that it began with, by their digests; one that several pictures began
 * with is kept once. Throws QuotaExceededError if there is no room.
 */
export async function add({ blob, facts, model, digest, made = Date.now(), inputs = {} }) {
  if ((await count()) >= MOST) throw new DOMException('the gallery is full', 'QuotaExceededError');
  const { thumb, width, height } = await reduced(blob);
  const sizes = Object.values(inputs).reduce((sum, one) => sum + one.size, 0);
  const entry = { facts, model, digest, made, width, height, size: blob.size + thumb.size, inputSize: sizes };
  return put({ ...entry, blob, thumb, inputs });
}

/** Keep an entry as `get` returns it, under its id if it has one; return the id. */
export async function put({ blob, thumb, inputs, ...entry }) {
  const transaction = (await open()).transaction(KEPT, 'readwrite');
  const end = ended(transaction);
  const id = await settled(transaction.objectStore(ENTRIES).put({ ...entry, inputs: Object.keys(inputs) }));
  transaction.objectStore(BLOBS).put(blob, id);
  transaction.objectStore(THUMBS).put(thumb, id);
  for (const [digest, input] of Object.entries(inputs)) transaction.objectStore(INPUTS).put(input, digest);
  await end;
  announce();
  return id;
}

/** Return a small copy of a picture, and its size. */
async function reduced(blob) {
  const picture = await createImageBitmap(blob);
  const { width, height } = picture;
  const factor = Math.min(1, THUMB / Math.max(width, height));
  const canvas = new OffscreenCanvas(Math.max(1, width * factor), Math.max(1, height * factor));
  const context = canvas.getContext('2d');
  context.imageSmoothingQuality = 'high';
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return { thumb: await canvas.convertToBlob({ type: 'image/webp', quality: 0.85 }), width, height };
}

/** Return up to `limit` entries without their pictures, the newest first, older than the id `before`. */
export async function list({ before = null, limit = MOST } = {}) {
  const range = before === null ? null : IDBKeyRange.upperBound(before, true);
  const entries = await store(ENTRIES);
  if (range === null && limit >= MOST) return (await settled(entries.getAll())).reverse();
  const request = entries.openCursor(range, 'prev');
  return new Promise((done, fail) => {
    const found = [];
    request.onerror = () => fail(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor || found.length >= limit) return done(found);
      found.push(cursor.value);
      cursor.continue();
    };
  });
}

/** Return a whole entry: with `blob`, `thumb` and `inputs`, blobs by digest; or undefined. */
export async function get(id) {
  const transaction = (await open()).transaction(KEPT);
  const read = (name, key) => settled(transaction.objectStore(name).get(key));
  const [entry, blob, thumb] = await Promise.all([read(ENTRIES, id), read(BLOBS, id), read(THUMBS, id)]);
  if (!entry || !blob) return undefined;
  const inputs = await Promise.all(entry.inputs.map(async (digest) => [digest, await read(INPUTS, digest)]));
  return { ...entry, blob, thumb, inputs: Object.fromEntries(inputs.filter(([, input]) => input)) };
}

/** Return the small copy of a picture. */
export const thumb = async (id) => settled((await store(THUMBS)).get(id));

/** Remove a picture, and its inputs that no other one has. */
export async function remove(id) {
  const transaction = (await open()).transaction(KEPT, 'readwrite');
  const end = ended(transaction);
  const entries = transaction.objectStore(ENTRIES);
  const entry = await settled(entries.get(id));
  for (const name of [ENTRIES, BLOBS, THUMBS]) transaction.objectStore(name).delete(id);
  for (const digest of entry?.inputs ?? []) {
    if (!(await settled(entries.index('inputs').count(digest)))) transaction.objectStore(INPUTS).delete(digest);
  }
  await end;
  announce();
}

/** Return the number of pictures. */
export const count = async () => settled((await store(ENTRIES)).count());

/** Return the number of bytes of all pictures, without those that they began with. */
export const bytes = async () => (await list()).reduce((sum, entry) => sum + entry.size, 0);

/** Return the bytes that this page may keep and those that it keeps; null if the browser does not say. */
export async function room() {
  const said = await navigator.storage?.estimate?.().catch(() => null);
  return said?.quota ? { quota: said.quota, usage: said.usage ?? 0 } : null;
}

/** Keep the pictures of a tab's draft, which survive a reload. */
export const keepDraft = async (key, value) => settled((await store(DRAFTS, 'readwrite')).put(value, key));

/** Return the pictures of a tab's draft, or undefined. */
export const readDraft = async (key) => settled((await store(DRAFTS)).get(key));

/** Remove the pictures of drafts that were kept before a time. */
export async function forgetDrafts(before) {
  const request = (await store(DRAFTS, 'readwrite')).openCursor();
  request.onsuccess = () => {
    const cursor = request.result;
    if (!cursor) return;
    if (!(cursor.value.at >= before)) cursor.delete();
    cursor.continue();
  };
}
