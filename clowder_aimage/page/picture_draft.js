// The pictures of the form Make: kept over a reload, taken from results and from dropped files.

import { effect } from './html.js';
import { forgetDrafts, keepDraft, readDraft } from './gallery_store.js';
import { t } from './lang.js';
import { NO_MASK, TWICE } from './picture_enlargement.js';
import { parsedFacts, pngFacts } from './png_facts.js';
import { checkedFacts, INITIAL, isUsed, namesOf } from './setting.js';
import { answersChats, change, chosen, draft, EMPTY, models, notice, show, worker } from './state.js';
import { TEXT } from './shape.js';
import { read, readTab, write, writeTab } from './storage.js';

const KEPT = ['images', 'mask', 'control'];
const WEEK = 7 * 24 * 3600 * 1000;
const TYPES = ['image/png', 'image/jpeg', 'image/webp'];
const MOST_BYTES = 64 * 2 ** 20; // of a picture; the worker's limits
const MOST_PIXELS = 2 ** 25;

/** Return how many pictures the model of a draft takes: 1, or more if it edits them. */
export function mostImages(name) {
  const found = models.value.find((one) => one.id === name) ?? (name === draft.value.model ? chosen.value : null);
  return found?.max_images ?? 1;
}

/** Return a draft without what its model, or its pictures, have no use for and the worker refuses. */
export function usedDraft(draft) {
  const isEdit = draft.images.length > 0 && mostImages(draft.model) > 1;
  if (isEdit) return { ...draft, ...OF_REFERENCES };
  const ofMask = draft.images.length && draft.mask ? {} : UNMASKED;
  const size = draft.expand && draft.images.length ? { width: null, height: null } : {};
  return { ...draft, ...ofMask, ...size };
}

const UNMASKED = { ...NO_MASK, feather: null };
const OF_REFERENCES = { ...Object.fromEntries(namesOf('input').map((name) => [name, null])), mask: null, control: null };

/** Read the pictures of this tab's draft, or of the last one, and keep them from now on. */
export async function keepDraftPictures() {
  const key = readTab('draft-key', TEXT) ?? crypto.getRandomValues(new Uint32Array(4)).join('-');
  const last = readTab('draft-key', TEXT) ?? read('draft-key', TEXT);
  writeTab('draft-key', key);
  const kept = last && (await readDraft(last).catch(() => null));
  const isEmpty = !draft.value.images.length && !draft.value.control;
  if (kept && isEmpty) change(Object.fromEntries(KEPT.map((name) => [name, kept[name] ?? EMPTY[name]])));
  forgetDrafts(Date.now() - WEEK).catch(() => {});
  let before = KEPT.map((name) => draft.value[name]);
  effect(() => {
    const now = KEPT.map((name) => draft.value[name]);
    if (now.every((value, index) => value === before[index])) return;
    before = now;
    write('draft-key', key);
    const pictures = Object.fromEntries(KEPT.map((name, index) => [name, now[index]]));
    keepDraft(key, { at: Date.now(), ...pictures }).catch(() => notice(t('pictures.notKept'), { kind: 'bad' }));
  });
}

/** Return a file as a picture that the worker takes. Throws an Error whose message is for a person. */
export async function readPicture(file) {
  const name = file.name || t('pictures.pasted');
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(t('pictures.unreadable', { name }));
  }
  const { width, height } = picture;
  if (width * height > MOST_PIXELS) throw new Error(t('pictures.tooLarge', { name, width, height, most: MOST_PIXELS }));
  const isKept = TYPES.includes(file.type);
  const found = isKept ? file : await asPng(picture);
  if (!isKept) notice(t('origin.lost', { name }));
  picture.close();
  if (found.size > MOST_BYTES) throw new Error(t('pictures.tooManyBytes', { name }));
  return found;
}

async function asPng(picture) {
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  canvas.getContext('2d').drawImage(picture, 0, 0);
  return canvas.convertToBlob({ type: 'image/png' });
}

/** Begin with a picture; a model that edits several gets it as one more. */
export function usePicture(blob) {
  const { images, model } = draft.value;
  const most = mostImages(model);
  const isFull = images.length >= most;
  change(most > 1 ? { images: isFull ? [...images.slice(0, -1), blob] : [...images, blob] } : { images: [blob], mask: null });
  show('make');
}

/** Make a picture of the gallery twice as large, with its prompt: the form has the settings. */
export function enlargePicture({ blob, facts }) {
  const prompts = { enhance: false, enhanced: '', ...promptsOf(checkedFacts(facts)) };
  change({ ...prompts, negative: draftOf(facts).draft.negative, ...TWICE, images: [blob], aspect: '', width: null, height: null });
  show('make');
}

/**
 * Return the draft that makes a picture again, and the digests of inputs that are missing.
 *
 * `inputs` are blobs by digest. The seed is locked.
 */
export function draftOf(stated, inputs = {}) {
  const facts = checkedFacts(stated);
  const missing = [];
  const input = (digest) => {
    if (!digest || digest === 'alpha') return null;
    if (!inputs[digest]) missing.push(digest);
    return inputs[digest] ?? null;
  };
  const names = facts.references ?? (facts.image ? [facts.image] : []);
  const images = names.map(input).filter(Boolean);
  const pictures = { images, mask: images.length ? input(facts.mask) : null, control: input(facts.control) };
  const found = { ...EMPTY, ...settingsOf(facts), ...pictures };
  return { draft: found, missing };
}

/** Return both prompts of a picture; the switch is on if the worker can enhance another one. */
function promptsOf({ prompt = '', original_prompt: original, enhancer: enhancedBy = '' }) {
  if (original === undefined) return { prompt };
  const written = { enhanced: prompt, enhancedFrom: original, enhancedBy };
  const enhancer = worker.value?.enhancer ? '' : models.value.find(answersChats)?.id;
  return enhancer === undefined ? { prompt, ...written } : { prompt: original, enhance: true, enhancer, ...written };
}

function settingsOf(facts) {
  const values = Object.keys(INITIAL).map((name) => [name, (isUsed(name, facts) ? facts[name] : null) ?? EMPTY[name]]);
  return {
    ...Object.fromEntries(values),
    ...promptsOf(facts),
    model: facts.reference ?? '',
    aspect: 'free',
    seedLocked: facts.seed !== undefined,
    loras: (facts.loras ?? []).filter((use) => !use.model.startsWith('adapters/')).map((use) => ({ ...use, on: true })),
  };
}

/** Load the settings of a picture into the form, and say what is missing. */
export function loadSettings(facts, inputs, name) {
  const { draft: found, missing } = draftOf(facts, inputs);
  const isKnown = !models.value.length || models.value.some((one) => one.id === found.model);
  const model = isKnown ? found.model : draft.value.model;
  change({ ...found, model, previews: draft.value.previews });
  show('make');
  notice(t('pictures.loaded', { name }), { kind: 'good' });
  if (found.model && !isKnown) notice(t('pictures.noModel', { model: found.model }), { kind: 'bad' });
  if (missing.length) {
    const digests = missing.map((digest) => digest.slice(0, 19)).join(', ');
    notice(t('pictures.noInput', { digests }), { kind: 'bad' });
  }
}

/** Return the facts of a JPEG or WebP file, or of another program, or null. The readers are loaded when they are needed. */
async function otherFacts(bytes) {
  try {
    const [{ exifText }, { parametersFacts }] = await Promise.all([import('./exif_facts.js'), import('./parameters_text.js')]);
    return parsedFacts(exifText(bytes) || 'null') ?? (await parametersFacts(bytes));
  } catch {
    return null; // not ours, or the worker does not answer
  }
}

/** Take a file that was dropped or pasted: its settings if it states them, else as a picture. */
export async function takeFile(file) {
  const bytes = await file.arrayBuffer();
  const facts = (await pngFacts(bytes)) ?? (await otherFacts(bytes));
  const name = file.name || t('pictures.pasted');
  if (facts && Object.keys(checkedFacts(facts)).length) return loadSettings(facts, {}, name);
  try {
    usePicture(await readPicture(file));
    notice(t('pictures.noFacts', { name }));
  } catch (error) {
    notice(error.message, { kind: 'bad' });
  }
  return undefined;
}
