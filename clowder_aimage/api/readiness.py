"""Readiness of a worker or a node for requests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import (
    Completeness,
    CompletenessCache,
    check_completeness,
)
from clowder_aimage.oci import Reference

BY_NODE = "node"  # whose pins the node itself looks after: it may want a part alone


class Readiness:
    """The readiness of one store. Threads may share it."""

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._completeness = CompletenessCache(store)

    def against(
        self, wanted: Sequence[str] = (), missing: Sequence[str] = ()
    ) -> list[dict[str, str]]:
        """Return the reasons to send requests elsewhere: the store, and missing models.

        A store that fails is a reason, not an error. ``missing`` are known not to be here.
        """
        found = [] if _is_writable(self._store) else [{"reason": "store not writable"}]
        try:
            pinned = _pinned(self._store)
        except (AImageError, OSError):  # which models are to be here is unknown
            pinned = []
            found = found or [{"reason": "store not readable"}]
        others = [name for name in (*wanted, *pinned) if not self._is_complete(name)]
        for name in dict.fromkeys((*missing, *others)):
            found.append({"reason": "model missing", "model": name})
        return found

    def _is_complete(self, name: str) -> bool:
        try:
            return self._completeness.find(name, lambda: _check(self._store, name)).is_complete
        except (AImageError, OSError):
            return False


def _check(store: ImageLayout, name: str) -> Completeness:
    return check_completeness(store, store.resolve(Reference.parse(name)))


def _is_writable(store: ImageLayout) -> bool:
    """Return True if a byte can be written where the store is, or will be. No file is left."""
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
