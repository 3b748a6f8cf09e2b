// Icons as inline SVG, drawn on a grid of 20 with strokes of the text's colour.

import { html } from './html.js';

const PATHS = {
  again: 'M15.5 6.5A6.5 6.5 0 1 0 16.4 11M15.8 3v3.8H12',
  arrowDown: 'M10 4v12M5 11l5 5 5-5',
  arrowLeft: 'M16 10H4M9 5l-5 5 5 5',
  arrowRight: 'M4 10h12M11 5l5 5-5 5',
  brush: 'M16.5 3.5 9 11M9 11c-2-.6-3.6.4-3.9 2.2-.2 1.3-.8 2.1-1.6 2.5 2.4 1 6.2.7 6.8-2.2.2-1-.3-2-1.3-2.5z',
  chat: 'M3.5 4.5h13v9H9l-3.5 3v-3h-2z',
  check: 'M4 10.5 8 14.5 16 5.5',
  chevron: 'M7 5l5 5-5 5',
  close: 'M5 5l10 10M15 5 5 15',
  compare: 'M10 3v14M4 6h4v8H4zM12 6h4v8h-4z',
  copy: 'M7 7h9v9H7zM4 13V4h9',
  dice: 'M4 4h12v12H4zM7.5 7.5h.01M12.5 7.5h.01M10 10h.01M7.5 12.5h.01M12.5 12.5h.01',
  download: 'M10 3v9M6 8.5l4 4 4-4M4 16.5h12',
  eraser: 'M7 16 3.5 12.5 12 4l4.5 4.5L9 16zM7.5 8.5l4.5 4.5M7 16h10',
  full: 'M4 8V4h4M16 8V4h-4M4 12v4h4M16 12v4h-4',
  gallery: 'M3.5 3.5h5.5V9H3.5zM11 3.5h5.5V9H11zM3.5 11h5.5v5.5H3.5zM11 11h5.5v5.5H11z',
  grid: 'M3.5 3.5h13v13h-13zM3.5 8h13M3.5 12.2h13M8 3.5v13M12.2 3.5v13',
  history: 'M4.2 7.5A6.5 6.5 0 1 1 3.5 10M4 4v3.8h3.8M10 6.5V10l2.6 1.8',
  image: 'M3.5 4h13v12h-13zM3.5 13.5 8 9l3.5 3.5L13.5 10l3 3.5M12.5 7.2h.01',
  invert: 'M10 3.5a6.5 6.5 0 0 0 0 13zM10 3.5a6.5 6.5 0 0 1 0 13',
  key: 'M8 12a3.5 3.5 0 1 1 2.5-6A3.5 3.5 0 0 1 8 12zM10 10.5l6 6M14 14.5l2-2',
  lock: 'M5 9h10v7.5H5zM7 9V6.5a3 3 0 0 1 6 0V9',
  make: 'M4 16 13 7M13 7l-2-2M13 7l2 2M15 3v2.6M13.7 4.3h2.6M6 4v2.6M4.7 5.3h2.6',
  minus: 'M4 10h12',
  models: 'M10 3l6.5 3.5v7L10 17l-6.5-3.5v-7zM3.5 6.5 10 10l6.5-3.5M10 10v7',
  moon: 'M16 12.2A6.8 6.8 0 0 1 7.8 4 6.5 6.5 0 1 0 16 12.2z',
  more: 'M4.5 10h.01M10 10h.01M15.5 10h.01',
  plus: 'M10 4v12M4 10h12',
  stop: 'M5.5 5.5h9v9h-9z',
  sun: 'M10 6.8a3.2 3.2 0 1 1 0 6.4 3.2 3.2 0 0 1 0-6.4zM10 2.5v1.6M10 15.9v1.6M2.5 10h1.6M15.9 10h1.6M4.7 4.7l1.1 1.1M14.2 14.2l1.1 1.1M15.3 4.7l-1.1 1.1M5.8 14.2l-1.1 1.1',
  trash: 'M4 5.5h12M8 5.5V3.5h4v2M5.5 5.5l.7 11h7.6l.7-11M8.5 8.5v5M11.5 8.5v5',
  undo: 'M4 8h8a4 4 0 0 1 0 8H8M7.5 4.5 4 8l3.5 3.5',
  redo: 'M16 8H8a4 4 0 0 0 0 8h4M12.5 4.5 16 8l-3.5 3.5',
  unlock: 'M5 9h10v7.5H5zM7 9V6.5a3 3 0 0 1 5.8-1',
  upload: 'M10 13V4M6 7.5l4-4 4 4M4 16.5h12',
  zoom: 'M8.5 3.5a5 5 0 1 1 0 10 5 5 0 0 1 0-10zM12.2 12.2l4.3 4.3M8.5 6.5v4M6.5 8.5h4',
  warning: 'M10 3 17.5 16.5h-15zM10 8.5v3.5M10 14.3h.01',
};

/** Return an icon. It is decoration: the control around it needs a name. */
export function Icon({ name, size = 18 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 20 20" aria-hidden="true" focusable="false">
    <path d=${PATHS[name]} />
  </svg>`;
}
