// Files that are dropped or pasted anywhere on the page: their settings are loaded.

import { html, useEffect, useState } from './html.js';
import { Icon } from './icons.js';
import { t } from './lang.js';
import { takeFile } from './picture_draft.js';

const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files');

/** Take what is dropped or pasted outside of a place for pictures; shows that it can be dropped. */
export function DropAnywhere() {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    const over = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const left = (event) => !event.relatedTarget && setOver(false);
    const end = () => setOver(false);
    const dropped = (event) => {
      setOver(false);
      if (!hasFiles(event) || event.defaultPrevented) return;
      event.preventDefault();
      const [file] = event.dataTransfer.files;
      if (file) takeFile(file);
    };
    const pasted = (event) => {
      const [file] = event.clipboardData?.files ?? [];
      if (!file || event.defaultPrevented || event.clipboardData.getData('text/plain')) return;
      event.preventDefault();
      takeFile(file);
    };
    const all = { dragover: over, dragleave: left, dragend: end, drop: dropped, paste: pasted };
    for (const [name, act] of Object.entries(all)) addEventListener(name, act);
    addEventListener('drop', end, { capture: true }); // also of those that a part takes
    return () => {
      for (const [name, act] of Object.entries(all)) removeEventListener(name, act);
      removeEventListener('drop', end, { capture: true });
    };
  }, []);
  return isOver && html`<div class="drop-anywhere" aria-hidden="true"><p><${Icon} name="image" />${t('pictures.dropAnywhere')}</p></div>`;
}
