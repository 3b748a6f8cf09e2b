"""The models of a worker's store: complete ones by name, with their kinds.

Jobs for a model that this worker cannot run are refused by the worker itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.api.model_list import list_entries
from clowder_aimage.content.gate import find_gate
from clowder_aimage.engine.memory_plan import estimate_need_of_bytes
from clowder_aimage.layout import ImageLayout


@dataclass(slots=True)
class StoreView:
    """The models of one store: digests by name; kinds and estimated memory by digest.

    Read in a thread.
    """

    store: ImageLayout
    descriptions: ModelDescriptions
    models: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)
    _fingerprint: Hashable = None
    # Of two reads at once the one that began first could end last.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> None:
        """Read the store again if it has changed. Raises AImageError."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        fingerprint = self.store.compute_fingerprint()
        if fingerprint is not None:
            # Another policy of signatures is another gate.
            fingerprint = fingerprint, find_gate()
            if fingerprint == self._fingerprint:
                return
        models, kinds, needs = {}, {}, {}
        is_whole = True
        for item in list_entries(self.store):
            digest = str(item.descriptor.digest)
            is_whole &= not item.missing
            if item.missing:
                continue
            description = self.descriptions.find(item.descriptor)
            models[str(item.reference)] = digest
            needs[digest] = estimate_need_of_bytes(item.size)
            kinds[digest] = "" if description is None else description.kind
        self.models, self.kinds, self.needs = models, kinds, needs
        # Blobs arrive without a new name.
        self._fingerprint = fingerprint if is_whole else None
