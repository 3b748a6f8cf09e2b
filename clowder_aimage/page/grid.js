// A grid of pictures in which two settings vary.

import { html, useState } from './html.js';
import { Value } from './again.js';
import { pictureUrl } from './api.js';
import { Compare } from './compare.js';
import { Bar, Button, Empty, Field, sendKey, useEscape } from './controls.js';
import { axisLabel, gridPicture } from './grid_picture.js';
import { gridBase, gridRun, MOST_CELLS, readAxis, runGrid, secondsLeft, stopGrid } from './grid_run.js';
import { duration, t } from './lang.js';
import { label } from './parameter_control.js';
import { save } from './picture_file.js';
import { CHANGEABLE, changeable, settingText } from './setting.js';
import { notice } from './state.js';
import { objectOf, TEXT } from './shape.js';
import { readTab, writeTab } from './storage.js';
import { Viewer } from './viewer.js';

const AXIS = objectOf({ name: TEXT, text: TEXT });
const WRITTEN = objectOf({ name: TEXT, across: AXIS, down: AXIS });
const FIRST = { across: 'steps', down: 'seed' };

/** The grid of `gridBase`: its settings, its progress and its pictures. */
export function Grid() {
  const { draft, name } = gridBase.value;
  const [written, setWritten] = useState(() => firstWritten(draft, name));
  const write = (next) => {
    setWritten(next);
    writeTab('grid', { name, ...next });
  };
  const across = readAxis(written.across.name, written.across.text);
  const down = readAxis(written.down.name, written.down.text);
  const count = across.values.length * down.values.length;
  const run = gridRun.value;
  useEscape(stopGrid);
  const problem = problemOf(draft, across, down, count);
  const begin = (event) => {
    event.preventDefault();
    if (!problem) runGrid(draft, across, down);
  };
  return html`<div class="grid">
    <div class="gallery-top">
      <div><h1>${t('grid.title')}</h1><p class="gallery-limits">${name ? t('grid.ofPicture', { name }) : t('grid.ofForm')}</p></div>
      <${Button} icon="arrowLeft" onClick=${() => (gridBase.value = null)}>${t('grid.back')}<//>
    </div>
    <form class="grid-form panel" onSubmit=${begin}>
      ${['across', 'down'].map((axis) => html`<${Axis} key=${axis} ...${{ axis, draft }} value=${written[axis]} other=${written[axis === 'across' ? 'down' : 'across'].name}
        read=${axis === 'across' ? across : down} onChange=${(next) => write({ ...written, [axis]: next })} />`)}
      <div class="grid-go">
        ${run?.isRunning
          ? html`<${Button} key="stop" icon="stop" onClick=${stopGrid}>${t('grid.cancel')}<//>`
          : html`<${Button} key="make" type="submit" kind="primary" icon="grid" disabled=${Boolean(problem)}>${t('grid.make', { n: count })}<//>`}
        <p class="field-hint" role="status">${problem}</p>
      </div>
    </form>
    ${run ? html`<${Run} run=${run} />` : html`<${Empty} icon="grid" title=${t('grid.empty')}>${t('grid.emptyText')}<//>`}
  </div>`;
}

/** Return what the form of a grid begins with: what was written for these settings, also before a reload. */
function firstWritten(draft, name) {
  const { name: of, ...kept } = readTab('grid', WRITTEN, {});
  const names = ['', ...changeable(draft)];
  if (of === name && [kept.across, kept.down].every((axis) => names.includes(axis.name))) return kept;
  return {
    across: { name: FIRST.across, text: settingText(draft, FIRST.across) },
    down: { name: FIRST.down, text: settingText(draft, FIRST.down) || '1..2' },
  };
}

function problemOf(draft, across, down, count) {
  if (!draft.prompt.trim() && ![across.name, down.name].includes('prompt')) return t('grid.noPrompt');
  if (!across.name && !down.name) return t('grid.noAxis');
  if (across.wrong.length || down.wrong.length) return t('grid.wrong', { values: [...across.wrong, ...down.wrong].join(', ') });
  if (!count) return t('grid.noValues');
  return count > MOST_CELLS ? t('grid.tooMany', { n: count, most: MOST_CELLS }) : '';
}

function Axis({ axis, draft, value, other, read, onChange }) {
  const kind = value.name && CHANGEABLE[value.name].kind;
  const isLines = kind === 'text' || kind === 'model';
  const hint = isLines ? t('grid.lines') : t('grid.list');
  const names = changeable(draft).filter((name) => name !== other);
  const choose = (event) => onChange({ name: event.target.value, text: event.target.value ? settingText(draft, event.target.value) : '' });
  return html`<fieldset class="grid-axis">
    <legend>${t(`grid.${axis}`)}</legend>
    <${Field} label=${t('grid.setting')}>
      ${(link) => html`<select ...${link} class="input" value=${value.name} onChange=${choose}>
        <option value="">${t('grid.none')}</option>
        ${names.map((name) => html`<option key=${name} value=${name}>${label(name)}</option>`)}
      </select>`}
    <//>
    ${value.name && html`<${Field} label=${t('grid.values')} hint=${`${hint} ${t('grid.count', { n: read.values.length })}`}>
      ${(link) => isLines
        ? html`<textarea ...${link} class="input" rows="3" value=${value.text} spellcheck=${false} onInput=${(event) => onChange({ ...value, text: event.target.value })} onKeyDown=${sendKey}></textarea>`
        : html`<${Value} link=${link} name=${value.name} text=${value.text} onText=${(text) => onChange({ ...value, text })} />`}
    <//>`}
  </fieldset>`;
}

function Run({ run }) {
  const [opened, setOpened] = useState(null);
  const [pair, setPair] = useState(null);
  const made = run.cells.filter((cell) => cell.entry);
  const ids = made.map((cell) => cell.entry.id).filter((id) => id !== null);
  const left = run.isRunning ? secondsLeft(run) : null;
  const share = run.cells.reduce((sum, { state, share: part }) => sum + (state === 'running' ? part ?? 0 : 0), run.done) / run.cells.length;
  const text = t('grid.progress', { done: run.done, of: run.cells.length });
  const saveWhole = async () => {
    try {
      save(await gridPicture(run), 'grid.png');
    } catch (error) {
      notice(t('gallery.failed', { reason: error.message }), { kind: 'bad' });
    }
  };
  return html`<div class="grid-run">
    <div class="grid-state">
      <p role="status">${text}${left !== null && run.isRunning ? ` · ${t('grid.left', { time: duration(left) })}` : ''}</p>
      <${Button} icon="download" disabled=${!made.length} onClick=${saveWhole}>${t('grid.save')}<//>
    </div>
    ${run.isRunning && html`<${Bar} label=${t('grid.bar')} value=${share} text=${text} />`}
    <${Table} run=${run} onOpen=${setOpened} />
    ${opened !== null && html`<${Viewer} ids=${ids} id=${opened} onShow=${setOpened} onClose=${() => setOpened(null)}
      onCompare=${(one, other) => setPair([one, other])} />`}
    ${pair && html`<${Compare} ids=${ids} pair=${pair} onPair=${setPair} onClose=${() => setPair(null)} />`}
  </div>`;
}

function Table({ run: { across, down, cells }, onOpen }) {
  const columns = across.values.length;
  return html`<div class="grid-scroll" tabindex="0" role="region" aria-label=${t('grid.result')}>
    <table class="grid-table">
      <thead><tr>
        <td></td>
        ${across.values.map((value, column) => html`<th key=${column} scope="col">${axisLabel(across, value)}</th>`)}
      </tr></thead>
      <tbody>
        ${down.values.map((value, row) => html`<tr key=${row}>
          <th scope="row">${axisLabel(down, value)}</th>
          ${cells.slice(row * columns, (row + 1) * columns).map((cell) => html`<td key=${cell.column}><${Cell} cell=${cell} onOpen=${onOpen} /></td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

function Cell({ cell: { state, share, entry, error }, onOpen }) {
  if (state === 'failed') return html`<p class="grid-cell field-error">${error}</p>`;
  if (state === 'running') return html`<div class="grid-cell"><${Bar} label=${t('grid.cell')} value=${share || null} /></div>`;
  if (!entry) return html`<div class="grid-cell grid-waiting"></div>`;
  return html`<button type="button" class="grid-cell grid-open" disabled=${entry.id === null} onClick=${() => onOpen(entry.id)}
    aria-label=${t('gallery.open', { prompt: entry.facts?.prompt ?? '' })}><img src=${pictureUrl(entry.blob)} alt="" /></button>`;
}
