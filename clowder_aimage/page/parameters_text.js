// The settings that stable-diffusion-webui writes into a PNG: text under "parameters" (its create_infotext).

const SIGNATURE = 8; // bytes before the first chunk (PNG, 5.2)
const KEY = 'parameters\0';
const MOST = 1 << 20;
const PAIR = /\s*([\w][\w \-/]*):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)/g;

/** Return the text under "parameters" in the bytes of a PNG; empty without it. Not of compressed chunks. */
export function parametersText(buffer) {
  const data = new Uint8Array(buffer);
  const view = new DataView(buffer);
  for (let at = SIGNATURE; at + 12 <= data.length;) {
    const length = view.getUint32(at);
    const kind = latin(data.subarray(at + 4, at + 8));
    const chunk = data.subarray(at + 8, Math.min(at + 8 + Math.min(length, MOST), data.length));
    if (latin(chunk.subarray(0, KEY.length)) === KEY) {
      if (kind === 'tEXt') return latin(chunk.subarray(KEY.length));
      if (kind === 'iTXt' && chunk[KEY.length] === 0) return international(chunk.subarray(KEY.length + 2));
    }
    at += 12 + length;
  }
  return '';
}

const latin = (bytes) => new TextDecoder('latin1').decode(bytes);

function international(bytes) {
  const language = bytes.indexOf(0);
  const keyword = bytes.indexOf(0, language + 1);
  return language < 0 || keyword < 0 ? '' : new TextDecoder().decode(bytes.subarray(keyword + 1));
}

/** Return the facts that the text states, with the names of ours; null if it is not in that form. */
export function parsedParameters(text) {
  const lines = text.replaceAll('\r\n', '\n').trim().split('\n');
  const last = lines.pop() ?? '';
  if (!/^Steps: [0-9]+/.test(last)) return null;
  const pairs = Object.fromEntries([...last.matchAll(PAIR)].map(([, key, value]) => [key.trim(), unquoted(value)]));
  const start = lines.findIndex((line) => line.startsWith('Negative prompt:'));
  const negative = start < 0 ? '' : lines.slice(start).join('\n').slice('Negative prompt:'.length).trim();
  const [, width, height] = /^([0-9]+)x([0-9]+)$/.exec(pairs.Size ?? '') ?? [];
  const found = {
    prompt: (start < 0 ? lines : lines.slice(0, start)).join('\n').trim(),
    negative: negative || undefined,
    reference: pairs.Model,
    steps: Number(pairs.Steps),
    guidance: numberOf(pairs['CFG scale']),
    seed: pairs.Seed,
    width: numberOf(width),
    height: numberOf(height),
  };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined && value !== ''));
}

const numberOf = (text) => (text === undefined || text.trim() === '' ? undefined : Number(text));

function unquoted(value) {
  if (!value.startsWith('"')) return value.trim();
  try {
    return String(JSON.parse(value));
  } catch {
    return value.slice(1, -1);
  }
}

/** Return the facts in the bytes of a PNG of another program; null without them. */
export async function parametersFacts(buffer) {
  const text = parametersText(buffer);
  return text ? parsedParameters(text) : null;
}
