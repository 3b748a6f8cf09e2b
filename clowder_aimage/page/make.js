// The form that makes pictures, beside what is being made.

import { html, useEffect } from './html.js';
import { Button, Fold, NumberField } from './controls.js';
import { Icon } from './icons.js';
import { t } from './lang.js';
import { LoraPanel } from './lora_panel.js';
import { Advanced, changedText, SeedField } from './make_fields.js';
import { ModelField } from './make_model.js';
import { EnhanceField, NegativeField, PromptField } from './make_prompt.js';
import { SizeField } from './make_size.js';
import { cancel, isRunning, run, start } from './making.js';
import { label, limitsOf } from './parameter_control.js';
import { PARAMETERS } from './parameters.js';
import { PictureInput } from './picture_input.js';
import { Preview } from './preview.js';
import { change, chosen, draft, EMPTY, worker } from './state.js';

export function Make() {
  useEffect(() => {
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  }, []);
  const isActive = run.value !== null || (worker.value !== null && !chosen.value); // what is said comes first on a phone
  return html`<div class=${`make ${isActive ? 'make-active' : ''}`}>
    <h1 class="hidden-text">${t('tab.make')}</h1>
    <form class="make-form" onSubmit=${submitted} aria-label=${t('make.form')}>
      <div class="make-fields stack"><${Fields} /></div>
      <${Actions} />
    </form>
    <${Preview} />
  </div>`;
}

function submitted(event) {
  event.preventDefault();
  start();
}

/** Ctrl-Enter makes, also with the Cmd key; Esc cancels unless it closes a dialog. */
function pressed(event) {
  if (event.defaultPrevented || document.querySelector('dialog[open]')) return;
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  }
  if (event.key === 'Escape' && isRunning()) cancel();
}

function Fields() {
  const value = draft.value;
  const model = chosen.value;
  const { errors } = value;
  return html`
    <${PromptField} value=${value} />
    <${EnhanceField} value=${value} />
    <${NegativeField} value=${value} />
    <${ModelField} value=${value} />
    <${SizeField} value=${value} model=${model} />
    <div class="make-row">
      <${NumberField} label=${label('steps')} value=${value.steps} placeholder=${model?.defaults?.steps ?? ''}
        error=${errors.steps} ...${limitsOf(PARAMETERS.steps)} onChange=${(steps) => change({ steps })} />
      <${NumberField} label=${label('n')} value=${value.n} error=${errors.n} ...${limitsOf(PARAMETERS.n)}
        onChange=${(n) => change({ n: n ?? EMPTY.n })} />
    </div>
    <${SeedField} value=${value} />
    <div class="make-folds">
      <${PictureInput} value=${{ ...value, model: model?.id ?? value.model }} onChange=${change} />
      <${LoraPanel} value=${value.loras} onChange=${(loras) => change({ loras })} model=${model?.id ?? ''} />
      <${Fold} title=${t('make.advanced')} aside=${changedText(value, model)}><${Advanced} value=${value} model=${model} /><//>
    </div>`;
}

function Actions() {
  const isBusy = isRunning();
  const failure = run.value?.phase === 'failed' && !run.value.field ? run.value.message : '';
  return html`<div class="make-actions">
    ${failure && html`<p class="make-failure" role="alert"><${Icon} name="warning" size=${16} /><span>${failure}</span></p>`}
    <div class="make-buttons">
      ${isBusy
        ? html`<${Button} key="cancel" icon="stop" class="make-go" onClick=${cancel}>${t('make.cancel')}<kbd>Esc</kbd><//>`
        : html`<button key="go" class="button button-primary make-go" disabled=${!chosen.value}>${t('make.go')}<kbd>${t('make.keys')}</kbd></button>`}
      <${Button} kind="quiet" onClick=${reset}>${t('make.reset')}<//>
    </div>
  </div>`;
}

/** Return to the settings of the model. The prompt and the model stay. */
function reset() {
  const { prompt, negative, model } = draft.value;
  change({ ...EMPTY, prompt, negative, model });
}
