// The settings of a picture: those that its facts state, checked, as a person changes them.
//
// Facts come from files, which anyone may have written: only known keys with the right types pass.

const DIGEST = /^sha256:[0-9a-f]{64}$/;
const number = (least, most) => ({ kind: 'number', least, most });
const whole = (least, most) => ({ kind: 'whole', least, most });
const text = (most) => ({ kind: 'text', most });
const flag = { kind: 'flag' };

/** The facts of a picture by name, in the order in which they are shown. */
export const SETTINGS = {
  prompt: text(32000),
  original_prompt: text(32000),
  negative: text(32000),
  reference: text(1024),
  digest: { kind: 'digest' },
  width: whole(16, 8192),
  height: whole(16, 8192),
  steps: whole(1, 1000),
  seed: { kind: 'seed' },
  guidance: number(0, 1000),
  guidance_end: number(0, 1),
  cfg_normalization: number(0, 10000),
  shift: number(0.001, 1000),
  cache_threshold: number(0, 10),
  loras: { kind: 'loras' },
  image: { kind: 'digest' },
  references: { kind: 'digests' },
  mask: { kind: 'mask' },
  strength: number(0, 1),
  fine: flag,
  fit: { kind: 'one', of: ['crop', 'pad', 'stretch'] },
  paste: flag,
  feather: whole(0, 256),
  crop: flag,
  expand: { kind: 'sides' },
  upscale: number(0, 4),
  control: { kind: 'digest' },
  controlnet: text(1024),
  control_strength: number(0, 10),
  enhancer: text(1024),
  dtype: text(40),
  backend: text(200),
};

const MOST_SEED = (1n << 64n) - 1n;

/** Return a seed as the number or, beyond what a number holds exactly, as its digits; else null. */
export function readSeed(value) {
  if (!/^[0-9]{1,20}$/.test(String(value))) return null;
  const seed = BigInt(value);
  if (seed > MOST_SEED) return null;
  return seed <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(seed) : String(seed);
}

/** Return the seed after another, as `readSeed`. */
export const seedAfter = (seed, more = 1) => readSeed(BigInt(seed) + BigInt(more));

const isNumber = (value, { least, most }) =>
  typeof value === 'number' && Number.isFinite(value) && value >= least && value <= most;
const isText = (value, { most }) => typeof value === 'string' && value.length <= most;
const isDigest = (value) => typeof value === 'string' && DIGEST.test(value);
const isLora = (use) =>
  use !== null &&
  typeof use === 'object' &&
  isText(use.model, { most: 1024 }) &&
  (use.strength === null || isNumber(use.strength, { least: -100, most: 100 }));

const CHECKS = {
  number: isNumber,
  whole: (value, how) => Number.isInteger(value) && isNumber(value, how),
  text: isText,
  flag: (value) => typeof value === 'boolean',
  seed: (value) => readSeed(value) !== null,
  digest: isDigest,
  mask: (value) => value === 'alpha' || isDigest(value),
  digests: (value) => Array.isArray(value) && value.length <= 4 && value.every(isDigest),
  one: (value, how) => how.of.includes(value),
  loras: (value) => Array.isArray(value) && value.length <= 16 && value.every(isLora),
  sides: (value) =>
    Array.isArray(value) && value.length === 4 && value.every((side) => CHECKS.whole(side, { least: 0, most: 4096 })),
};

/** Return the facts that are known and valid. */
export function checkedFacts(facts) {
  const found = {};
  for (const [name, how] of Object.entries(SETTINGS)) {
    if (CHECKS[how.kind](facts?.[name], how)) found[name] = facts[name];
  }
  if ('seed' in found) found.seed = readSeed(found.seed);
  if (found.loras) found.loras = found.loras.map(({ model, strength }) => ({ model, strength }));
  return found;
}

/** The settings that "again" and a grid change, by the names that the draft has for them. */
export const CHANGEABLE = {
  prompt: { kind: 'text' },
  negative: { kind: 'text' },
  model: { kind: 'model' },
  seed: { kind: 'seed' },
  steps: whole(1, 1000),
  guidance: number(0, 1000),
  shift: number(0.001, 1000),
  width: { ...whole(16, 8192), step: 16 },
  height: { ...whole(16, 8192), step: 16 },
  strength: number(0.01, 1),
  controlStrength: number(0, 10),
  loraStrength: number(-100, 100),
};

/** Return the names of the settings of a draft that can be changed: those that have an effect. */
export function changeable(draft) {
  const has = {
    strength: draft.images?.length > 0,
    controlStrength: Boolean(draft.control),
    loraStrength: draft.loras?.some((use) => use.on) ?? false,
    negative: Number(draft.guidance) > 0,
  };
  return Object.keys(CHANGEABLE).filter((name) => has[name] ?? true);
}

/** Return the value of a changeable setting from its text, or null if it is wrong. */
export function readValue(name, written) {
  const how = CHANGEABLE[name];
  const given = written.trim();
  if (how.kind === 'text') return name === 'prompt' && !given ? null : written;
  if (how.kind === 'model') return given || null;
  if (how.kind === 'seed') return readSeed(given);
  const value = given === '' ? NaN : Number(given.replace(',', '.'));
  if (!CHECKS[how.kind](value, how) || value % (how.step ?? value)) return null;
  return value;
}

const RANGE = /^\s*([0-9]{1,20})\s*\.\.\s*([0-9]{1,20})\s*$/;

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
  if (name !== 'loraStrength') return { ...draft, [name]: value };
  const loras = draft.loras.map((use) => (use.on ? { ...use, strength: value } : use));
  return { ...draft, loras };
}

/** Return what a draft has for a changeable setting, as text. */
export function settingText(draft, name) {
  if (name === 'loraStrength') return String(draft.loras?.find((use) => use.on)?.strength ?? 1);
  return String(draft[name] ?? '');
}
