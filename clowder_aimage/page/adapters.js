// The adapters of the worker for a model, and the words of their use.

import { signal } from './html.js';
import { call } from './api.js';
import { scaleOf } from './parameter_control.js';
import { LORA } from './setting.js';

/** The scale of weights. */
export const SCALE = scaleOf(LORA.strength, 0.05);

/** What `GET /v1/adapters` says: {model, list, error}; `list` is null until it has answered. */
export const adapters = signal({ model: null, list: null, error: '' });

/** Ask which adapters there are, and which suit a model; the names that were known stay meanwhile. */
export async function findAdapters(model) {
  const query = model ? `?model=${encodeURIComponent(model)}` : '';
  const known = adapters.value;
  adapters.value = { ...known, model };
  try {
    const { data } = await call('GET', `/v1/adapters${query}`);
    if (adapters.value.model === model) adapters.value = { model, list: data, error: '' };
  } catch (error) {
    if (adapters.value.model === model) adapters.value = { ...adapters.value, error: error.message };
  }
}

/** Return the nearest weight on the scale. */
export function onScale(weight) {
  const { min, max, step } = SCALE;
  const nearest = Math.round((weight ?? 1) / step) * step;
  return Number(Math.min(max, Math.max(min, nearest)).toFixed(2));
}

/** Return the tag of an adapter, as the interfaces of Stable Diffusion write it in prompts. */
export const tagOf = (name, weight) => `<lora:${name}:${weight.toFixed(2)}>`;

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
const whole = (phrase) => new RegExp(`(^|[^\\p{L}\\p{N}])${escaped(phrase)}(?![\\p{L}\\p{N}])`, 'iu');

/** Return whether a prompt has a phrase, as whole words. */
export const hasPhrase = (prompt, phrase) => whole(phrase).test(prompt);

/** Return a prompt with a phrase at its end, or without the phrase if it has it. */
export function togglePhrase(prompt, phrase) {
  if (!hasPhrase(prompt, phrase)) return [prompt.trim().replace(/,$/, ''), phrase].filter(Boolean).join(', ');
  const rest = prompt.replace(whole(phrase), '$1');
  return rest.replace(/\s*,(\s*,)+/g, ',').replace(/^[\s,]+|[\s,]+$/g, '').replace(/ {2,}/g, ' ');
}
