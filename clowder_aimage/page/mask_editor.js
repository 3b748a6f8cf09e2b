// Not built yet.

export function MaskEditor() {
  return null;
}
