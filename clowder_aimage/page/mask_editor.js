// Brush a mask on a picture: with a mouse, a finger, a pen, or keys.

import { html, useEffect, useId, useRef, useState } from './html.js';
import { Button, IconButton, Slider } from './controls.js';
import { t } from './lang.js';
import { MaskDrawing } from './mask_drawing.js';
import { hint, label, scaleOf } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';

const STEP = 0.02; // of the longer side, which an arrow key moves the brush; five times with Shift
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SIZES = [1, 60]; // of the brush, in per cent of the longer side
const VEIL = 0.6; // how opaque the mask is shown
const LEAST = 512; // pixels of the longer side of what is shown, so that the brush is round

/**
 * The editor. Props: `image` and `mask`, Blobs, of which the mask may be null; `feather`, the pixels
 * over which the worker mixes the edge; `onChange(mask)`, `onFeather(pixels)`.
 */
export function MaskEditor({ image, mask, feather, onChange, onFeather }) {
  const own = useRef({}); // the picture, and the mask that was loaded or made last
  const [opened, setOpened] = useState(null); // {drawing, picture}
  const [brush, setBrush] = useState({ size: 12, erase: false });
  const [said, setSaid] = useState('');
  const [isBusy, setBusy] = useState(false);
  const turn = useRef(0);
  useOpened(image, mask, own, setOpened);
  if (!opened) return html`<div class="mask-editor mask-waiting" aria-busy="true"></div>`;
  const { drawing, picture } = opened;
  const keep = async () => {
    const now = ++turn.current;
    setBusy(true);
    setSaid(t('mask.share', { share: Math.round(drawing.share() * 100) }));
    const made = await drawing.blob();
    if (now !== turn.current) return; // another stroke was drawn meanwhile
    own.current = { image, mask: made };
    setBusy(false);
    onChange(made);
  };
  const acts = {
    undo: () => drawing.undo(), redo: () => drawing.redo(), invert: () => drawing.add('invert'), clear: () => drawing.add('clear'),
  };
  const act = (name) => {
    acts[name]();
    keep();
  };
  return html`<div class="mask-editor" aria-busy=${isBusy} onKeyDown=${(event) => command(event, act, setBrush)}>
    <${MaskCanvas} ...${{ drawing, picture, brush, feather, keep }} />
    <${MaskTools} ...${{ drawing, brush, setBrush, feather, onFeather, act }} />
    <p class="hidden-text" role="status">${said}</p>
  </div>`;
}

/** Open the picture, and the mask that it has already unless it was drawn here. */
function useOpened(image, mask, own, setOpened) {
  useEffect(() => {
    if (own.current.image === image && own.current.mask === mask) return undefined;
    let isCurrent = true;
    open(image, mask).then((opened) => {
      if (!isCurrent) return;
      own.current = { image, mask };
      setOpened(opened);
    }, () => {});
    return () => (isCurrent = false);
  }, [image, mask]);
}

async function open(image, mask) {
  const picture = await createImageBitmap(image);
  const drawing = new MaskDrawing(picture.width, picture.height);
  if (mask) drawing.load(await createImageBitmap(mask));
  return { picture, drawing };
}

/** Do what a key says: undo and redo, invert, erase, and the size of the brush. */
function command(event, act, setBrush) {
  if (event.target.matches('input:not([type="range"])')) return;
  const isCommand = event.ctrlKey || event.metaKey;
  const resize = (step) => () => setBrush((brush) => ({ ...brush, size: Math.min(SIZES[1], Math.max(SIZES[0], brush.size + step)) }));
  const plain = { i: () => act('invert'), e: () => setBrush((brush) => ({ ...brush, erase: !brush.erase })), '[': resize(-2), ']': resize(2) };
  const commands = { z: () => act(event.shiftKey ? 'redo' : 'undo'), y: () => act('redo') };
  const found = (isCommand ? commands : event.altKey ? {} : plain)[event.key.toLowerCase()];
  if (!found) return;
  event.preventDefault();
  event.stopPropagation();
  found();
}

/** The picture with its mask, on which strokes are drawn. */
function MaskCanvas({ drawing, picture, brush, feather, keep }) {
  const canvas = useRef(null);
  const stroke = useRef(null); // the pointer that draws
  const [cursor, setCursor] = useState(null); // [left, top], in pixels of the drawing
  const { width, height } = drawing.canvas;
  const zoom = Math.ceil(LEAST / Math.max(width, height));
  const diameter = Math.max(1, (brush.size / 100) * Math.max(width, height));
  const id = useId();
  useEffect(() => draw(canvas.current, picture, drawing, feather, cursor && [...cursor, diameter].map((one) => one * zoom)));
  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const factor = width / box.width;
    return [(event.clientX - box.left) * factor, (event.clientY - box.top) * factor, pressed(event, diameter)];
  };
  const down = (event) => {
    if (stroke.current !== null || (event.button !== 0 && event.button !== 5)) return; // 5: the other end of a pen
    event.preventDefault();
    canvas.current.focus({ preventScroll: true });
    canvas.current.setPointerCapture(event.pointerId);
    stroke.current = event.pointerId;
    drawing.begin(at(event), brush.erase || event.button === 5);
    setCursor(at(event).slice(0, 2));
  };
  const move = (event) => {
    if (stroke.current === event.pointerId) {
      const parts = event.getCoalescedEvents?.() ?? [];
      for (const part of parts.length ? parts : [event]) drawing.extend(at(part));
    } else if (stroke.current !== null || event.pointerType === 'touch') return;
    setCursor(at(event).slice(0, 2));
  };
  const up = (event) => {
    if (stroke.current !== event.pointerId) return;
    stroke.current = null;
    if (event.pointerType === 'touch') setCursor(null);
    keep();
  };
  const key = (event) => {
    const isDab = event.key === ' ' || event.key === 'Enter';
    const way = KEYS[event.key];
    if ((!way && !isDab) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const from = cursor ?? [width / 2, height / 2];
    setCursor(way ? moved(from, way, event.shiftKey, drawing.canvas) : from);
    if (!isDab) return;
    drawing.begin([...from, diameter], brush.erase);
    keep();
  };
  return html`<canvas ref=${canvas} class="mask-canvas" width=${width * zoom} height=${height * zoom} tabindex="0" role="application"
      aria-roledescription=${t('mask.role')} aria-label=${t('mask.canvas')} aria-describedby=${id} onPointerDown=${down} onPointerMove=${move} onPointerUp=${up}
      onPointerCancel=${up} onPointerLeave=${() => stroke.current === null && setCursor(null)} onKeyDown=${key}></canvas>
    <p class="field-hint mask-keys" id=${id}>${t('mask.keys')}</p>`;
}

/** Return the diameter of the brush: of a pen, by its pressure. */
function pressed({ pointerType, pressure }, diameter) {
  return pointerType === 'pen' && pressure > 0 ? diameter * (0.25 + 0.75 * pressure) : diameter;
}

function moved([left, top], [across, down], isFar, { width, height }) {
  const length = STEP * Math.max(width, height) * (isFar ? 5 : 1);
  const within = (value, most) => Math.min(most, Math.max(0, value));
  return [within(left + across * length, width), within(top + down * length, height)];
}

/** Draw the picture, the mask as the worker mixes it (blurred by half of the feather), and the brush. */
function draw(canvas, picture, drawing, feather, brush) {
  const { width, height } = canvas;
  const context = canvas.getContext('2d');
  context.drawImage(picture, 0, 0, width, height);
  const pixel = width / (canvas.clientWidth || width); // of the screen
  const veil = new OffscreenCanvas(width, height).getContext('2d');
  veil.filter = feather > 0 ? `blur(${(feather / 2) * (width / drawing.width)}px)` : 'none';
  veil.drawImage(drawing.canvas, 0, 0, width, height);
  veil.filter = 'none';
  veil.globalCompositeOperation = 'source-in';
  veil.fillStyle = stripes(veil, getComputedStyle(canvas).getPropertyValue('--mask-veil').trim(), pixel);
  veil.fillRect(0, 0, width, height);
  context.globalAlpha = VEIL;
  context.drawImage(veil.canvas, 0, 0);
  context.globalAlpha = 1;
  if (brush) drawBrush(context, brush, pixel);
}

/** Return a pattern that is seen on pictures of any colour. */
function stripes(context, colour, pixel) {
  const tile = new OffscreenCanvas(10, 10);
  const drawn = tile.getContext('2d');
  drawn.fillStyle = colour;
  drawn.fillRect(0, 0, 10, 10);
  drawn.strokeStyle = '#fff';
  drawn.lineWidth = 2;
  for (const left of [-10, 0, 10]) {
    drawn.moveTo(left - 1, 11);
    drawn.lineTo(left + 11, -1);
  }
  drawn.stroke();
  const pattern = context.createPattern(tile, 'repeat');
  pattern.setTransform(new DOMMatrix().scale(pixel));
  return pattern;
}

function drawBrush(context, [left, top, diameter], pixel) {
  for (const [colour, wide] of [['#000', 3], ['#fff', 1.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = wide * pixel;
    context.beginPath();
    context.arc(left, top, diameter / 2, 0, 2 * Math.PI);
    context.stroke();
  }
}

function MaskTools({ drawing, brush, setBrush, feather, onFeather, act }) {
  const tool = (icon, name, erase) => html`<${Button} icon=${icon} aria-pressed=${brush.erase === erase} class="mask-tool"
    onClick=${() => setBrush({ ...brush, erase })}>${t(`mask.${name}`)}<//>`;
  const button = (icon, name, isOff = false) => html`<${IconButton} icon=${icon} label=${t(`mask.${name}`)} disabled=${isOff} onClick=${() => act(name)} />`;
  return html`<div class="mask-buttons" role="group" aria-label=${t('mask.tools')}>
      ${tool('brush', 'brush', false)} ${tool('eraser', 'eraser', true)}
      <span class="mask-acts">
        ${button('undo', 'undo', !drawing.done.length)} ${button('redo', 'redo', !drawing.undone.length)}
        ${button('invert', 'invert')} ${button('trash', 'clear')}
      </span>
    </div>
    <${Slider} label=${t('mask.size')} min=${SIZES[0]} max=${SIZES[1]} step=${1} value=${brush.size} format=${(value) => t('mask.percent', { value })}
      onChange=${(size) => setBrush({ ...brush, size })} />
    <${Slider} label=${label('feather')} hint=${hint('feather')} ...${scaleOf(PARAMETERS.feather, 1)} value=${feather}
      format=${(value) => t('mask.pixels', { value })} onChange=${onFeather} />`;
}
