// Pictures that were removed from the gallery, until the next removal: they can be put back.

import { html, signal } from './html.js';
import { Button, IconButton } from './controls.js';
import { get, put, remove } from './gallery_store.js';
import { t } from './lang.js';
import { notice } from './state.js';

const removed = signal([]);

/** Remove pictures from the gallery by their ids. */
export async function removePictures(ids) {
  try {
    const entries = (await Promise.all(ids.map(get))).filter(Boolean);
    for (const id of ids) await remove(id);
    removed.value = entries;
  } catch (error) {
    notice(t('gallery.failed', { reason: error.message }), { kind: 'bad' });
  }
}

async function putBack() {
  const entries = removed.value;
  removed.value = [];
  try {
    for (const entry of entries) await put(entry);
  } catch (error) {
    notice(t('gallery.failed', { reason: error.message }), { kind: 'bad' });
  }
}

/** What was removed, with a button that undoes it. It stays until it is closed. */
export function Removed() {
  const n = removed.value.length;
  return html`<div role="status" class="removed-place">
    ${n > 0 && html`<div class="removed">
      <span>${n === 1 ? t('gallery.removedOne') : t('gallery.removed', { n })}</span>
      <${Button} kind="quiet" icon="undo" onClick=${putBack}>${t('gallery.undo')}<//>
      <${IconButton} icon="close" size=${16} label=${t('dialog.close')} onClick=${() => (removed.value = [])} />
    </div>`}
  </div>`;
}
