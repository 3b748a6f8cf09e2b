// A conversation with a language model: what was said is kept over a reload, and answers are streamed.

import { signal } from './html.js';
import { events } from './api.js';
import { t } from './lang.js';
import { models, notice } from './state.js';
import { FLAG, listOf, NUMBER, objectOf, optional, TEXT } from './shape.js';
import { readKept, write, writeTab } from './storage.js';

const EMPTY = { model: '', system: '', thinks: true, typed: '', messages: [] };
const SAID = optional(TEXT);
const MESSAGE = objectOf({
  role: { kind: 'one', of: ['user', 'assistant'] },
  content: TEXT,
  thinking: SAID,
  model: SAID,
  isOpen: optional(FLAG),
  error: SAID,
  end: SAID,
  usage: optional(objectOf({ tokens: optional(NUMBER), seconds: optional(NUMBER) })),
});
const SHAPES = { model: TEXT, system: TEXT, thinks: FLAG, typed: TEXT, messages: listOf(MESSAGE) };
const PAUSE = 400; // milliseconds between two writes while an answer arrives
const MOST = 5; // times that a request is sent again because the queue is full

/**
 * The conversation: {model, system, thinks, typed, messages}.
 *
 * A message has `role` and `content`; an answer also `thinking`, `model`, `isOpen` while it arrives,
 * `error`, `end` (why it ended) and `usage`.
 */
export const talk = signal(loadTalk());

/** The state of the request: null, or {waiting, controller}; `waiting` is a sentence. */
export const sending = signal(null);

function loadTalk() {
  const found = { ...EMPTY, ...readKept('chat', SHAPES) };
  const messages = found.messages.map((one) => (one.isOpen ? { ...one, isOpen: false, error: 'reload' } : one));
  return { ...found, messages };
}

let written = 0, timer = 0, isFull = false;

function keep() {
  clearTimeout(timer);
  timer = 0;
  written = performance.now();
  const isKept = writeTab('chat', talk.value) && write('chat', talk.value);
  if (!isKept && !isFull) notice(t('chat.notKept'), { kind: 'bad' });
  isFull = !isKept;
}

/** Change some fields of the conversation. They are kept at once, an answer that arrives now and then. */
export function say(fields, isArriving = false) {
  talk.value = { ...talk.value, ...fields };
  if (!isArriving || performance.now() - written > PAUSE) keep();
  else if (!timer) timer = setTimeout(keep, PAUSE);
}
addEventListener('pagehide', keep);

let isLeaving = false; // the browser ends requests when the page is left
addEventListener('beforeunload', () => (isLeaving = true));
addEventListener('pageshow', () => (isLeaving = false));

/** Return the models that answer, as `GET /v1/models` lists them. */
export const chatModels = () => models.value.filter((one) => one.capabilities?.includes('chat') && !one.adapter);

/** Return the model of the conversation, or the first one if it has none. */
export const modelOf = () => talk.value.model || (chatModels()[0]?.id ?? '');

/** Add what a person has typed, and ask for an answer. */
export function send() {
  const text = talk.value.typed.trim();
  if (!text || sending.value) return;
  say({ typed: '', messages: [...talk.value.messages, { role: 'user', content: text }] });
  answer();
}

/** Ask again for the last answer. */
export function regenerate() {
  if (sending.value) return;
  const { messages } = talk.value;
  const last = messages.findLastIndex((one) => one.role === 'user');
  say({ messages: messages.slice(0, last + 1) });
  answer();
}

/** End the answer that arrives. */
export const stop = () => sending.value?.controller.abort();

/** Forget what was said; the system prompt and the model stay. */
export function clear() {
  stop();
  say({ messages: [] });
}

function bodyOf(model) {
  const { system, messages, thinks } = talk.value;
  const isSaid = (one, index) => one.content && messages[index + 1]?.content !== ''; // a template may demand that roles alternate
  const said = messages.filter(isSaid).map(({ role, content }) => ({ role, content }));
  const first = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
  const body = { model, messages: [...first, ...said], stream: true, stream_options: { include_usage: true } };
  const canThink = models.value.find((one) => one.id === model)?.capabilities?.includes('thinking');
  return canThink ? { ...body, chat_template_kwargs: { enable_thinking: thinks } } : body;
}

const put = (fields, isArriving) => {
  const { messages } = talk.value;
  if (!messages.length) return; // a new conversation has begun
  say({ messages: [...messages.slice(0, -1), { ...messages.at(-1), ...fields }] }, isArriving);
};

async function answer() {
  const model = modelOf();
  const controller = new AbortController();
  const body = bodyOf(model);
  sending.value = { waiting: t('chat.waiting'), controller };
  say({ model, messages: [...talk.value.messages, { role: 'assistant', content: '', thinking: '', model, isOpen: true, end: null }] });
  try {
    await arriving(body, controller.signal);
    put({ isOpen: false });
  } catch (error) {
    if (isLeaving) return;
    if (error.name === 'AbortError') put({ isOpen: false, end: 'stopped' });
    else put({ isOpen: false, error: error.message });
  }
  sending.value = null;
}

/** Take the pieces of an answer; wait and ask again while the queue of the worker is full. */
async function arriving(body, signal) {
  for (let count = 1; ; count++) {
    try {
      for await (const { data } of events('/v1/chat/completions', body, { signal })) take(data);
      return;
    } catch (error) {
      const hasBegun = Boolean(talk.value.messages.at(-1)?.content || talk.value.messages.at(-1)?.thinking);
      if (error.status !== 503 || !error.retryAfter || hasBegun || count >= MOST) throw error;
      await pause(error.retryAfter, signal);
    }
  }
}

async function pause(seconds, signal) {
  for (let left = seconds; left > 0; left--) {
    sending.value = { ...sending.value, waiting: t('chat.full', { n: left }) };
    await new Promise((done) => setTimeout(done, 1000));
    signal.throwIfAborted();
  }
  sending.value = { ...sending.value, waiting: t('chat.waiting') };
}

function take(data) {
  const own = talk.value.messages.at(-1) ?? {};
  const [choice] = data.choices ?? [];
  const { content, reasoning_content: thought } = choice?.delta ?? {};
  if (thought) put({ thinking: own.thinking + thought }, true);
  if (content) put({ content: own.content + content }, true);
  if (choice?.finish_reason) put({ end: choice.finish_reason }, true);
  if (data.usage) put({ usage: { tokens: data.usage.completion_tokens, seconds: (data.timings?.predicted_ms ?? 0) / 1000 } }, true);
}
