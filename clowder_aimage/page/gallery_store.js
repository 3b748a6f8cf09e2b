// The pictures that this browser keeps, in IndexedDB. `changed` counts changes of all tabs.

import { signal } from './html.js';

const NAME = 'aimage', VERSION = 1, PICTURES = 'pictures', DRAFTS = 'drafts';
export const changed = signal(0);
const channel = 'BroadcastChannel' in self ? new BroadcastChannel('aimage-gallery') : null;
if (channel) channel.onmessage = () => changed.value++;

let opened = null;

function open() {
  opened ??= new Promise((done, fail) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      const pictures = request.result.createObjectStore(PICTURES, { keyPath: 'id', autoIncrement: true });
      pictures.createIndex('made', 'made');
      request.result.createObjectStore(DRAFTS);
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

async function store(name, mode = 'readonly') {
  return (await open()).transaction(name, mode).objectStore(name);
}

function announce() {
  changed.value++;
  channel?.postMessage('changed');
}

/** Keep a picture and return its id. Throws QuotaExceededError if the browser has no room. */
export async function add({ blob, facts, model, digest, made = Date.now() }) {
  const entry = { blob, facts, model, digest, made, size: blob.size };
  const id = await settled((await store(PICTURES, 'readwrite')).add(entry));
  announce();
  return id;
}

/** Return up to `limit` entries, the newest first, older than the id `before` if it is given. */
export async function list({ before = null, limit = 60 } = {}) {
  const range = before === null ? null : IDBKeyRange.upperBound(before, true);
  const request = (await store(PICTURES)).openCursor(range, 'prev');
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

/** Return the entry with an id, or undefined. */
export const get = async (id) => settled((await store(PICTURES)).get(id));

/** Remove a picture. */
export async function remove(id) {
  await settled((await store(PICTURES, 'readwrite')).delete(id));
  announce();
}

/** Return the number of pictures. */
export const count = async () => settled((await store(PICTURES)).count());

/** Return the number of bytes of all pictures. */
export async function bytes() {
  const request = (await store(PICTURES)).openCursor();
  return new Promise((done, fail) => {
    let sum = 0;
    request.onerror = () => fail(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return done(sum);
      sum += cursor.value.size;
      cursor.continue();
    };
  });
}

/** Keep the pictures of a tab's draft, which survive a reload. */
export const keepDraft = async (key, value) => settled((await store(DRAFTS, 'readwrite')).put(value, key));

/** Return the pictures of a tab's draft, or undefined. */
export const readDraft = async (key) => settled((await store(DRAFTS)).get(key));
