// A chat with a language model.

import { html } from './html.js';
import { Empty } from './controls.js';

export function Chat() {
  return html`<${Empty} icon="chat" title="Chat" />`;
}
