"""Measured properties of models, kept in the store: the next worker plans with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.description import MEASURED, keep_description, read_description
from clowder_aimage.oci import Digest, Reference

# A size that grew by less is not written again, and neither are seconds that changed by less
_GROWTH, _CHANGE = 1.05, 1.5
_MAX_CACHED = 1000


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured properties of a model; 0 for unknown ones.

    size: the largest number of bytes of its process. load: the seconds of a load. request: the mean
    seconds of a request.
    """

    size: int = 0
    load: float = 0.0
    request: float = 0.0

    def differs(self, previous: Measurement) -> bool:
        """Return True if it should be recorded in place of the previous one."""
        pairs = (self.load, previous.load), (self.request, previous.request)
        return self.size > _GROWTH * previous.size or any(
            new and not old / _CHANGE <= new <= old * _CHANGE for new, old in pairs
        )

    def add(self, previous: Measurement) -> Measurement:
        """Return it with the previous values where they are larger sizes, or are unknown here."""
        load, request = self.load or previous.load, self.request or previous.request
        return Measurement(max(self.size, previous.size), load, request)

    @classmethod
    def parse(cls, value: object) -> Measurement:
        """Return the measurement that was written; an empty one if another program wrote it."""
        fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
        size, *seconds = (fields.get(name, 0) for name in ("size", "load", "request"))
        is_valid = type(size) is int and all(
            type(each) in (int, float) and math.isfinite(each) for each in seconds
        )
        return cls(size, *map(float, seconds)) if is_valid and min(size, *seconds) >= 0 else cls()


_UNKNOWN = Measurement()


@dataclass(slots=True)
class Measurements:
    """The measurements of models, by manifest and the settings of the worker.

    Those of another version of the program are not read. ``read`` and ``record`` block.
    """

    store: ImageLayout
    limits: EngineLimits
    _cached: dict[tuple[Digest, str], Measurement] = field(default_factory=dict)

    def get(self, digest: Digest, reference: Reference) -> Measurement:
        """Return what was read or recorded of a model."""
        return self._cached.get((digest, self._describe_settings(reference)), _UNKNOWN)

    def read(self, digest: Digest, reference: Reference) -> None:
        """Read the measurement of a model once."""
        key = digest, self._describe_settings(reference)
        if key not in self._cached:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[key] = Measurement.parse(self._read_all(digest).get(key[1]))

    def record(self, digest: Digest, reference: Reference, measurement: Measurement) -> None:
        """Keep a measurement. A store that cannot be written stays as it is."""
        settings = self._describe_settings(reference)
        measurements = self._read_all(digest)
        added = measurement.add(Measurement.parse(measurements.get(settings)))
        self._cached[digest, settings] = added
        value = {"models": measurements | {settings: asdict(added)}}
        keep_description(self.store.root, MEASURED, digest, value)

    def _describe_settings(self, reference: Reference) -> str:
        """Return the settings on which a measurement depends."""
        limits = self.limits
        settings = limits.get_backend(str(reference)), limits.device, limits.dtype, limits.compute
        return " ".join(str(each) for each in (*settings, limits.context, limits.parallel))

    def _read_all(self, digest: Digest) -> dict[str, Any]:
        """Return the measurements of a manifest by the settings, unchecked."""
        value = (read_description(self.store.root, MEASURED, digest) or {}).get("models")
        return value if isinstance(value, dict) else {}
