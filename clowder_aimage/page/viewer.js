// One picture as large as the window, with its facts and what can be done with it.

import { html, useEffect, useRef, useState } from './html.js';
import { Again } from './again.js';
import { pictureUrl } from './api.js';
import { Button, Fold, IconButton, Later } from './controls.js';
import { Command, Facts } from './facts.js';
import { changed, get } from './gallery_store.js';
import { gridBase } from './grid_run.js';
import { t } from './lang.js';
import { draftOf, enlargePicture, loadSettings, mostImages, usePicture } from './picture_draft.js';
import { pictureName } from './copy_text.js';
import { saveEntry } from './picture_file.js';
import { removePictures } from './removal.js';
import { draft, show } from './state.js';

const SWIPE = 48; // pixels

/**
 * The viewer. Props: `ids` of the pictures, in order, and the `id` that is shown; `onShow(id)`,
 * `onClose()`, and `onCompare(id, other)` if two can be compared.
 */
export function Viewer({ ids, id, onShow, onClose, onCompare }) {
  const element = useRef(null);
  const parts = useRef(null);
  const entry = useEntry(id);
  const [isActual, setActual] = useState(false);
  const at = ids.indexOf(id);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    element.current.focus(); // not a button, which a key would press
    return () => before?.isConnected && before.focus?.();
  }, []);
  useEffect(() => setActual(false), [id]);
  const go = (index) => index >= 0 && index < ids.length && index !== at && onShow(ids[index]);
  const discard = () => {
    const next = ids[at + 1] ?? ids[at - 1];
    removePictures([id]);
    if (next === undefined) onClose();
    else onShow(next);
  };
  const full = () => (document.fullscreenElement ? document.exitFullscreen() : parts.current.requestFullscreen?.())?.catch(() => {}); // a dialog itself may not
  const keys = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0), End: () => go(ids.length - 1), Delete: discard, f: full, z: () => setActual(!isActual) };
  const pressed = (event) => {
    const act = keys[event.key];
    const isTyping = event.target.closest('input, textarea, select, [role="slider"], .command');
    if (!act || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  return html`<dialog ref=${element} class="viewer" tabindex="-1" aria-label=${t('viewer.title')} onClose=${onClose} onKeyDown=${pressed}>
    <div class="viewer-parts" ref=${parts}>
      <${Stage} ...${{ entry, isActual, setActual }} onPrevious=${() => go(at - 1)} onNext=${() => go(at + 1)} />
      <div class="viewer-bar">
        <span class="viewer-place" role="status">${t('viewer.place', { n: at + 1, of: ids.length })}</span>
        <${IconButton} icon="arrowLeft" label=${t('viewer.previous')} aria-disabled=${at <= 0} onClick=${() => go(at - 1)} />
        <${IconButton} icon="arrowRight" label=${t('viewer.next')} aria-disabled=${at >= ids.length - 1} onClick=${() => go(at + 1)} />
        <${IconButton} icon="zoom" label=${t('viewer.actual')} aria-pressed=${isActual} onClick=${() => setActual(!isActual)} />
        <${IconButton} icon="full" label=${t('viewer.full')} onClick=${full} />
        <${IconButton} icon="close" label=${t('dialog.close')} onClick=${onClose} />
      </div>
      <div class="viewer-side">
        ${entry ? html`<${Side} ...${{ entry, onClose, discard }} key=${entry.id} onMade=${(made) => made && onCompare?.(entry.id, made)}
          onCompare=${onCompare && ids.length > 1 && (() => onCompare(ids[at + 1] ?? ids[at - 1], id))} />`
          : entry === undefined && html`<p>${t('viewer.gone')}</p>`}
      </div>
    </div>
  </dialog>`;
}

/** Return the whole entry of an id; null until it is read, undefined if it was removed. */
export function useEntry(id) {
  const [entry, setEntry] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    get(id).then((found) => isCurrent && setEntry((old) => (old && found && old.id === found.id ? old : found)), () => isCurrent && setEntry(undefined));
    return () => (isCurrent = false);
  }, [id, changed.value]);
  return entry;
}

/** The picture. Swiping leads to the next one; a click shows it at its own size, or fitted. */
function Stage({ entry, isActual, setActual, onPrevious, onNext }) {
  const from = useRef(null);
  const down = (event) => (from.current = event.pointerType === 'touch' && event.isPrimary ? [event.clientX, event.clientY] : null);
  const up = (event) => {
    if (!from.current || isActual) return;
    const [across, along] = [event.clientX - from.current[0], event.clientY - from.current[1]];
    from.current = null;
    if (Math.abs(across) < SWIPE || Math.abs(across) < 1.5 * Math.abs(along)) return;
    if (across < 0) onNext();
    else onPrevious();
  };
  return html`<div class=${`viewer-stage ${isActual ? 'viewer-actual' : ''}`} onPointerDown=${down} onPointerUp=${up}>
    ${entry?.blob && html`<img src=${pictureUrl(entry.blob)} alt=${String(entry.facts?.prompt ?? '') || t('gallery.noPrompt')}
      draggable=${false} onDblClick=${() => setActual(!isActual)} />`}
  </div>`;
}

function Side({ entry, onClose, discard, onMade, onCompare }) {
  const leave = (act) => () => {
    onClose();
    act();
  };
  const grid = () => {
    gridBase.value = { draft: draftOf(entry.facts, entry.inputs).draft, name: pictureName(entry.facts) };
    show('gallery');
  };
  return html`<p class="viewer-prompt">${String(entry.facts?.prompt ?? '') || t('gallery.noPrompt')}</p>
    <div class="viewer-acts">
      <${Button} kind="primary" icon="image" onClick=${leave(() => usePicture(entry.blob))}>${t('pictures.use')}<//>
      <${Button} icon="make" onClick=${leave(() => loadSettings(entry.facts, entry.inputs, pictureName(entry.facts)))}>${t('viewer.load')}<//>
      <${Button} icon="download" onClick=${() => saveEntry(entry)}>${t('viewer.save')}<//>
      ${mostImages(draft.value.model) === 1 && html`<${Button} icon="full" onClick=${leave(() => enlargePicture(entry))}>${t('enlarge.go')}<//>`}
      ${onCompare && html`<${Button} icon="compare" onClick=${onCompare}>${t('compare.title')}<//>`}
      <${Button} icon="grid" onClick=${leave(grid)}>${t('grid.title')}<//>
      <${Button} kind="danger" icon="trash" onClick=${discard}>${t('gallery.remove')}<//>
    </div>
    <div>
      <${Fold} title=${t('again.title')}><${Again} entry=${entry} onMade=${onMade} /><//>
      <${Command} entry=${entry} />
      <${Fold} title=${t('facts.title')} isOpen=${true}>
        <${Later} load=${() => import('./origin.js')} name="Origin" blob=${entry.blob} />
        <${Facts} entry=${entry} />
      <//>
    </div>`;
}
