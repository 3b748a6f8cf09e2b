"""Whether requests should be sent to a worker or a node.

A probe asks every few seconds, and anybody may: what was found to be here counts as long as no name
and no blob has come or gone, and a few minutes at most.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Hashable, Sequence

from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.fingerprint import ANEW
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference

BY_NODE = "node"  # whose pins the node itself looks after: it may want a part alone


class Readiness:
    """Of one store. Threads may share it."""

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._seen: tuple[Hashable, float, frozenset[str]] = (None, 0.0, frozenset())

    def against(
        self, wanted: Sequence[str] = (), missing: Sequence[str] = ()
    ) -> list[dict[str, str]]:
        """Why requests should go elsewhere: the store, or a model that is to be here and is not. A
        store that fails is a reason, too, and no error. ``missing`` are known not to be here."""
        found = [] if _is_writable(self._store) else [{"reason": "store not writable"}]
        try:
            pinned = _pinned(self._store)
        except (AImageError, OSError):  # which models are to be here, nobody knows
            pinned = []
            found = found or [{"reason": "store not readable"}]
        lacking = self._lacking([*wanted, *pinned])
        for name in dict.fromkeys((*missing, *lacking)):
            found.append({"reason": "model missing", "model": name})
        return found

    def _lacking(self, names: Sequence[str]) -> list[str]:
        """Which of these models are not here in full."""
        if not names:
            return []
        now = self._mark()
        known, end, seen = self._seen
        if now is None or known != now or time.monotonic() > end:
            end, seen = time.monotonic() + ANEW, frozenset()
        # what lacks is looked for again: it may only not have been readable for a moment
        here = frozenset(name for name in names if name in seen or self._is_here(name))
        if self._mark() == now:
            self._seen = now, end, here
        return [name for name in names if name not in here]

    def _mark(self) -> Hashable:
        try:
            return self._store.mark()
        except (AImageError, OSError):
            return None

    def _is_here(self, name: str) -> bool:
        try:
            stored = read_aimage(self._store, Reference.parse(name))
            return all(self._store.exists(blob) for blob in stored.manifest.children)
        except (AImageError, OSError):
            return False


def _is_writable(store: ImageLayout) -> bool:
    """Whether a byte can be written where the store is, or will be. No file is left."""
    place = store.root / ".aimage"
    try:
        while not place.exists() and place != place.parent:  # it may not even be looked at
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _pinned(store: ImageLayout) -> list[str]:
    return sorted(name for name, value in store.pins.items() if value.get("by") != BY_NODE)
