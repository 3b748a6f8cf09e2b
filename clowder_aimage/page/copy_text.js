// Write the request of a picture as a line of `aimage run`, as curl and as Python.

import { checkedFacts, PLAIN, statedFields } from './setting.js';

const OWN = 'adapters/'; // adapters that are a part of the model
const UNQUOTED = /^[A-Za-z0-9_/.:@][A-Za-z0-9_/.:@+,-]*$/;
const CONTROL = /[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g;
const LOCAL = new Set(['127.0.0.1:11434', 'localhost:11434']);
const ENDINGS = { 'image/png': 'png', 'image/jpeg': 'jpg', 'image/webp': 'webp' };

const code = (character) => character.codePointAt(0).toString(16).padStart(4, '0');

/**
 * Return a text as one word of a shell.
 *
 * Control characters, which a terminal would obey when the line is pasted, are escaped by $'...'
 * (POSIX.1-2024, 2.2.4).
 */
export function shellWord(text) {
  if (UNQUOTED.test(text)) return text;
  if (!text.match(CONTROL)) return `'${text.replaceAll("'", "'\\''")}'`;
  const escaped = text.replace(/['\\]/g, '\\$&').replace(CONTROL, (one) => octal(one));
  return `$'${escaped}'`;
}

const octal = (one) =>
  one === '\n'
    ? '\\n'
    : [...new TextEncoder().encode(one)].map((byte) => `\\${byte.toString(8).padStart(3, '0')}`).join('');

/** Return a value as JSON without control characters; seeds beyond 2^53 are digits. */
function json(value) {
  return JSON.stringify(value)
    .replace(CONTROL, (one) => `\\u${code(one)}`)
    .replace(/"seed":"([0-9]+)"/, '"seed":$1');
}

/** Return a name for the file of a picture: the first words of its prompt, and its seed. */
export function pictureName(facts, ending = 'png') {
  const words =
    String(facts.prompt ?? '')
      .toLowerCase()
      .match(/[\p{L}\p{N}]+/gu) ?? [];
  const short = words.slice(0, 8).join('-').slice(0, 60) || 'picture';
  return `${short}${facts.seed === undefined ? '' : `-${facts.seed}`}.${ending}`;
}

/** Return the name under which a picture that was an input is saved, by its digest and type. */
export const inputName = (digest, type) => `input-${digest.slice(7, 15)}.${ENDINGS[type] ?? 'png'}`;

/** Return the inputs of facts: `[field, digest]`, in the order of the request. */
export function inputsOf(facts) {
  const found = facts.image ? [['image', facts.image]] : [];
  for (const digest of facts.references ?? []) found.push(['images', digest]);
  for (const name of ['mask', 'control']) {
    if (facts[name] && facts[name] !== 'alpha') found.push([name, facts[name]]);
  }
  return found;
}

/** Return the fields of the request that makes a picture again, without its input pictures. */
export function requestFields(facts) {
  const known = checkedFacts(facts);
  const { width, height, expand, ...others } = statedFields(known);
  const fields = { model: known.reference, prompt: known.prompt };
  if (!expand) fields.size = `${width}x${height}`;
  if ('original_prompt' in known) for (const name of ['original_prompt', 'enhancer']) if (name in known) fields[name] = known[name];
  const loras = (known.loras ?? []).filter((use) => !use.model.startsWith(OWN));
  if (loras.length) fields.loras = loras;
  if (known.mask) fields[known.mask === 'alpha' ? 'mask' : 'painted'] = known.mask === 'alpha' ? 'alpha' : 'white';
  return { ...fields, ...others, ...(expand && { expand: expand.join(',') }) };
}

const OPTIONS = Object.fromEntries(PLAIN.map(([name, { field }]) => [field, `--${name.replaceAll('_', '-')}`]));
const NOT_OPTIONS = new Set(['model', 'prompt', 'original_prompt', 'enhancer', 'painted', 'loras']);

/**
 * Return the line of `aimage run` that makes a picture again on the worker at `host`.
 *
 * `names` are the names of its input files by their digests.
 */
export function runLine(facts, { host, names = {} }) {
  const fields = requestFields(facts);
  const words = ['aimage', 'run'];
  for (const [name, value] of Object.entries(fields)) {
    if (NOT_OPTIONS.has(name)) continue;
    words.push(OPTIONS[name] ?? `--${name}`);
    if (value !== true) words.push(shellWord(String(value)));
  }
  for (const use of fields.loras ?? []) words.push('--lora', shellWord(loraText(use)));
  for (const [name, digest] of inputsOf(checkedFacts(facts))) {
    words.push(`--${name === 'images' ? 'image' : name}`, shellWord(names[digest]));
  }
  const worker = LOCAL.has(host) ? '' : `AIMAGE_HOST=${shellWord(host)} `;
  return worker + stated(words, fields.model, fields.prompt);
}

const loraText = ({ model, strength }) => (strength === null ? model : `${model}:${strength}`);

/** Return the line with the model and the prompt after `--`: one that begins with `-` is not an option. `-` is stdin. */
function stated(words, model, prompt) {
  const line = [...words, '--', shellWord(model)];
  return prompt === '-' ? `printf %s - | ${line.join(' ')}` : [...line, shellWord(prompt)].join(' ');
}

/** Return the request of a picture as curl, which writes the file `name`. */
export function curlText(facts, { origin, names = {}, hasToken = false }) {
  const inputs = inputsOf(checkedFacts(facts));
  const body = json(requestFields(facts));
  const lines = [`curl -s ${shellWord(`${origin}/v1/images/generations`)}`, "-H 'Content-Type: application/json'"];
  if (hasToken) lines.push('-H "Authorization: Bearer $AIMAGE_TOKEN"');
  const to = `jq -r '.data[0].b64_json' | base64 -d > ${shellWord(pictureName(facts))}`;
  if (!inputs.length) return [...lines, `-d ${shellWord(body)} | ${to}`].join(' \\\n  ');
  const quoted = body.slice(0, -1).replace(/[\\$`]/g, '\\$&');
  const files = Object.entries(
    grouped(inputs, (digest) => `"data:;base64,$(base64 < ${names[digest]} | tr -d '\\n')"`),
  );
  const pictures = files.map(([name, values]) => `,\n"${name}":${name === 'images' ? `[${values}]` : values}`);
  return `${[...lines, `-d @- <<END | ${to}`].join(' \\\n  ')}\n${quoted}${pictures.join('')}}\nEND`;
}

function grouped(inputs, written) {
  const found = {};
  for (const [name, digest] of inputs) (found[name] ??= []).push(written(digest));
  return found;
}

/** Return the request of a picture as a program in Python, with its standard library alone. */
export function pythonText(facts, { origin, names = {}, hasToken = false }) {
  const files = grouped(inputsOf(checkedFacts(facts)), (digest) => `data_url(${python(names[digest])})`);
  const fields = Object.entries(requestFields(facts)).map(([name, value]) => [name, python(value, name)]);
  for (const [name, values] of Object.entries(files))
    fields.push([name, name === 'images' ? `[${values.join(', ')}]` : values[0]]);
  const headers = ['"Content-Type": "application/json"'];
  if (hasToken) headers.push('"Authorization": f"Bearer {os.environ[\'AIMAGE_TOKEN\']}"');
  return [
    `import base64\nimport json\n${hasToken ? 'import os\n' : ''}import urllib.request\n\n`,
    Object.keys(files).length ? DATA_URL : '',
    `body = {\n${fields.map(([name, value]) => `    "${name}": ${value},\n`).join('')}}\n`,
    `request = urllib.request.Request(\n    ${python(`${origin}/v1/images/generations`)},\n`,
    `    json.dumps(body).encode(),\n    {${headers.join(', ')}},\n)\n`,
    `with urllib.request.urlopen(request) as response:\n    answer = json.load(response)\n`,
    `with open(${python(pictureName(facts))}, "wb") as file:\n`,
    `    file.write(base64.b64decode(answer["data"][0]["b64_json"]))\n`,
  ].join('');
}

const DATA_URL = `def data_url(path):
    with open(path, "rb") as file:
        return f"data:;base64,{base64.b64encode(file.read()).decode()}"


`;

/** Return a value as a literal of Python. */
function python(value, name = '') {
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (value === null) return 'None';
  if (Array.isArray(value)) return `[${value.map((one) => python(one)).join(', ')}]`;
  if (typeof value === 'object')
    return `{${Object.entries(value)
      .map(([key, one]) => `"${key}": ${python(one)}`)
      .join(', ')}}`;
  if (name === 'seed') return String(value);
  return typeof value === 'string' ? json(value) : String(value);
}
