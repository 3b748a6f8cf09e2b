// Texts in the language of the person. Every text that is shown is in lang/.

import { effect, html, signal } from './html.js';
import { read, write } from './storage.js';

export const LANGUAGES = { en: 'English', de: 'Deutsch' };
const TEXTS = {}; // of the languages that are loaded, each of which has all texts
const ERRORS = {}; // of the worker, whose messages are in English

const preferred = (navigator.languages ?? ['en']).map((each) => each.slice(0, 2)).find((each) => LANGUAGES[each]);
const first = read('language', { kind: 'one', of: Object.keys(LANGUAGES) }, preferred ?? 'en');

/** Load the texts of a language. */
async function load(name) {
  if (TEXTS[name]) return name;
  const module = await import(`./lang/${name}.js`);
  TEXTS[name] = module[name];
  ERRORS[name] = module.errors;
  return name;
}

export const language = signal(await load(first).catch(() => load('en')));

/** Show the page in a language; without its texts it stays in the one that it has. */
export async function speak(name) {
  language.value = await load(name);
  write('language', name);
}

effect(() => void (document.documentElement.lang = language.value));

const PLACE = /\{(\w+)(?::([^|}]*)\|([^}]*))?\}/g;

/**
 * Return a text. `{name}` in it is replaced by a value; numbers are written as in the language.
 *
 * `{name:one|other}` is replaced by the first text if the value is 1, else by the second. `otherwise` is
 * the text if the language has none.
 */
export function t(key, values = {}, otherwise = key) {
  const text = TEXTS[language.value][key] ?? otherwise;
  return text.replace(PLACE, (all, name, one, other) => {
    if (!(name in values)) return all;
    if (other === undefined) return shown(values[name]);
    return values[name] === 1 ? one : other;
  });
}

/** Return an error or a warning of the worker in the language, by its code or its form; else as the worker says it. */
export function worded(code, message) {
  const { codes = {}, forms = [] } = ERRORS[language.value] ?? {};
  if (Object.hasOwn(codes, code)) return codes[code].replace('{message}', () => message);
  const [form, text] = forms.find(([each]) => each.test(message)) ?? [];
  return form ? form.exec(message).reduce((all, part, index) => all.replace(`$${index}`, () => part), text) : message;
}

/** Return a text in which `{name}` is a sentence of the worker: English, which other languages quote. */
export function quoting(key, name, sentence) {
  const [before, after] = t(key).split(`{${name}}`);
  return html`${before}${quoted(sentence)}${after}`;
}

/** Return a sentence of the worker for a page in any language. */
export const quoted = (sentence) => (language.value === 'en' ? sentence : html`<q lang="en">${sentence}</q>`);

const shown = (value) => (typeof value === 'number' ? number(value) : String(value));

/** Return a number as it is written in the language. */
export function number(value, digits = 2) {
  return new Intl.NumberFormat(language.value, { maximumFractionDigits: digits }).format(value);
}

/** Return a number with two digits after the point or comma. */
export function fixed(value) {
  return new Intl.NumberFormat(language.value, { minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(value);
}

/** Return a number such as "3.9M", of the worker, as it is written in the language: "3,9 Mio." in German. */
export function amount(text) {
  const [, digits, unit] = /^([0-9.]+)([KMB]?)$/.exec(text) ?? [];
  if (!digits) return text;
  const value = Number(digits) * { '': 1, K: 1e3, M: 1e6, B: 1e9 }[unit];
  return new Intl.NumberFormat(language.value, { notation: 'compact', maximumFractionDigits: 2 }).format(value);
}

/** Return a number of bytes in a unit of 1000, such as "7.9 MB". */
export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let rest = value, unit = 0;
  while (rest >= 1000 && unit < units.length - 1) [rest, unit] = [rest / 1000, unit + 1];
  return `${number(rest, unit && rest < 100 ? 1 : 0)} ${units[unit]}`;
}

/** Return a duration in seconds in words, such as "1 min 20 s". */
export function duration(seconds) {
  const whole = Math.max(0, Math.ceil(seconds));
  if (whole < 60) return t('unit.seconds', { n: whole });
  if (whole < 3600) return t('unit.minutes', { n: Math.floor(whole / 60), s: whole % 60 });
  return t('unit.hours', { n: Math.floor(whole / 3600), m: Math.floor((whole % 3600) / 60) });
}

/** Return a time, given in milliseconds, as date and time of day. */
export function moment(milliseconds) {
  const style = { dateStyle: 'medium', timeStyle: 'short' };
  return new Intl.DateTimeFormat(language.value, style).format(new Date(milliseconds));
}
