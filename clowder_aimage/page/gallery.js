// The gallery: what this browser has made.

import { html, useEffect, useMemo, useRef, useState } from './html.js';
import { Button, Empty, IconButton } from './controls.js';
import { Compare } from './compare.js';
import { saveAll } from './picture_file.js';
import { changed, list, MOST, room } from './gallery_store.js';
import { Grid } from './grid.js';
import { gridBase } from './grid_run.js';
import { bytes, t } from './lang.js';
import { PictureWall } from './picture_wall.js';
import { Removed, removePictures } from './removal.js';
import { chosen, draft, show } from './state.js';
import { Viewer } from './viewer.js';

export function Gallery() {
  const entries = useEntries();
  const [sought, setSought] = useState('');
  const [chosen, setChosen] = useState(new Set());
  const [opened, setOpened] = useState(null); // an id
  const [pair, setPair] = useState(null); // two ids
  const found = useMemo(() => matching(entries ?? [], sought), [entries, sought]);
  const ids = useMemo(() => found.map((entry) => entry.id), [found]);
  if (gridBase.value) return html`<${Grid} key=${gridBase.value.name} />`;
  const choose = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  const removeIds = (gone) => {
    setChosen(new Set([...chosen].filter((id) => !gone.includes(id))));
    removePictures(gone);
  };
  if (!entries) return html`<div class="gallery" aria-busy="true"></div>`;
  return html`<div class="gallery">
    <${Top} ...${{ entries, found, sought, setSought }} />
    ${chosen.size > 0 && html`<${Chosen} ...${{ chosen, setChosen, setPair, removeIds }} />`}
    ${entries.length === 0
      ? html`<${Nothing} />`
      : html`<${PictureWall} entries=${found} chosen=${chosen} onOpen=${setOpened} onChoose=${choose} onRemove=${(id) => removeIds([id])} />`}
    ${entries.length > 0 && found.length === 0 && html`<${Empty} icon="gallery" title=${t('gallery.noneFound')} />`}
    <${Removed} />
    ${opened !== null && html`<${Viewer} ids=${ids} id=${opened} onShow=${setOpened} onClose=${() => setOpened(null)}
      onCompare=${(one, other) => setPair([one, other])} />`}
    ${pair && html`<${Compare} ids=${ids} pair=${pair} onPair=${setPair} onClose=${() => setPair(null)} />`}
  </div>`;
}

/** Return the entries, the newest first; null until they are read. */
function useEntries() {
  const [entries, setEntries] = useState(null);
  const reading = useRef(null); // the change up to which they are being read
  const read = async () => {
    const now = (reading.current = changed.peek());
    const found = await list().catch(() => []);
    if (reading.current === null) return; // the gallery is closed
    setEntries(found);
    if (now !== changed.peek()) read();
    else reading.current = false;
  };
  useEffect(() => {
    if (reading.current === null || reading.current === false) read();
  }, [changed.value]);
  useEffect(() => () => (reading.current = null), []);
  return entries;
}

/** Return the draft of the form Make, with the steps of its model. */
function formDraft() {
  const { steps, model, ...rest } = draft.value;
  return { ...rest, model: model || (chosen.value?.id ?? ''), steps: steps ?? chosen.value?.defaults?.steps ?? null };
}

function matching(entries, sought) {
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return entries;
  return entries.filter(({ facts, model }) => {
    const text = `${facts?.prompt ?? ''} ${facts?.negative ?? ''} ${model} ${facts?.seed ?? ''}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function Top({ entries, found, sought, setSought }) {
  return html`<div class="gallery-top">
    <div>
      <h1>${t('gallery.title')}</h1>
      <${Limits} entries=${entries} found=${found} />
    </div>
    <div class="gallery-acts">
      ${entries.length > 0 && html`<input class="input gallery-search" type="search" value=${sought} placeholder=${t('gallery.search')}
        aria-label=${t('gallery.search')} onInput=${(event) => setSought(event.target.value)} />`}
      <${Button} icon="grid" onClick=${() => (gridBase.value = { draft: formDraft(), name: '' })}>${t('grid.title')}<//>
    </div>
  </div>`;
}

/** How much is kept, how much may be, and whether the browser promises to keep it. */
function Limits({ entries, found }) {
  const [space, setSpace] = useState(null);
  const [isKept, setKept] = useState(true);
  useEffect(() => {
    room().then(setSpace, () => {});
    navigator.storage?.persisted?.().then(setKept, () => {});
  }, [entries.length]);
  const size = entries.reduce((sum, entry) => sum + entry.size + (entry.inputSize ?? 0), 0);
  const ask = async () => setKept((await navigator.storage.persist()) || isKept);
  const isFull = entries.length >= MOST || (space && space.usage > 0.9 * space.quota);
  return html`<p class=${`gallery-limits ${isFull ? 'gallery-full' : ''}`}>
    ${found.length !== entries.length && `${t('gallery.found', { n: found.length })} `}
    ${t('gallery.limits', { n: entries.length, size: bytes(size), most: MOST })}
    ${space && ` ${t('gallery.room', { size: bytes(Math.max(0, space.quota - space.usage)) })}`}
    ${!isKept && entries.length > 0 && html` ${t('gallery.mayGo')} <button type="button" class="gallery-ask" onClick=${ask}>${t('gallery.keep')}</button>`}
  </p>`;
}

function Chosen({ chosen, setChosen, setPair, removeIds }) {
  const ids = [...chosen];
  return html`<div class="gallery-chosen" role="group" aria-label=${t('gallery.chosen', { n: ids.length })}>
    <${IconButton} icon="close" label=${t('gallery.chooseNone')} onClick=${() => setChosen(new Set())} />
    <span>${t('gallery.chosen', { n: ids.length })}</span>
    <${Button} icon="compare" disabled=${ids.length !== 2} onClick=${() => setPair(ids)}>${t('compare.title')}<//>
    <${Button} icon="download" onClick=${() => saveAll(ids)}>${t('gallery.download')}<//>
    <${Button} kind="danger" icon="trash" onClick=${() => removeIds(ids)}>${t('gallery.remove')}<//>
  </div>`;
}

function Nothing() {
  return html`<${Empty} icon="gallery" title=${t('gallery.empty')}>
    <p>${t('gallery.emptyText')}</p>
    <${Button} kind="primary" icon="make" onClick=${() => show('make')}>${t('gallery.emptyMake')}<//>
  <//>`;
}
