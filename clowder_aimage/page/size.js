// Sizes of pictures: from an aspect ratio and the size of the model.

const MULTIPLE = 16; // of the sides of a picture
export const ASPECTS = ['1:1', '9:7', '4:3', '3:2', '16:9', '21:9'];
export const SCALES = [0.5, 0.75, 1, 1.25, 1.5, 2];

const rounded = (side) => Math.max(MULTIPLE, Math.round(side / MULTIPLE) * MULTIPLE);

/** Return the size of a model: of its own pictures. */
export function ownSize(model) {
  return [model?.defaults?.width ?? 1024, model?.defaults?.height ?? 1024];
}

/** Return the fields of the draft for an aspect such as '16:9', with the area of the model's size. */
export function sizeFields(aspect, scale, model) {
  if (!aspect) return { aspect, scale: 1, width: null, height: null };
  if (aspect === 'free') return { aspect };
  const [across, down] = aspect.split(':').map(Number);
  const [width, height] = ownSize(model);
  const area = width * height * scale * scale;
  const side = Math.sqrt((area * across) / down);
  return { aspect, scale, width: rounded(side), height: rounded((side * down) / across) };
}

/** Return an aspect with its sides exchanged. */
export const turned = (aspect) => aspect.split(':').reverse().join(':');

/** Return the aspect of the list ASPECTS that is this one or its turned one. */
export const upright = (aspect) => (ASPECTS.includes(aspect) ? aspect : turned(aspect));
