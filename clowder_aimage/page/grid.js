// A grid of pictures with two settings varied.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Grid() {
  return html`<${Empty} icon="grid" title="Grid" />`;
}
