// What picture files say about their origin: IPTC's source type in XMP, and the signer of a manifest of C2PA, who is not checked.

import { html, useEffect, useState } from './html.js';
import { t } from './lang.js';

const VOCABULARY = /^https?:\/\/cv\.iptc\.org\/newscodes\/digitalsourcetype\//;
const GENERATED = 'trainedAlgorithmicMedia';
const KNOWN = [GENERATED, 'compositeWithTrainedAlgorithmicMedia'];
const PNG_XMP = 'XML:com.adobe.xmp\0';
const SIGNATURE = 'c2pa.signature\0';
// A certificate, its first part, and version 3: SEQUENCE, SEQUENCE, [0] INTEGER (RFC 5280, 4.1)
const CERTIFICATE = /\x30\x82[^]{2}\x30(?:\x82[^]{2}|\x81[^])\xa0\x03\x02\x01\x02/g;
const NAMES = ['\x06\x03\x55\x04\x03', '\x06\x03\x55\x04\x0a']; // common name, organisation
const SUBJECT = 5; // after the version: serial number, algorithm, issuer, validity, subject
const PIECE = 1 << 15;

/** Return bytes as a text of as many characters. */
function latin(bytes) {
  let text = '';
  for (let at = 0; at < bytes.length; at += PIECE) text += String.fromCharCode(...bytes.subarray(at, at + PIECE));
  return text;
}

const decoded = (text) => new TextDecoder().decode(Uint8Array.from(text, (one) => one.charCodeAt(0)));

/** Return the XMP and the manifest store in a file, both as texts of bytes; empty without them. */
function partsOf(data) {
  const found = { xmp: '', manifest: '' };
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const take = (name, start, end) => {
    const body = data.subarray(start, Math.min(end, data.length));
    if (name === 'XMP ') found.xmp ||= latin(body);
    else if (name === 'C2PA' || name === 'caBX') found.manifest ||= latin(body);
    else if (name === 'iTXt' && latin(body.subarray(0, PNG_XMP.length)) === PNG_XMP && !body[PNG_XMP.length]) {
      const text = latin(body.subarray(PNG_XMP.length + 2));
      found.xmp ||= text.slice(text.indexOf('\0', text.indexOf('\0') + 1) + 1);
    }
  };
  const name = (at) => latin(data.subarray(at, at + 4));
  if (name(0) === '\x89PNG') {
    for (let at = 8; at + 12 <= data.length; at += 12 + view.getUint32(at)) take(name(at + 4), at + 8, at + 8 + view.getUint32(at));
  } else if (name(0) === 'RIFF') {
    for (let at = 12; at + 8 <= data.length; ) {
      const size = view.getUint32(at + 4, true);
      take(name(at), at + 8, at + 8 + size);
      at += 8 + size + (size % 2);
    }
  } else if (data[0] === 0xff && data[1] === 0xd8) {
    for (let at = 2; at + 4 <= data.length && data[at] === 0xff && data[at + 1] !== 0xda; ) {
      const end = at + 2 + view.getUint16(at + 2);
      const body = data.subarray(at + 4, end);
      if (data[at + 1] === 0xe1 && latin(body.subarray(0, 4)) !== 'Exif') found.xmp ||= latin(body);
      // A box in segments: each has a head of 8 bytes, and repeats that of the box (ISO/IEC 19566-5, D.2)
      if (data[at + 1] === 0xeb && latin(body.subarray(0, 2)) === 'JP') found.manifest += latin(body.subarray(found.manifest ? 16 : 8));
      at = end;
    }
  }
  return found;
}

/** Return the content of a value in DER, and the position after it (X.690, 8.1). */
function valueAt(data, at) {
  let length = data.charCodeAt(at + 1);
  let start = at + 2;
  if (length & 0x80) {
    start += length & 0x7f;
    length = [...data.slice(at + 2, start)].reduce((sum, one) => sum * 256 + one.charCodeAt(0), 0);
  }
  return [data.slice(start, start + length), start + length];
}

/** Return the name in the signer's certificate; empty without one. The last signature is that of the file. */
function signerOf(manifest) {
  CERTIFICATE.lastIndex = manifest.lastIndexOf(SIGNATURE) + 1;
  if (!CERTIFICATE.exec(manifest)) return '';
  let at = CERTIFICATE.lastIndex;
  let subject = '';
  for (let count = 0; count < SUBJECT; count++) [subject, at] = valueAt(manifest, at);
  for (const name of NAMES) {
    const place = subject.indexOf(name);
    if (place >= 0) return decoded(valueAt(subject, place + name.length)[0]).slice(0, 200);
  }
  return '';
}

const property = (xmp, name) => new RegExp(`[\\w-]:${name}(?:\\s*=\\s*["']|>\\s*|\\s+rdf:resource\\s*=\\s*["'])([^"'<>]*)`).exec(xmp)?.[1].trim() ?? '';

/** Return what a file says: its source type without its vocabulary, whether it has a manifest, and the signer's name. */
export async function originOf(blob) {
  try {
    const { xmp, manifest } = partsOf(new Uint8Array(await blob.arrayBuffer()));
    return { sourceType: decoded(property(xmp, 'DigitalSourceType')).replace(VOCABULARY, '').slice(0, 200), isSigned: manifest !== '', signer: signerOf(manifest) };
  } catch (error) {
    if (error instanceof RangeError) return { sourceType: '', isSigned: false, signer: '' }; // damaged: it leads out of the data
    throw error;
  }
}

/** Return a PNG that is made of pictures, with the mark of one of them: of a composite if there is one. */
export async function withMarkOf(png, blobs) {
  const marks = [];
  for (const blob of blobs) {
    const { xmp } = partsOf(new Uint8Array(await blob.arrayBuffer()));
    if (property(xmp, 'DigitalSourceType')) marks.push(xmp);
  }
  const xmp = marks.find((one) => property(one, 'DigitalSourceType').replace(VOCABULARY, '') !== GENERATED) ?? marks[0];
  if (!xmp) return png;
  const body = Uint8Array.from(`iTXt${PNG_XMP}\0\0\0\0${xmp}`, (one) => one.charCodeAt(0));
  const frame = new DataView(new ArrayBuffer(8));
  frame.setUint32(0, body.length - 4);
  frame.setUint32(4, crc32(body));
  const head = 33; // the signature of PNG, and its first chunk
  return new Blob([png.slice(0, head), frame.buffer.slice(0, 4), body, frame.buffer.slice(4), png.slice(head)], { type: 'image/png' });
}

/** Return the checksum of PNG (PNG specification, annex D). */
function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

function useOrigin(blob) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    originOf(blob).then((one) => isCurrent && setFound(one), () => {});
    return () => (isCurrent = false);
  }, [blob]);
  return found;
}

const typeText = (sourceType) => (KNOWN.includes(sourceType) ? t(`origin.${sourceType}`) : sourceType);
const signerText = (signer) => t('origin.unchecked', { signer: signer || '?' });

/** What a picture says about its origin, as facts. */
export function Origin({ blob }) {
  const found = useOrigin(blob);
  return found && html`<dl class="origin">
    <div class="fact"><dt>${t('origin.title')}</dt><dd>${typeText(found.sourceType) || t('origin.none')}</dd></div>
    ${found.isSigned && html`<div class="fact"><dt>${t('origin.signer')}</dt><dd>${signerText(found.signer)}</dd></div>`}
  </dl>`;
}

/** The same in a line, if there is something. */
export function OriginLine({ blob }) {
  const found = useOrigin(blob);
  const signed = found?.isSigned && `${t('origin.signer')}: ${signerText(found.signer)}`;
  const texts = [found && typeText(found.sourceType), signed].filter(Boolean);
  return texts.length > 0 && html`<p class="field-hint origin">${texts.join('. ')}</p>`;
}
