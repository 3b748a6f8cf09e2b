// The state that the parts of the page share, as signals.

import { computed, effect, signal } from './html.js';
import { PARAMETERS } from './parameters.js';
import { ASPECTS, INITIAL, PLAIN, SCALES, turned } from './setting.js';
import { FLAG, isTyped, listOf, NUMBER, objectOf, optional, TEXT, WHOLE } from './shape.js';
import { read, readKept, readTab, write, writeTab } from './storage.js';

export { language } from './lang.js';

/** The token of the sign-in field. It is kept for this tab only, and sent in a header only. */
export const token = signal(readTab('token', TEXT, ''));

/** What `GET /v1/worker` says; null until it has answered. */
export const worker = signal(null);

/** Which requests the token allows: `scopes.value.infer`, `scopes.value.admin`. */
export const scopes = computed(() => ({ infer: mayInfer(worker.value), admin: worker.value?.scope === 'admin' }));

/** Return whether an answer of `GET /v1/worker` allows pictures and texts. */
export const mayInfer = (found) => ['infer', 'admin'].includes(found?.scope);

/** The models of the worker, as `GET /v1/models` lists them, with what other routes know of them. */
export const models = signal([]);

/** Return whether an entry of `models` makes pictures. */
export const makesPictures = (model) => Boolean(model.capabilities?.includes('image')) && !model.adapter;

/** Return whether an entry of `models` answers in a chat. */
export const answersChats = (model) => Boolean(model.capabilities?.includes('chat'));

/** The models in memory, as `GET /api/ps` lists them. */
export const loaded = signal([]);

/** Whether the worker answers. */
export const online = signal(true);

export const TABS = ['make', 'gallery', 'models', 'chat'];
const named = () => (TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : 'make');
export const tab = signal(named());
addEventListener('hashchange', () => (tab.value = named()));

/** Show a tab. */
export function show(name) {
  if (tab.value !== name) location.hash = name;
}

/** 'system', 'light' or 'dark'. */
export const theme = signal(read('theme', { kind: 'one', of: ['system', 'light', 'dark'] }, 'system'));

export const notices = signal([]);
let count = 0;

/** Show a message. `kind` is 'info', 'good' or 'bad'; a bad one stays until it is closed. */
export function notice(text, { kind = 'info', seconds = kind === 'bad' ? 0 : 6 } = {}) {
  const one = { id: ++count, text, kind };
  notices.value = [...notices.value.filter((each) => each.text !== text), one].slice(-4);
  if (seconds) setTimeout(() => dismiss(one.id), seconds * 1000);
  return one.id;
}

/** Remove a message. */
export function dismiss(id) {
  notices.value = notices.value.filter((each) => each.id !== id);
}

/** The fields of the form Make: parameters by their names, and what only the form has. null means the default of the model. */
export const EMPTY = {
  ...INITIAL,
  model: '',
  prompt: '',
  enhanced: '', // the prompt that a language model wrote, which may have been edited
  enhancedFrom: '', // the prompt that it was written for
  enhancedBy: '', // the language model that wrote it, until it is edited
  enhance: false,
  enhancer: '', // a language model, if the worker has none of its own
  aspect: '', // '' for the size of the model or the picture, '16:9', or 'free'
  scale: 1, // of the model's size, for an aspect
  seedLocked: false,
  previews: PARAMETERS.previews.most,
  loras: [], // {model, strength, on}
  images: [], // Blobs
  mask: null, // a Blob; white is painted
  control: null, // a Blob
  errors: {}, // messages by field, of the last request
};
const NOT_TEXT = ['images', 'mask', 'control', 'errors'];

const SHAPES = {
  ...Object.fromEntries(PLAIN),
  ...Object.fromEntries(['model', 'prompt', 'enhanced', 'enhancedFrom', 'enhancedBy', 'enhancer'].map((name) => [name, TEXT])),
  enhance: FLAG,
  aspect: { kind: 'one', of: ['', 'free', ...ASPECTS.flatMap((one) => [one, turned(one)])] },
  scale: { kind: 'one', of: SCALES },
  seedLocked: FLAG,
  previews: WHOLE,
  loras: listOf(objectOf({ model: TEXT, strength: optional(NUMBER), on: FLAG })),
};

/** What was typed before; fields of other versions of the page are left out. */
export const draft = signal({ ...EMPTY, ...readKept('draft', SHAPES, isTyped) });

const whole = (name) => (name && !/[:@][^/]*$/.test(name) ? `${name}:latest` : name);

/** The model that the draft is made with: its own, the worker's default, or the first. */
export const chosen = computed(() => {
  const able = models.value.filter(makesPictures);
  const find = (name) => able.find((one) => one.id === name || one.id === whole(name));
  if (draft.value.model) return find(draft.value.model) ?? null;
  return find(worker.value?.default_model) ?? able[0] ?? null;
});

/** Change some fields of the draft; their errors are removed. */
export function change(fields) {
  const errors = { ...draft.value.errors };
  for (const name of Object.keys(fields)) delete errors[name];
  draft.value = { ...draft.value, errors, ...fields };
}

effect(() => {
  const kept = Object.fromEntries(Object.entries(draft.value).filter(([name]) => !NOT_TEXT.includes(name)));
  writeTab('draft', kept);
  write('draft', kept); // a new tab begins with it
});
effect(() => void writeTab('token', token.value || null));
effect(() => {
  document.documentElement.dataset.theme = theme.value;
  write('theme', theme.value);
});
