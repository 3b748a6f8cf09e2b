// A grid of pictures as one picture, with the labels of its rows and columns.

import { label } from './parameter_control.js';

const LARGEST = 16384; // pixels of a side, which all browsers can draw
const PAD = 12;

/** Return the label of a value of an axis. */
export function axisLabel(axis, value) {
  if (!axis.name) return '';
  return `${label(axis.name)} ${value}`;
}

/** Return a grid as a PNG. `run` is that of grid_run.js; each made cell has its entry. */
export async function gridPicture(run) {
  const pictures = await Promise.all(run.cells.map(({ entry }) => entry && createImageBitmap(entry.blob)));
  const cell = [0, 0];
  for (const picture of pictures) if (picture) [cell[0], cell[1]] = [Math.max(cell[0], picture.width), Math.max(cell[1], picture.height)];
  const columns = run.across.values.length, rows = run.down.values.length;
  const size = Math.max(13, Math.round(Math.max(...cell) / 24));
  const head = run.across.name ? size * 4 : 0, side = run.down.name ? Math.max(size * 9, cell[0] / 3) : 0;
  const whole = [side + columns * (cell[0] + PAD) + PAD, head + rows * (cell[1] + PAD) + PAD];
  const scale = Math.min(1, LARGEST / Math.max(...whole));
  const canvas = new OffscreenCanvas(Math.round(whole[0] * scale), Math.round(whole[1] * scale));
  const context = canvas.getContext('2d');
  context.scale(scale, scale);
  context.fillStyle = '#fff';
  context.fillRect(0, 0, ...whole);
  context.fillStyle = '#1b211f';
  context.font = `${size}px system-ui, sans-serif`;
  context.textBaseline = 'middle';
  run.across.values.forEach((value, column) => write(context, axisLabel(run.across, value), [side + PAD + column * (cell[0] + PAD), 0, cell[0], head], size, 'center'));
  run.down.values.forEach((value, row) => write(context, axisLabel(run.down, value), [PAD, head + PAD + row * (cell[1] + PAD), side - PAD, cell[1]], size, 'left'));
  run.cells.forEach(({ row, column }, index) => {
    const picture = pictures[index];
    if (!picture) return;
    const [left, top] = [side + PAD + column * (cell[0] + PAD), head + PAD + row * (cell[1] + PAD)];
    context.drawImage(picture, left + (cell[0] - picture.width) / 2, top + (cell[1] - picture.height) / 2);
    picture.close();
  });
  const blobs = run.cells.flatMap(({ entry }) => entry?.blob ?? []);
  const { withMarkOf } = await import('./origin.js');
  return withMarkOf(await canvas.convertToBlob({ type: 'image/png' }), blobs);
}

/** Write a text into a box in lines; what has no room ends with three dots. */
function write(context, text, [left, top, width, height], size, align) {
  const lines = wrapped(context, text, width);
  const most = Math.max(1, Math.floor(height / (size * 1.3)));
  const shown = lines.slice(0, most);
  if (lines.length > most) shown[most - 1] = `${shown[most - 1].slice(0, -1)}…`;
  context.textAlign = align;
  const across = align === 'center' ? left + width / 2 : left;
  const first = top + height / 2 - ((shown.length - 1) / 2) * size * 1.3;
  shown.forEach((line, index) => context.fillText(line, across, first + index * size * 1.3, width));
}

function wrapped(context, text, width) {
  const lines = [''];
  for (const word of text.split(/\s+/)) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width <= width || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}
