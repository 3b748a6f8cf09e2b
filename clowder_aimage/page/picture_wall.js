// A wall of pictures of any number: only the rows that are seen are in the document.

import { html, useEffect, useLayoutEffect, useRef, useState } from './html.js';
import { thumb } from './gallery_store.js';
import { t } from './lang.js';

const GAP = 12, LEAST = 132, WIDEST = 200, CAPTION = 26; // pixels
const SPARE = 3; // rows above and below
const MOST_URLS = 600;
const PAUSE = 60; // milliseconds: pictures that are only passed are not read
const urls = new Map(); // of small copies by id, the last used at the end

/** Return the URL of the small copy of a picture; null if it is not kept. */
async function thumbUrl(id) {
  let url = urls.get(id);
  urls.delete(id);
  if (!url) {
    const blob = await thumb(id);
    if (!blob) return null;
    url = urls.get(id) ?? URL.createObjectURL(blob);
  }
  urls.set(id, url);
  for (const [old, oldUrl] of urls) {
    if (urls.size <= MOST_URLS) break;
    urls.delete(old);
    URL.revokeObjectURL(oldUrl);
  }
  return url;
}

/** Return the columns and sizes of a wall of a width. */
export function layoutOf(width) {
  const least = width < 420 ? 100 : width < 800 ? LEAST : WIDEST - 40;
  const columns = Math.max(2, Math.floor((width + GAP) / (least + GAP)));
  const side = Math.floor((width - GAP * (columns - 1)) / columns);
  return { columns, side, row: rowOf(side) };
}

const rowOf = (side) => side + CAPTION + GAP;

/** Return the first row and the row after the last that are seen, with spare ones. */
export function seenRows(top, height, row, count) {
  const first = Math.max(0, Math.floor(-top / row) - SPARE);
  const last = Math.min(count, Math.ceil((height - top) / row) + SPARE);
  return [Math.min(first, count), Math.max(last, 0)];
}

/** Return the rows that are seen now, and the layout, of an element that is scrolled with the window. */
function useSeen(element, count) {
  const [seen, setSeen] = useState({ columns: 4, side: LEAST, row: LEAST + CAPTION + GAP, first: 0, last: 0 });
  useLayoutEffect(() => {
    let frame = 0;
    const look = () => {
      frame = 0;
      const box = element.current.getBoundingClientRect();
      const layout = layoutOf(box.width);
      const [first, last] = seenRows(box.top, innerHeight, layout.row, Math.ceil(count / layout.columns));
      setSeen((old) => (old.first === first && old.last === last && old.side === layout.side && old.columns === layout.columns
        ? old : { ...layout, first, last }));
    };
    const soon = () => (frame ||= requestAnimationFrame(look));
    const observer = new ResizeObserver(soon);
    observer.observe(element.current);
    addEventListener('scroll', soon, { passive: true });
    addEventListener('resize', soon);
    look();
    return () => {
      cancelAnimationFrame(frame);
      observer.disconnect();
      removeEventListener('scroll', soon);
      removeEventListener('resize', soon);
    };
  }, [count]);
  return seen;
}

/**
 * A wall of entries. Props: `entries`; `chosen`, a Set of ids; `onOpen(id)`, `onChoose(id)`,
 * `onRemove(id)`. Arrow keys move, Enter opens, Space chooses, Delete removes.
 */
export function PictureWall({ entries, chosen, onOpen, onChoose, onRemove }) {
  const element = useRef(null);
  const seen = useSeen(element, entries.length);
  const [current, setCurrent] = useState(0);
  const acts = useRef({});
  const tiles = useRef(new Map());
  const wanted = useRef(null); // the number of entries at which a picture gets the focus, at most
  const at = Math.min(current, Math.max(0, entries.length - 1));
  const focus = (index) => element.current.querySelector(`[data-index="${index}"] .wall-open`)?.focus({ preventScroll: true });
  useLayoutEffect(() => {
    if (wanted.current === null || entries.length > wanted.current) return;
    focus(at);
    if (document.activeElement?.closest('.wall')) wanted.current = null;
  });
  const go = (index) => {
    wanted.current = entries.length;
    setCurrent(index);
    reveal(element.current, Math.floor(index / seen.columns) * seen.row, seen.row);
    focus(index);
  };
  const discard = (id) => {
    wanted.current = entries.length - 1; // the next one gets the focus when it is gone
    onRemove(id);
  };
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.closest('.wall-tile')) return;
    const target = targetOf(event.key, at, seen.columns, entries.length);
    const act = { Delete: discard, ' ': onChoose }[event.key];
    const isBox = event.target.matches('input');
    if (target === null && (!act || (isBox && event.key === ' '))) return;
    event.preventDefault();
    if (target === null) act(entries[at].id);
    else go(target);
  };
  const first = seen.first * seen.columns;
  acts.current = { onOpen, onChoose, onFocus: setCurrent };
  const tile = (entry, index) => {
    const facts = { index, count: entries.length, columns: seen.columns, side: seen.side, isCurrent: index === at, isChosen: chosen.has(entry.id) };
    const mark = Object.values(facts).join();
    const old = tiles.current.get(entry.id);
    return old?.mark === mark ? old : { mark, drawn: html`<${Tile} key=${entry.id} entry=${entry} acts=${acts} ...${facts} />` };
  };
  const shown = new Map(entries.slice(first, seen.last * seen.columns).map((entry, offset) => [entry.id, tile(entry, first + offset)]));
  tiles.current = shown; // a tile that stays as it is is not drawn again
  const height = Math.ceil(entries.length / seen.columns) * seen.row;
  return html`<ul class=${`wall ${chosen.size ? 'wall-choosing' : ''}`} ref=${element} style=${{ height: `${height}px` }}
    aria-label=${t('gallery.pictures')} onKeyDown=${pressed}>
    ${[...shown.values()].map(({ drawn }) => drawn)}
  </ul>`;
}

/** Return the index that a key leads to, or null. */
export function targetOf(key, at, columns, count) {
  const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns, Home: 0, End: count - 1 };
  moves.PageUp = Math.max(at % columns, at - 4 * columns);
  moves.PageDown = Math.min(count - 1, at + 4 * columns);
  const target = moves[key];
  return target === undefined || target < 0 || target >= count ? null : target;
}

/** Scroll the window so that a row of an element is seen. */
function reveal(element, top, height) {
  const start = element.getBoundingClientRect().top + top;
  const header = 64;
  if (start < header) scrollBy(0, start - header);
  else if (start + height > innerHeight) scrollBy(0, start + height - innerHeight);
}

function Tile({ entry, index, count, columns, side, isCurrent, isChosen, acts }) {
  const [url, setUrl] = useState(urls.get(entry.id) ?? null);
  useEffect(() => {
    if (url) return undefined;
    let isShown = true;
    const show = () => thumbUrl(entry.id).then((found) => isShown && setUrl(found), () => {});
    const timer = setTimeout(show, PAUSE);
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, [entry.id]);
  const left = (index % columns) * (side + GAP);
  const top = Math.floor(index / columns) * rowOf(side);
  const place = { transform: `translate(${left}px, ${top}px)`, width: `${side}px` };
  const prompt = String(entry.facts?.prompt ?? '');
  const focus = isCurrent ? 0 : -1;
  const focused = () => acts.current.onFocus(index);
  return html`<li class=${`wall-tile ${isChosen ? 'wall-chosen' : ''}`} style=${place} data-index=${index} aria-setsize=${count} aria-posinset=${index + 1}>
    <button type="button" class="wall-open" tabindex=${focus} style=${{ height: `${side}px` }} onFocus=${focused}
      onClick=${() => acts.current.onOpen(entry.id)} aria-label=${t('gallery.open', { prompt: prompt.slice(0, 120) || t('gallery.noPrompt') })}>
      ${url && html`<img src=${url} alt="" decoding="async" draggable=${false} />`}
    </button>
    <label class="wall-check"><input type="checkbox" tabindex=${focus} checked=${isChosen} onFocus=${focused}
      aria-label=${t('gallery.choose', { n: index + 1 })} onChange=${() => acts.current.onChoose(entry.id)} /></label>
    <p class="wall-caption" title=${prompt.slice(0, 500)}>${prompt || t('gallery.noPrompt')}</p>
  </li>`;
}
