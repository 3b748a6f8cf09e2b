// Two pictures, compared by a slider.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Compare() {
  return html`<${Empty} icon="compare" title="Compare" />`;
}
