// The memory and the disk of the worker, as bars of parts.

import { html } from './html.js';
import { bytes, t } from './lang.js';
import { loaded } from './state.js';
import { stock } from './stock.js';

/** The bars; nothing until the worker has answered. */
export function Meters() {
  if (stock.value === null) return null;
  const { disk, memory } = stock.value;
  return html`<section class="panel models-meters" aria-labelledby="models-meters">
    <h2 id="models-meters">${t('meter.title')}</h2>
    <${Memory} ...${memory} />
    <${Disk} ...${disk} />
  </section>`;
}

function Memory({ budget, used, planned, available, models }) {
  const room = budget ?? used + planned + (available ?? 0);
  const parts = [
    { kind: 'used', size: used, label: t('meter.used') },
    { kind: 'planned', size: planned, label: t('meter.planned') },
  ];
  const rest = Math.max(0, room - used - planned);
  const sizes = { n: loaded.value.length, size: bytes(used), budget: bytes(room) };
  const notes = [models === null ? t('meter.models', sizes) : t('meter.models.most', { ...sizes, most: models })];
  if (available !== null) notes.push(t('meter.available', { size: bytes(available) }));
  return html`<${Meter} title=${t('meter.memory')} parts=${parts} rest=${rest} total=${room} notes=${notes}
    text=${t('meter.budget', { size: bytes(room) })} />`;
}

function Disk({ store, unneeded, unfinished, free, total }) {
  // The file system may not report its space.
  const others = total === null ? 0 : Math.max(0, total - free - store - unfinished);
  const parts = [
    { kind: 'used', size: store - unneeded, label: t('meter.store') },
    { kind: 'planned', size: unneeded + unfinished, label: t('meter.unneeded') },
    { kind: 'others', size: others, label: t('meter.others') },
  ];
  return html`<${Meter} title=${t('meter.disk')} parts=${parts} rest=${free} total=${total ?? store + unfinished}
    text=${total === null ? '' : t('meter.total', { size: bytes(total) })} />`;
}

/** A bar of parts, and a list of them with their sizes. */
function Meter({ title, parts, rest, total, text, notes = [] }) {
  const shown = parts.filter((one) => one.size > 0);
  const legend = [...shown];
  if (rest !== null) legend.push({ kind: 'free', size: rest, label: t('meter.free') });
  const name = `${title}: ${legend.map((one) => `${one.label} ${bytes(one.size)}`).join(', ')}`;
  const width = (size) => ({ width: `${total ? (100 * size) / total : 0}%` });
  return html`<div class="models-meter">
    <p class="models-line"><span class="field-label">${title}</span><span class="dim">${text}</span></p>
    <div class="models-meter-bar" role="img" aria-label=${name}>
      ${shown.map((one) => html`<div key=${one.kind} class=${`models-part models-part-${one.kind}`} style=${width(one.size)}></div>`)}
    </div>
    <ul class="models-legend" aria-hidden="true">
      ${legend.map((one) => html`<li key=${one.kind}><span class=${`models-key models-part-${one.kind}`}></span>
        ${one.label} <span class="models-size">${bytes(one.size)}</span></li>`)}
    </ul>
    ${notes.map((note) => html`<p key=${note} class="dim models-meter-note">${note}</p>`)}
  </div>`;
}
