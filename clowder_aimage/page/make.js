// The form that makes pictures.

import { html } from './html.js';
import { Button, Field } from './controls.js';
import { t } from './lang.js';
import { change, draft } from './state.js';
import { LoraPanel } from './lora_panel.js';
import { PictureInput } from './picture_input.js';

export function Make() {
  const value = draft.value;
  return html`<div class="make">
    <form class="make-form stack">
      <${Field} label=${t('make.prompt')}>
        ${(link) => html`<textarea ...${link} class="input" rows="4" value=${value.prompt}
          onInput=${(event) => change({ prompt: event.target.value })}></textarea>`}
      <//>
      <${PictureInput} value=${value} onChange=${change} />
      <${LoraPanel} value=${value.loras} onChange=${(loras) => change({ loras })} model=${value.model} />
      <${Button} kind="primary">${t('make.go')}<//>
    </form>
  </div>`;
}
