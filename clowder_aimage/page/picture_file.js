// Pictures as files: saved as they were received.

import { pictureName } from './copy_text.js';
import { get } from './gallery_store.js';

/** Save a Blob as a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // after the browser has read it
}

/** Save a picture of the gallery, whose facts are in it. */
export const saveEntry = (entry) => save(entry.blob, pictureName(entry.facts));

/** Save pictures of the gallery by their ids. */
export async function saveAll(ids) {
  for (const id of ids) {
    const entry = await get(id);
    if (entry) saveEntry(entry);
  }
}

/** Copy a text. Without the clipboard interface, which pages over plain HTTP lack, by a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const place = document.createElement('textarea');
    place.value = text;
    (document.querySelector('dialog[open]') ?? document.body).append(place);
    place.select();
    const isCopied = document.execCommand('copy');
    place.remove();
    return isCopied;
  }
}
