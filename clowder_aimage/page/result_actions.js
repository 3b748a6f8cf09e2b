// What can be done with a picture that was made: keep, vary, begin with it.

import { html } from './html.js';
import { pictureUrl } from './api.js';
import { Button } from './controls.js';
import { t } from './lang.js';
import { change, draft, show } from './state.js';

/** Return the name of the file of a picture. */
export const fileName = (entry) => `aimage-${entry.facts.seed ?? entry.made}.png`;

export function ResultActions({ entry }) {
  const { facts } = entry;
  const use = () => {
    change({ images: [entry.blob], mask: null });
    document.getElementById('main').scrollIntoView();
  };
  const lock = () => change({ seed: facts.seed, seedLocked: true });
  return html`<div class="make-result">
    <p class="make-result-facts">${[`${facts.width ?? '?'} × ${facts.height ?? '?'}`, t('make.fact-seed', { seed: String(facts.seed ?? '?') }), t('make.fact-steps', { n: facts.steps ?? '?' })].join(' · ')}</p>
    <div class="row">
      <a class="button" href=${pictureUrl(entry.blob)} download=${fileName(entry)}>${t('make.download')}</a>
      <${Button} onClick=${use}>${t('make.use')}<//>
      ${facts.seed !== undefined && !(draft.value.seedLocked && draft.value.seed === facts.seed) && html`<${Button} onClick=${lock}>${t('make.keep-seed')}<//>`}
      <${Button} kind="quiet" onClick=${() => show('gallery')}>${t('make.to-gallery')}<//>
    </div>
  </div>`;
}
