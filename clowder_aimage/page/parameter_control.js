// The labels, the hints and the limits of the controls of parameters.

import { t } from './lang.js';
import { PARAMETERS } from './parameters.js';

/** Return the label of a setting: a text of the language, or the words of its name. */
export function label(name) {
  const words = name.replaceAll('_', ' ');
  return t(`setting.${name}`, {}, words[0].toUpperCase() + words.slice(1));
}

/** Return the hint of a parameter: a text of the language, or its help. */
export const hint = (name) => t(`hint.${name}`, {}, PARAMETERS[name].help);

/** Return the limits of a field for a number. */
export function limitsOf({ kind, least, above, most, step }) {
  return { min: least ?? above, max: most, step: step ?? (kind === 'whole' ? 1 : 'any') };
}

/** Return the limits of a slider with a step: the range that is usual. */
export function scaleOf({ usual, least, above, most }, step) {
  const [min, max] = usual ?? [above === undefined ? least : above + step, most];
  return { min, max, step };
}
