// The facts that the worker writes into JPEG and WebP files: JSON in Exif's tag MakerNote, after "aimage" and a zero byte.

const EXIF = 'Exif\0\0';
const KEY = 'aimage\0';
const DIRECTORY_TAG = 0x8769;
const NOTE_TAG = 0x927c;
const MOST = 1 << 20;

const latin = (bytes) => String.fromCharCode(...bytes);
const begins = (data, at, text) => latin(data.subarray(at, at + text.length)) === text;

/** Return the JSON of the facts in the bytes of a JPEG or WebP file; empty without them. */
export function exifText(buffer) {
  const data = new Uint8Array(buffer);
  try {
    const exif = begins(data, 0, '\xff\xd8') ? ofJpeg(data) : begins(data, 0, 'RIFF') && begins(data, 8, 'WEBP') ? ofWebp(data) : null;
    const note = exif && makerNote(exif);
    const isOurs = note && note.length <= MOST && begins(note, 0, KEY);
    return isOurs ? new TextDecoder().decode(note.subarray(KEY.length)) : '';
  } catch (error) {
    if (error instanceof RangeError) return ''; // damaged: it leads out of the data
    throw error;
  }
}

const viewOf = (data) => new DataView(data.buffer, data.byteOffset, data.byteLength);

/** Return the Exif data of a JPEG file (Exif 2.3, 4.5.4): it is before the first scan. */
function ofJpeg(data) {
  const view = viewOf(data);
  for (let at = 2; at + 4 <= data.length && data[at] === 0xff && data[at + 1] !== 0xda; ) {
    const end = at + 2 + view.getUint16(at + 2);
    if (data[at + 1] === 0xe1 && begins(data, at + 4, EXIF)) return data.subarray(at + 4 + EXIF.length, end);
    at = end;
  }
  return null;
}

/** Return the Exif data of a WebP file (RFC 9649, 2.7). */
function ofWebp(data) {
  const view = viewOf(data);
  for (let at = 12; at + 8 <= data.length; ) {
    const length = view.getUint32(at + 4, true);
    const found = data.subarray(at + 8, at + 8 + length);
    if (begins(data, at, 'EXIF')) return begins(found, 0, EXIF) ? found.subarray(EXIF.length) : found;
    at += 8 + length + (length % 2);
  }
  return null;
}

/** Return the tag MakerNote of Exif data, or null (TIFF 6.0, 2). Throws a RangeError if it is damaged. */
function makerNote(exif) {
  const isLittle = begins(exif, 0, 'II*\0');
  if (!isLittle && !begins(exif, 0, 'MM\0*')) return null;
  const view = viewOf(exif);
  const [, directory] = tag(view, view.getUint32(4, isLittle), DIRECTORY_TAG, isLittle);
  const [size, start] = directory ? tag(view, directory, NOTE_TAG, isLittle) : [0, 0];
  return size && start + size <= exif.length ? exif.subarray(start, start + size) : null;
}

/** Return the count and the offset of the values of a tag in a directory, or zeros. */
function tag(view, at, wanted, isLittle) {
  const count = view.getUint16(at, isLittle);
  for (let index = 0; index < count; index++) {
    const entry = at + 2 + 12 * index;
    if (view.getUint16(entry, isLittle) === wanted) return [view.getUint32(entry + 4, isLittle), view.getUint32(entry + 8, isLittle)];
  }
  return [0, 0];
}
