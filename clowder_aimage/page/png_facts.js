// The facts that the worker writes into a PNG: JSON in an international text chunk "aimage" (PNG, 11.3.3.4).

const MAGIC = [137, 80, 78, 71, 13, 10, 26, 10];
const KEY = 'aimage';
const MAX = 1 << 20;
const SEED = /"seed":\s*([0-9]{16,20})(?=[,}])/;

/**
 * Return the facts in the bytes of a PNG; null if it has none.
 *
 * They are prompt, width, height, steps, seed, negative, guidance, digest of the model and so on.
 */
export async function pngFacts(buffer) {
  const data = new Uint8Array(buffer);
  if (MAGIC.some((byte, index) => data[index] !== byte)) return null;
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  for (let at = MAGIC.length; at + 12 <= data.length; ) {
    const length = view.getUint32(at);
    const chunk = data.subarray(at + 8, Math.min(at + 8 + length, data.length));
    if (latin(data.subarray(at + 4, at + 8)) === 'iTXt') {
      const facts = await factsOf(chunk);
      if (facts) return facts;
    }
    at += 12 + length;
  }
  return null;
}

const latin = (bytes) => String.fromCharCode(...bytes);

async function factsOf(chunk) {
  const end = chunk.indexOf(0);
  if (end < 0 || end > 79 || latin(chunk.subarray(0, end)) !== KEY) return null;
  const isCompressed = chunk[end + 1] === 1;
  const language = chunk.indexOf(0, end + 3);
  const keyword = chunk.indexOf(0, language + 1);
  if (language < 0 || keyword < 0) return null;
  try {
    const raw = chunk.subarray(keyword + 1);
    return parsedFacts(new TextDecoder().decode(isCompressed ? await inflated(raw) : raw));
  } catch {
    return null; // damaged, or of another program
  }
}

/** Return facts from their JSON; seeds that numbers do not hold exactly are texts. Throws a SyntaxError. */
export function parsedFacts(text) {
  const facts = JSON.parse(text.replace(SEED, '"seed":"$1"'));
  return facts && typeof facts === 'object' && !Array.isArray(facts) ? facts : null;
}

/** Return inflated data of at most MAX bytes (RFC 1950). Throws a TypeError if it is damaged. */
async function inflated(raw) {
  const reader = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate')).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return new Blob(parts).arrayBuffer();
    parts.push(value);
    if ((size += value.length) > MAX) throw new TypeError('too large');
  }
}
