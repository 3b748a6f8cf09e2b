// Not built yet.

export function PictureInput() {
  return null;
}
