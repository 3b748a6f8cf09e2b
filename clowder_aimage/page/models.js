// The models of the store.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Models() {
  return html`<${Empty} icon="models" title="Models" />`;
}
