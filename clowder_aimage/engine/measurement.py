"""The measured memory of models, kept in the store: the next worker plans with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.description import MEASURED, keep_description, read_description
from clowder_aimage.oci import Digest, Reference

# A size that grew by less is not written again
_GROWTH = 1.05
_MAX_CACHED = 1000


@dataclass(slots=True)
class MeasuredSizes:
    """The largest bytes of the processes of models, by manifest and the settings of the worker.

    Those of another version of the program are not read. ``read`` and ``record`` block.
    """

    store: ImageLayout
    limits: EngineLimits
    _cached: dict[tuple[Digest, str], int] = field(default_factory=dict)

    def get(self, digest: Digest, reference: Reference) -> int:
        """Return the bytes that were read or recorded; 0 without any."""
        return self._cached.get((digest, self._describe_settings(reference)), 0)

    def read(self, digest: Digest, reference: Reference) -> None:
        """Read the size of a model once."""
        key = digest, self._describe_settings(reference)
        if key not in self._cached:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[key] = self._read_sizes(digest).get(key[1], 0)

    def is_larger(self, digest: Digest, reference: Reference, size: int) -> bool:
        """Return True if a size should be recorded."""
        return size > _GROWTH * self.get(digest, reference)

    def record(self, digest: Digest, reference: Reference, size: int) -> None:
        """Keep a size. A store that cannot be written stays as it is."""
        settings = self._describe_settings(reference)
        self._cached[digest, settings] = size
        sizes = self._read_sizes(digest) | {settings: size}
        keep_description(self.store.root, MEASURED, digest, {"sizes": sizes})

    def _describe_settings(self, reference: Reference) -> str:
        """Return the settings on which a size depends."""
        limits = self.limits
        settings = limits.get_backend(str(reference)), limits.device, limits.dtype, limits.compute
        return " ".join(str(each) for each in (*settings, limits.context, limits.parallel))

    def _read_sizes(self, digest: Digest) -> dict[str, int]:
        value = (read_description(self.store.root, MEASURED, digest) or {}).get("sizes")
        sizes = value if isinstance(value, dict) else {}
        return {name: size for name, size in sizes.items() if type(size) is int and size >= 0}
