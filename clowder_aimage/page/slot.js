// At most four tabs make pictures at the same time: a browser has six connections to a worker
// (HTTP/1.1), and the others are needed to load pages and to ask for the state.

const SLOTS = 4;

/** Run `work` in a slot, and wait for one if all are taken. Without Web Locks it runs at once. */
export async function inSlot(signal, work) {
  if (!navigator.locks) return work();
  for (let index = 0; index < SLOTS; index++) {
    const found = await navigator.locks.request(`aimage-slot-${index}`, { ifAvailable: true }, async (lock) => lock && { value: await work() });
    if (found) return found.value;
  }
  const name = `aimage-slot-${Math.floor(Math.random() * SLOTS)}`;
  return navigator.locks.request(name, { signal }, work);
}
