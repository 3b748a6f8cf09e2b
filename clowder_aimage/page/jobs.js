// Jobs that run in the worker.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Jobs() {
  return html`<${Empty} icon="models" title="Jobs" />`;
}
