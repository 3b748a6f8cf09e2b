// Messages at the edge of the page.

import { html } from './html.js';
import { IconButton } from './controls.js';
import { t } from './lang.js';
import { dismiss, notices } from './state.js';

export function Notices() {
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.value.map((one) => html`<div key=${one.id} class=${`notice notice-${one.kind}`}>
      <p>${one.text}</p>
      <${IconButton} icon="close" size=${16} label=${t('dialog.close')} onClick=${() => dismiss(one.id)} />
    </div>`)}
  </div>`;
}
