// The drawing of a mask: strokes that are painted and undone, at the size of the picture.
//
// A canvas is opaque where the picture is painted. The worker takes a mask as a picture that is
// white there; from half of white on a pixel is painted.

const SNAPSHOT = 24; // operations between copies of the canvas, so that undo repeats few
const COPIES = 4;
const MOST_AREA = 1 << 22; // pixels of the canvas; the mask of a larger picture is drawn smaller

/** Return a canvas of a size. */
export function canvasOf(width, height) {
  const canvas = document.createElement('canvas');
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

/** The operations on a mask: strokes, "invert" and "clear", with undo and redo. */
export class MaskDrawing {
  constructor(width, height) {
    [this.width, this.height] = [width, height]; // of the picture
    this.scale = Math.min(1, Math.sqrt(MOST_AREA / (width * height)));
    this.canvas = canvasOf(Math.max(1, width * this.scale), Math.max(1, height * this.scale));
    this.context = this.canvas.getContext('2d', { willReadFrequently: true });
    this.done = [];
    this.undone = [];
    this.copies = []; // [number of operations, canvas]
    this.base = null;
  }

  /** Begin with a mask that was made before: white, or opaque in one with transparency. */
  load(picture) {
    const { width, height } = this.canvas;
    this.context.clearRect(0, 0, width, height);
    this.context.drawImage(picture, 0, 0, width, height);
    const pixels = this.context.getImageData(0, 0, width, height);
    for (let at = 0; at < pixels.data.length; at += 4) {
      pixels.data[at + 3] = pixels.data[at] >= 128 ? 255 : 0;
      pixels.data[at] = pixels.data[at + 1] = pixels.data[at + 2] = 255;
    }
    this.context.putImageData(pixels, 0, 0);
    this.base = this.copy();
    [this.done, this.undone, this.copies] = [[], [], []];
  }

  /** Do an operation: `{points: [[x, y, diameter]], erase}`, `"invert"` or `"clear"`. */
  add(operation) {
    const count = this.done.length;
    if (count && count % SNAPSHOT === 0) this.copies = [...this.copies, [count, this.copy()]].slice(-COPIES);
    this.done.push(operation);
    this.undone = [];
    this.apply(operation);
  }

  /** Begin a stroke, which `extend` continues. */
  begin(point, erase) {
    this.add({ points: [point], erase });
  }

  extend(point) {
    const stroke = this.done.at(-1);
    stroke.points.push(point);
    this.line(stroke.points.at(-2), point, stroke.erase);
  }

  undo() {
    if (!this.done.length) return;
    this.undone.push(this.done.pop());
    while (this.copies.length && this.copies.at(-1)[0] > this.done.length) this.copies.pop();
    const [count, copy] = this.copies.at(-1) ?? [0, this.base];
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (copy) this.context.drawImage(copy, 0, 0);
    for (const operation of this.done.slice(count)) this.apply(operation);
  }

  redo() {
    const operation = this.undone.pop();
    if (operation === undefined) return;
    const rest = this.undone;
    this.add(operation);
    this.undone = rest;
  }

  /** Return the part of the picture that is painted, from 0 to 1, on a grid of at most 256 x 256. */
  share() {
    const across = Math.min(256, this.canvas.width);
    const down = Math.min(256, this.canvas.height);
    const small = canvasOf(across, down).getContext('2d', { willReadFrequently: true });
    small.drawImage(this.canvas, 0, 0, across, down);
    const { data } = small.getImageData(0, 0, across, down);
    let painted = 0;
    for (let at = 3; at < data.length; at += 4) painted += data[at];
    return painted / (255 * across * down);
  }

  /** Return the mask as the worker takes it: a PNG, white on black; null if nothing is painted. */
  async blob() {
    const { data } = this.context.getImageData(0, 0, this.canvas.width, this.canvas.height);
    let isEmpty = true;
    for (let at = 3; isEmpty && at < data.length; at += 4) isEmpty = data[at] < 128;
    if (isEmpty) return null;
    const whole = canvasOf(this.width, this.height);
    const context = whole.getContext('2d');
    context.fillRect(0, 0, this.width, this.height);
    context.drawImage(this.canvas, 0, 0, this.width, this.height);
    return new Promise((resolve) => whole.toBlob(resolve, 'image/png'));
  }

  copy() {
    const copy = canvasOf(this.canvas.width, this.canvas.height);
    copy.getContext('2d').drawImage(this.canvas, 0, 0);
    return copy;
  }

  apply(operation) {
    const { width, height } = this.canvas;
    if (operation === 'clear') {
      this.context.clearRect(0, 0, width, height);
    } else if (operation === 'invert') {
      this.context.globalCompositeOperation = 'source-out'; // paint what is not opaque
      this.context.fillStyle = '#fff';
      this.context.fillRect(0, 0, width, height);
      this.context.globalCompositeOperation = 'source-over';
    } else {
      const [first, ...others] = operation.points;
      this.line(first, first, operation.erase);
      others.reduce((from, to) => (this.line(from, to, operation.erase), to), first);
    }
  }

  line([left, top], [right, bottom, diameter], erase) {
    const { context } = this;
    context.globalCompositeOperation = erase ? 'destination-out' : 'source-over';
    context.strokeStyle = context.fillStyle = '#fff';
    context.lineWidth = diameter;
    context.beginPath();
    context.moveTo(left, top);
    context.lineTo(right, bottom);
    context.stroke();
    context.beginPath();
    context.arc(right, bottom, diameter / 2, 0, 2 * Math.PI);
    context.fill();
    context.globalCompositeOperation = 'source-over';
  }
}
