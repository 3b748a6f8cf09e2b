// One request of the public API for a draft, and what its stream says.

import { events } from './api.js';
import { inputsOf } from './copy_text.js';
import { add } from './gallery_store.js';
import { usedDraft } from './picture_draft.js';
import { pngFacts } from './png_facts.js';
import { checkedFacts, PLAIN } from './setting.js';

const ABSENT = [null, undefined, '', false];
const WITH = { input: (draft) => draft.images.length > 0, control: (draft) => Boolean(draft.control) }; // what a group requires

/** The field of the draft for each field of the request, to show an error beside it. */
export const FIELDS = {
  ...Object.fromEntries(PLAIN.map(([name, { field }]) => [field, name])),
  model: 'model', prompt: 'prompt', image: 'images', mask: 'mask', control: 'control', enhance: 'enhance', loras: 'loras',
  size: 'width', height: 'width',
};

/** Return the fields of the request for a draft, without its pictures. */
export function requestOf(draft) {
  const found = { prompt: draft.prompt, stream: true, stream_format: 'openai+progress' };
  if (draft.model) found.model = draft.model;
  for (const [name, { field, group }] of PLAIN) {
    if ((WITH[group]?.(draft) ?? true) && !ABSENT.includes(draft[name])) found[field] = draft[name];
  }
  const isWritten = draft.enhanced && (draft.enhance ? draft.enhancedFrom : draft.enhanced) === draft.prompt;
  if (isWritten) Object.assign(found, writtenPrompts(draft));
  else if (draft.enhance) found.enhance = draft.enhancer || true;
  const loras = draft.loras.filter((one) => one.on !== false);
  if (loras.length) found.loras = loras.map(({ model, strength }) => ({ model, strength }));
  return found;
}

/** Return the fields for a prompt that was enhanced before: both texts, and the adapters that were typed as tags. */
function writtenPrompts({ enhanced, enhancedFrom, enhancedBy }) {
  const tags = (enhancedFrom.match(/<lora:[^<>]*>/gi) ?? []).filter((tag) => !enhanced.includes(tag));
  const original = tags.reduce((text, tag) => text.replace(tag, ''), enhancedFrom);
  return { prompt: [enhanced, ...tags].join(' '), original_prompt: original, ...(enhancedBy && { enhancer: enhancedBy }) };
}

/** Return the request as a form with its pictures (multipart/form-data), as OpenAI's SDKs send it. */
function formOf(fields, draft) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    form.append(name, name === 'expand' ? value.join(',') : typeof value === 'object' ? JSON.stringify(value) : String(value));
  }
  const name = draft.images.length > 1 ? 'image[]' : 'image';
  for (const [index, blob] of draft.images.entries()) form.append(name, blob, `image-${index}`);
  if (draft.mask) form.append('mask', draft.mask, 'mask.png');
  if (draft.control) form.append('control', draft.control, 'control.png');
  return form;
}

/** Return a Blob as a `data:` URL. */
export function dataUrl(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

function blobOf(base64) {
  return new Blob([Uint8Array.from(atob(base64), (one) => one.charCodeAt(0))], { type: 'image/png' });
}

/** Return the path and the options of the request for a draft. */
async function sent(whole) {
  const draft = usedDraft(whole);
  const fields = requestOf(draft);
  if (draft.images.length) return ['/v1/images/edits', undefined, formOf(fields, draft)];
  if (draft.control) fields.control = await dataUrl(draft.control);
  return ['/v1/images/generations', fields, undefined];
}

// At most four tabs make pictures at the same time: a browser has six connections to a worker
// (HTTP/1.1), and the others are needed to load pages and to ask for the state.
const SLOTS = 4;

/** Run `work` in a slot, and wait for one if all are taken. Without Web Locks it runs at once. */
export async function inSlot(signal, work) {
  if (!navigator.locks) return work();
  for (let index = 0; index < SLOTS; index++) {
    const found = await navigator.locks.request(`aimage-slot-${index}`, { ifAvailable: true }, async (lock) => lock && { value: await work() });
    if (found) return found.value;
  }
  const name = `aimage-slot-${Math.floor(Math.random() * SLOTS)}`;
  return navigator.locks.request(name, { signal }, work);
}

/**
 * Make the pictures of a draft, keep them in the gallery, and return them as entries of it.
 *
 * `onEvent` takes {kind, ...}: queued {ahead}, pulling {completed, total}, loading, started, prompt
 * {prompt, enhancer}, progress {step, total}, preview {blob}, picture {entry}. Throws as `events` does.
 */
export async function generate(draft, { onEvent = () => {}, signal } = {}) {
  const [path, body, form] = await sent(draft);
  const made = [];
  for await (const { event, data } of events(path, body, { signal, form })) {
    const kind = event.split('.').pop();
    if (kind === 'partial_image') onEvent({ kind: 'preview', blob: blobOf(data.b64_json), index: data.partial_image_index });
    else if (kind === 'completed') {
      const entry = await kept(blobOf(data.b64_json), draft);
      made.push(entry);
      onEvent({ kind: 'picture', entry, warnings: data.warnings ?? [] });
    } else onEvent({ ...data, kind });
  }
  return made;
}

/** Return the pictures that a picture began with, by the digests that its facts state. */
function inputBlobs(facts, draft) {
  const images = [...draft.images];
  const others = { mask: draft.mask, control: draft.control };
  const found = inputsOf(checkedFacts(facts)).map(([name, digest]) => [digest, name in others ? others[name] : images.shift()]);
  return Object.fromEntries(found.filter(([, blob]) => blob));
}

/** Add a picture to the gallery. If the browser has no room for it, it has no id. */
async function kept(blob, draft) {
  const facts = (await pngFacts(await blob.arrayBuffer())) ?? {};
  const entry = { blob, facts, model: draft.model, digest: facts.digest ?? '', made: Date.now(), inputs: inputBlobs(facts, draft) };
  try {
    return { ...entry, id: await add(entry) };
  } catch (error) {
    return { ...entry, id: null, error };
  }
}
