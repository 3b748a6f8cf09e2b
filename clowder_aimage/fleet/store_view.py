"""The models of a worker's store: complete ones by name, with their kinds.

Jobs for a model that this worker cannot run are refused by the worker itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from clowder_aimage.api.model_kind import classify_model
from clowder_aimage.api.model_list import list_entries
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage


@dataclass(slots=True)
class StoreView:
    """The models of one store: digests by name, and kinds by digest. Read in a thread."""

    store: ImageLayout
    models: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    _cached_kinds: dict[str, str] = field(default_factory=dict)
    _fingerprint: Hashable = None

    def read(self) -> None:
        """Read the store again if it has changed. Raises AImageError."""
        fingerprint = self.store.compute_fingerprint()
        if fingerprint is not None and fingerprint == self._fingerprint:
            return
        models, kinds = {}, {}
        is_whole = True
        for item in list_entries(self.store):
            digest = str(item.descriptor.digest)
            is_whole &= not item.missing
            if item.missing:
                continue
            if digest not in self._cached_kinds:
                try:
                    self._cached_kinds[digest] = classify_model(
                        read_aimage(self.store, item.reference).aimage
                    )
                except AImageError:
                    self._cached_kinds[digest] = ""
            models[str(item.reference)] = digest
            kinds[digest] = self._cached_kinds[digest]
        self.models, self.kinds = models, kinds
        # Blobs arrive without a new name.
        self._fingerprint = fingerprint if is_whole else None
