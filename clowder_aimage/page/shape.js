// The one reader of values that others may have written: facts of files, and what the browser keeps.
//
// A shape is a parameter of parameters.js, or like one: a `kind` with bounds, and `of` for what is inside.

import { PARAMETERS } from './parameters.js';

const DIGEST = /^sha256:[0-9a-f]{64}$/;
const { seed } = PARAMETERS;

export const TEXT = { kind: 'text' };
export const FLAG = { kind: 'flag' };
export const WHOLE = { kind: 'whole' };
export const NUMBER = { kind: 'number' };

/** Return a shape that permits null too. */
export const optional = (how) => ({ ...how, isOptional: true });

/** Return the shape of a list. */
export const listOf = (of) => ({ kind: 'list', of });

/** Return the shape of an object with the fields `of`. */
export const objectOf = (of) => ({ kind: 'object', of });

/** Return a seed as the number or, beyond what a number holds exactly, as its digits; else null. */
export function readSeed(value) {
  if (!['string', 'number', 'bigint'].includes(typeof value)) return null;
  if (!/^[0-9]+$/.test(String(value)) || String(value).length > seed.most.length) return null;
  const found = BigInt(value);
  if (found > BigInt(seed.most)) return null;
  return found <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(found) : String(found);
}

const isNumber = (value, { least = -Infinity, above = -Infinity, most = Infinity }) =>
  typeof value === 'number' && Number.isFinite(value) && value >= least && value > above && value <= most;
const isDigest = (value) => typeof value === 'string' && DIGEST.test(value);
const isWithin = ({ length }, { least = 0, most = Infinity }) => length >= least && length <= most;
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const fieldOf = (value, name) => (Object.hasOwn(value, name) ? value[name] ?? null : null);
const CHECKS = {
  number: isNumber,
  whole: (value, how) => Number.isInteger(value) && isNumber(value, how),
  text: (value, how) => typeof value === 'string' && isWithin(value, how) && (how.like?.test(value) ?? true),
  flag: (value) => typeof value === 'boolean',
  digits: (value) => readSeed(value) !== null,
  digest: isDigest,
  mask: (value) => value === 'alpha' || isDigest(value),
  one: (value, how) => how.of.includes(value),
  list: (value, how) => Array.isArray(value) && isWithin(value, how) && value.every((each) => isValid(each, how.of)),
  object: (value, how) => isObject(value) && Object.entries(how.of).every(([name, one]) => isValid(fieldOf(value, name), one)),
};

/** Return whether a value has a shape. */
export const isValid = (value, how) => (value === null ? Boolean(how.isOptional) : CHECKS[how.kind](value, how));

/** Return whether a value has a shape, whatever its bounds: a person may not have finished typing. */
export function isTyped(value, { kind, of }) {
  if (value === null) return kind !== 'text';
  if (kind === 'list') return Array.isArray(value) && value.every((each) => isValid(each, unbounded(of)));
  return isValid(value, unbounded({ kind, of }));
}

const unbounded = ({ kind, of }) => ({ kind, of });

/** Return the fields of an object, by their shapes; those that are missing or wrong are left out. */
export function readFields(value, shapes, accepts = isValid) {
  if (!isObject(value)) return {};
  const fields = Object.entries(shapes).filter(([name, how]) => Object.hasOwn(value, name) && accepts(value[name], how));
  return Object.fromEntries(fields.map(([name]) => [name, value[name]]));
}

/** Return a value of a shape, else `otherwise`; of a list, the items of its shape. */
export function readShape(value, how, otherwise = null) {
  if (how.kind === 'list' && Array.isArray(value)) return value.filter((each) => isValid(each, how.of));
  return value !== null && isValid(value, how) ? value : otherwise;
}
