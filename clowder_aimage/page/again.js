// A picture again, with one thing changed.

import { html, useEffect, useId, useRef, useState } from './html.js';
import { Bar, Button, Field, sendKey } from './controls.js';
import { generate, inSlot } from './generation.js';
import { number, t } from './lang.js';
import { label } from './parameter_control.js';
import { draftOf } from './picture_draft.js';
import { CHANGEABLE, changeable, isNumeric, readValue, seedAfter, settingText, withSetting } from './setting.js';
import { models } from './state.js';
import { objectOf, TEXT, WHOLE } from './shape.js';
import { readTab, writeTab } from './storage.js';

const LAST = objectOf({ id: WHOLE, name: { kind: 'one', of: Object.keys(CHANGEABLE) }, text: TEXT });

/** The form. Props: `entry`; `onMade(id)`, which takes the id of the new picture. */
export function Again({ entry, onMade }) {
  const { draft, missing } = draftOf(entry.facts, entry.inputs);
  const last = readTab('again', LAST);
  const kept = last?.id === entry.id ? last : null; // what was typed before a reload
  const [name, setName] = useState(kept?.name ?? 'seed');
  const [text, setText] = useState(kept?.text ?? firstText(draft, 'seed'));
  const [error, setError] = useState('');
  const [progress, setProgress] = useState(null); // {step, total}
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const choose = (next) => {
    setName(next);
    setText(firstText(draft, next));
    setError('');
  };
  const type = (next) => {
    setText(next);
    writeTab('again', { id: entry.id, name, text: next });
  };
  const make = async (event) => {
    event.preventDefault();
    const value = readValue(name, text);
    if (value === null) return setError(wrongText(name));
    setError('');
    setProgress({ step: 0, total: 0 });
    abort.current = new AbortController();
    try {
      const changed = { ...withSetting(draft, name, value), n: 1, previews: 0 };
      const { signal } = abort.current;
      const onEvent = (each) => each.kind === 'progress' && setProgress(each);
      const [made] = await inSlot(signal, () => generate(changed, { signal, onEvent }));
      setProgress(null);
      if (made?.id != null) onMade(made.id);
      else if (made) setError(t('again.notKept'));
    } catch (failed) {
      setProgress(null);
      if (failed.name !== 'AbortError') setError(failed.message);
    }
    return undefined;
  };
  if (missing.length) return html`<p class="field-hint">${t('again.missing')}</p>`;
  return html`<form class="again" onSubmit=${make}>
    <${Field} label=${t('again.what')}>
      ${(link) => html`<select ...${link} class="input" value=${name} disabled=${progress} onChange=${(event) => choose(event.target.value)}>
        ${changeable(draft).map((one) => html`<option key=${one} value=${one}>${label(one)}</option>`)}
      </select>`}
    <//>
    <${Field} label=${t('again.value')} error=${error}>
      ${(link) => html`<${Value} link=${link} name=${name} text=${text} onText=${type} isOff=${Boolean(progress)} />`}
    <//>
    ${progress
      ? html`<div key="progress" class="again-progress">
          <${Bar} label=${t('again.progress')} value=${progress.total ? progress.step / progress.total : null} />
          <${Button} icon="stop" onClick=${() => abort.current.abort()}>${t('again.cancel')}<//>
        </div>`
      : html`<div key="make"><${Button} type="submit" kind="primary" icon="again">${t('again.make')}<//></div>`}
  </form>`;
}

/** Return the text that a setting begins with: that of the picture; of a seed, the next. */
function firstText(draft, name) {
  const text = settingText(draft, name);
  return name === 'seed' && text ? String(seedAfter(text) ?? text) : text;
}

function wrongText(name) {
  const { kind, least, above, most, step } = CHANGEABLE[name];
  if (!isNumeric({ kind })) return t('again.wrong');
  const key = above !== undefined ? 'again.above' : step ? 'again.multiple' : 'again.range';
  return `${t('again.wrong')} ${t(key, { least: number(least ?? above, 3), most, step })}`;
}

/** The control for the value of a changeable setting. */
export function Value({ link, name, text, onText, isOff }) {
  const list = useId();
  const typed = (event) => onText(event.target.value);
  const { kind } = CHANGEABLE[name];
  if (kind === 'text') {
    return html`<textarea ...${link} class="input" rows="3" value=${text} disabled=${isOff} onInput=${typed} onKeyDown=${sendKey}></textarea>`;
  }
  const isModel = kind === 'model';
  return html`<input ...${link} class="input" value=${text} disabled=${isOff} list=${isModel ? list : undefined}
      inputmode=${isModel ? undefined : 'decimal'} spellcheck=${false} autocomplete="off" onInput=${typed} />
    ${isModel && html`<datalist id=${list}>${pictureModels().map((one) => html`<option key=${one} value=${one} />`)}</datalist>`}`;
}

/** Return the names of the models that make pictures. */
export const pictureModels = () => models.value.filter((one) => one.capabilities?.includes('image')).map((one) => one.id);
