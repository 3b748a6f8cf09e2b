// Templates, state and hooks: what every part imports from the vendored libraries.

import { h, render, Fragment } from './vendor/preact.js';
import htm from './vendor/htm.js';

export const html = htm.bind(h);
export { render, Fragment };
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from './vendor/hooks.js';
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from './vendor/signals.js';
