// One picture at full size, with its facts.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Viewer() {
  return html`<${Empty} icon="full" title="Viewer" />`;
}
