// The client of the worker's public API.

import { t, worded } from './lang.js';
import { online, token } from './state.js';

/** An error of the worker. `field` is the field of the request, `retryAfter` seconds. */
export class ApiError extends Error {
  constructor(status, message, { field = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: 'ApiError', status, field, code, retryAfter });
  }
}

/** An error of the connection: the worker did not answer, or its answer ended early. */
export class ConnectionError extends Error {
  constructor() {
    super(t('connection.lost'));
    this.name = 'ConnectionError';
  }
}

/** Return a body as JSON. Seeds beyond 2^53, which numbers do not hold exactly, are texts of digits. */
const written = (body) => JSON.stringify(body).replace(/"seed":"([0-9]+)"/, '"seed":$1');

function request(method, { body, form, signal }) {
  const headers = {};
  if (token.value) headers.Authorization = `Bearer ${token.value}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  const data = form ?? (body === undefined ? undefined : written(body));
  return { method, headers, body: data, signal, cache: 'no-store', credentials: 'omit', referrerPolicy: 'no-referrer' };
}

async function answer(method, path, options) {
  let response;
  try {
    response = await fetch(path, request(method, options));
  } catch (error) {
    throw lost(error);
  }
  online.value = true;
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Return the error to raise for one of fetch: an interrupted request, or a lost connection. */
function lost(error) {
  if (error.name === 'AbortError') return error;
  noticeLoss();
  return new ConnectionError();
}

async function errorOf(response) {
  const text = await response.text().catch(() => '');
  const retryAfter = Number(response.headers.get('Retry-After')) || null;
  return parsed(response.status, text, retryAfter);
}

function parsed(status, text, retryAfter = null) {
  let found = {};
  try {
    found = JSON.parse(text);
  } catch {
    // not JSON: a proxy between
  }
  const inner = typeof found.error === 'object' && found.error ? found.error : { message: found.error, code: found.code };
  const message = inner.message ? worded(inner.code, String(inner.message)) : t('connection.status', { status });
  return new ApiError(status, message, { field: inner.param ?? null, code: inner.code ?? null, retryAfter });
}

/**
 * Send a request and return the JSON of the response, or null without a body.
 *
 * Throws ApiError, ConnectionError, and AbortError if `signal` was aborted.
 */
export async function call(method, path, options = {}) {
  const response = await answer(method, path, options);
  const text = await response.text().catch((error) => {
    throw lost(error);
  });
  return text ? JSON.parse(text) : null;
}

/**
 * Send a request and yield what the response streams, as `{event, data}`.
 *
 * `data` is parsed; `event` is the name of a server-sent event, "" for a line of NDJSON. Throws as
 * `call` does, also for an error inside of the stream.
 */
export async function* events(path, body, { signal, form, method = 'POST' } = {}) {
  const response = await answer(method, path, { body, form, signal });
  const isSse = (response.headers.get('Content-Type') ?? '').startsWith('text/event-stream');
  for await (const piece of pieces(response, isSse ? '\n\n' : '\n')) {
    const found = isSse ? sse(piece) : piece.trim() && { event: '', data: JSON.parse(piece) };
    if (!found) continue;
    if (found.data?.error) throw parsed(found.data.error.status ?? found.data.status ?? 500, JSON.stringify(found.data));
    yield found;
  }
}

/** Yield the parts of a streamed text, without their ends. */
async function* pieces(response, end) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw lost(error);
      });
      const parts = (rest + (value ?? '')).split(end);
      rest = done ? '' : parts.pop();
      yield* parts;
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return an event of a stream (HTML, 9.2.6); null for a comment and for the end of OpenAI's. */
function sse(piece) {
  let event = '', data = '';
  for (const line of piece.split('\n')) {
    if (line.startsWith('event:')) event = line.slice(6).trim();
    if (line.startsWith('data:')) data += line.slice(5).trimStart();
  }
  return data && data !== '[DONE]' ? { event, data: JSON.parse(data) } : null;
}

const urls = new WeakMap();

/** Return the URL of a picture for an `img`; one for each Blob, until the page is closed. */
export function pictureUrl(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

let isProbing = false;

/** Note that the worker does not answer, and ask until it does. */
async function noticeLoss() {
  online.value = false;
  if (isProbing) return;
  isProbing = true;
  for (let pause = 500; !online.value; pause = Math.min(pause * 1.6, 5000)) {
    await new Promise((done) => setTimeout(done, pause));
    const response = await fetch('/healthz', { cache: 'no-store' }).catch(() => null);
    if (response) online.value = true;
  }
  isProbing = false;
}
