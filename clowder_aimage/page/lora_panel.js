// Not built yet.

export function LoraPanel() {
  return null;
}
