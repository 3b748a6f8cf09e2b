// What can be done with a picture that was made: keep, vary, begin with it.

import { html } from './html.js';
import { Button } from './controls.js';
import { t } from './lang.js';
import { enlargePicture, mostImages, usePicture } from './picture_draft.js';
import { useSize } from './picture_enlargement.js';
import { saveEntry } from './picture_file.js';
import { change, draft, show } from './state.js';

export function ResultActions({ entry }) {
  const { seed, steps } = entry.facts;
  const [width, height] = useSize(entry.blob) ?? [entry.facts.width, entry.facts.height];
  const isKept = draft.value.seedLocked && draft.value.seed === seed;
  const words = [`${width ?? '?'} × ${height ?? '?'}`, t('make.fact-seed', { seed: String(seed ?? '?') }), t('make.fact-steps', { n: steps ?? '?' })];
  return html`<div class="make-result">
    <p class="make-result-facts">${words.join(' · ')}</p>
    <div class="row">
      <${Button} icon="download" onClick=${() => saveEntry(entry)}>${t('make.download')}<//>
      <${Button} icon="image" onClick=${() => usePicture(entry.blob)}>${t('pictures.use')}<//>
      ${mostImages(draft.value.model) === 1 && html`<${Button} icon="full" onClick=${() => enlargePicture(entry)}>${t('enlarge.go')}<//>`}
      <${Button} icon="lock" disabled=${isKept || seed === undefined} onClick=${() => change({ seed, seedLocked: true })}>${t('make.keep-seed')}<//>
      <${Button} icon="gallery" onClick=${() => show('gallery')}>${t('make.to-gallery')}<//>
    </div>
  </div>`;
}
