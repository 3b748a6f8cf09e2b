// The pictures that this browser has kept.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Gallery() {
  return html`<${Empty} icon="gallery" title="Gallery" />`;
}
