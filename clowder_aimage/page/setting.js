// The settings of a picture: those that its facts state, checked, as a person changes them.
//
// Facts come from files, which anyone may have written: only known keys with the right types pass.

import { PARAMETERS } from './parameters.js';
import { isValid, readFields, readSeed } from './shape.js';

const OF_MODEL = ['sampling', 'guidance']; // groups whose defaults a model may have
const { prompt, original_prompt, enhancer, negative, seed, steps, strength, control_strength } = PARAMETERS;

/** The proportions that the form offers, and the factors of the model's size. */
export const ASPECTS = ['1:1', '9:7', '4:3', '3:2', '16:9', '21:9'];
export const SCALES = [0.5, 0.75, 1, 1.25, 1.5, 2];

/** Return an aspect with its sides exchanged. */
export const turned = (aspect) => aspect.split(':').reverse().join(':');

/** The fields of an adapter of a request. */
export const LORA = PARAMETERS.loras.of.of;

/** Return whether the values of a parameter or a fact are the digests of pictures, or of others. */
export const isPicture = ({ kind, of }) => ['digest', 'mask'].includes(kind) || of?.kind === 'digest';

/** Return whether the values of a parameter are numbers. */
export const isNumeric = ({ kind }) => kind === 'number' || kind === 'whole';

/** The parameters whose values are sent as they are, as [name, parameter]: not pictures, prompts, adapters. */
export const PLAIN = Object.entries(PARAMETERS).filter(([, one]) => one.group && one.group !== 'adapters' && !isPicture(one));

/** The names of the parameters of a group of a request. */
export const namesOf = (group) => PLAIN.filter(([, one]) => one.group === group).map(([name]) => name);

/** What a form begins with: null where the model has a default, or other settings decide. */
export const INITIAL = Object.fromEntries(PLAIN.map(([name, one]) => [name, initial(one)]));

function initial({ kind, group, default: usual = null }) {
  if (kind === 'text') return '';
  return OF_MODEL.includes(group) ? null : usual;
}

/** Return whether a parameter has an effect beside the values of others. */
export const isUsed = (name, values) => PARAMETERS[name].group !== 'guidance' || name === 'guidance' || Number(values.guidance) > 0;

/** Return the fields of the request for parameters that differ from their defaults, or that a model may set. */
export function statedFields(known) {
  const isStated = ([name, { group, default: usual }]) =>
    name in known && known[name] !== '' && isUsed(name, known) && (OF_MODEL.includes(group) || known[name] !== usual);
  return Object.fromEntries(PLAIN.filter(isStated).map(([name, { field }]) => [field, known[name]]));
}

/** The facts of a picture by name, in the order in which they are shown. */
export const FACTS = {
  prompt,
  original_prompt,
  enhancer,
  negative,
  reference: enhancer, // a name
  digest: { kind: 'digest' },
  ...Object.fromEntries(Object.entries(PARAMETERS).filter(([, one]) => one.group !== 'output')),
  mask: { kind: 'mask' },
  dtype: enhancer,
  backend: enhancer,
};

/** Return the seed after another, as `readSeed`. */
export const seedAfter = (seed, more = 1) => readSeed(BigInt(seed) + BigInt(more));

/** Return the facts that are known and valid. */
export function checkedFacts(facts) {
  const found = readFields(facts, FACTS, (value, how) => value !== null && isValid(value, how));
  if ('seed' in found) found.seed = readSeed(found.seed);
  if (found.loras) found.loras = found.loras.map(({ model, strength = null }) => ({ model, strength }));
  return found;
}

const numbers = PLAIN.filter(([, one]) => OF_MODEL.includes(one.group) && isNumeric(one));

/** The settings that "again" and a grid change, by the names that the draft has for them. */
export const CHANGEABLE = {
  prompt,
  negative,
  model: { kind: 'model' },
  seed,
  steps,
  ...Object.fromEntries(numbers),
  strength,
  control_strength,
  lora_strength: LORA.strength,
};

/** Return the names of the settings of a draft that can be changed: those that have an effect. */
export function changeable(draft) {
  const has = {
    strength: draft.images?.length > 0,
    control_strength: Boolean(draft.control),
    lora_strength: draft.loras?.some((use) => use.on) ?? false,
  };
  return Object.keys(CHANGEABLE).filter((name) => has[name] ?? (!(name in PARAMETERS) || isUsed(name, draft)));
}

/** Return the value of a changeable setting from its text, or null if it is wrong. */
export function readValue(name, written) {
  const how = CHANGEABLE[name];
  const given = written.trim();
  if (how.kind === 'text') return name === 'prompt' && !given ? null : written;
  if (how.kind === 'model') return given || null;
  if (how.kind === 'digits') return readSeed(given);
  const value = given === '' ? NaN : Number(given.replace(',', '.'));
  if (!isValid(value, how) || value % (how.step ?? value)) return null;
  return value;
}

const RANGE = /^\s*([0-9]+)\s*\.\.\s*([0-9]+)\s*$/;

/** Return the texts of values: of numbers with commas and ranges such as 1..4, else one a line. */
export function readValues(name, written) {
  const { kind } = CHANGEABLE[name];
  if (kind === 'text' || kind === 'model') return written.split('\n').filter((line) => line.trim());
  return written
    .split(/[,;\n]|\s+(?!\.\.)(?<!\.\.\s*)/)
    .flatMap((part) => ranged(part, kind))
    .filter(Boolean);
}

function ranged(part, kind) {
  const found = RANGE.exec(part);
  if (!found || kind === 'number') return [part.trim()];
  const [first, last] = [BigInt(found[1]), BigInt(found[2])];
  if (last < first || last - first > 99n) return [part.trim()];
  return Array.from({ length: Number(last - first) + 1 }, (_, index) => String(first + BigInt(index)));
}

/** Return a draft with one setting changed. */
export function withSetting(draft, name, value) {
  if (name === 'seed') return { ...draft, seed: value, seedLocked: true };
  if (name === 'prompt' && value !== draft.prompt) return { ...draft, prompt: value, enhance: false };
  if (name !== 'lora_strength') return { ...draft, [name]: value };
  const loras = draft.loras.map((use) => (use.on ? { ...use, strength: value } : use));
  return { ...draft, loras };
}

/** Return what a draft has for a changeable setting, as text. */
export function settingText(draft, name) {
  if (name === 'lora_strength') return String(draft.loras?.find((use) => use.on)?.strength ?? 1);
  return String(draft[name] ?? '');
}
