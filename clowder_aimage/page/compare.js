// Two pictures, compared by a slider over both.

import { html, useEffect, useId, useRef, useState } from './html.js';
import { pictureUrl } from './api.js';
import { IconButton } from './controls.js';
import { factLabel, factTexts } from './facts.js';
import { t } from './lang.js';
import { useEntry } from './viewer.js';

/** The dialog. Props: `ids` of all pictures; `pair`, two of them; `onPair(pair)`, `onClose()`. */
export function Compare({ ids, pair, onPair, onClose }) {
  const element = useRef(null);
  const title = useId();
  const entries = [useEntry(pair[0]), useEntry(pair[1])];
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.isConnected && before.focus?.();
  }, []);
  const turn = (side, id) => onPair(side ? [pair[0], id] : [id, pair[1]]);
  return html`<dialog ref=${element} class="compare" aria-labelledby=${title} onClose=${onClose}>
    <div class="compare-parts">
      <div class="compare-head">
        <h2 id=${title}>${t('compare.title')}</h2>
        <${IconButton} icon="close" label=${t('dialog.close')} onClick=${onClose} />
      </div>
      <${Slide} entries=${entries} />
      <div class="compare-sides">
        ${entries.map((entry, side) => html`<${Side} key=${side} ...${{ entry, side, ids }} id=${pair[side]} other=${entries[1 - side]}
          onTurn=${(id) => turn(side, id)} />`)}
      </div>
    </div>
  </dialog>`;
}

/** Both pictures, the left one up to the slider. The slider is a range: keys and pointers move it. */
function Slide({ entries: [left, right] }) {
  const [at, setAt] = useState(50);
  const place = { '--compare-at': `${at}%` };
  const picture = (entry, name, more) => entry?.blob && html`<img class=${more} src=${pictureUrl(entry.blob)} draggable=${false}
    alt=${t(name, { prompt: String(entry.facts?.prompt ?? '') })} />`;
  const pressed = (event) => {
    const step = { ArrowLeft: -10, ArrowRight: 10 }[event.key];
    if (!step || !event.shiftKey) return;
    event.preventDefault();
    setAt(Math.min(100, Math.max(0, at + step)));
  };
  const pair = left?.blob && right?.blob;
  const shape = pair ? { '--compare-shape': String(Math.max(left.width / left.height, 0.2)) } : {};
  return html`<div class="compare-slide" style=${{ ...place, ...shape }}>
    <div class="compare-box">
      ${picture(right, 'compare.right', 'compare-right')}
      ${picture(left, 'compare.left', 'compare-left')}
      <input class="compare-range" type="range" min="0" max="100" step="any" value=${at} aria-label=${t('compare.slider')}
        aria-valuetext=${t('compare.at', { share: Math.round(at) })} onInput=${(event) => setAt(Number(event.target.value))} onKeyDown=${pressed} />
      <span class="compare-line" aria-hidden="true"></span>
    </div>
  </div>`;
}

/** What a side shows: its place, the one before and after, and the facts in which the two differ. */
function Side({ entry, side, ids, id, other, onTurn }) {
  const at = ids.indexOf(id);
  const next = (step) => {
    const found = ids[at + step];
    return found === undefined ? {} : { onClick: () => onTurn(found) };
  };
  const name = t(side ? 'compare.rightSide' : 'compare.leftSide');
  const button = (icon, label, step) => html`<${IconButton} icon=${icon} label=${t(label, { side: name })} disabled=${!next(step).onClick} ...${next(step)} />`;
  return html`<section class=${`compare-side ${side ? 'compare-second' : ''}`} aria-label=${name}>
    <div class="compare-turn">${button('arrowLeft', 'compare.before', -1)}<strong>${name}</strong>${button('arrowRight', 'compare.after', 1)}</div>
    ${entry && html`<${Differences} entry=${entry} other=${other} />`}
  </section>`;
}

function Differences({ entry, other }) {
  const others = new Map(other ? factTexts(other) : []);
  const found = factTexts(entry).filter(([name, text]) => other && others.get(name) !== text);
  if (!other) return null;
  if (!found.length) return html`<p class="field-hint">${t('compare.same')}</p>`;
  return html`<dl class="facts">${found.map(([name, text]) => html`<div key=${name} class="fact"><dt>${factLabel(name)}</dt><dd>${text}</dd></div>`)}</dl>`;
}
