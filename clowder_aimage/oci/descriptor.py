"""Content descriptors (OCI image-spec, descriptor.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.oci.digest import Digest

_KNOWN = frozenset({"mediaType", "digest", "size", "annotations"})
_TEXT = {str}
# One pebibyte: a larger size is a mistake or an attack.
MAX_SIZE = 1 << 50


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob or manifest, by digest and size in bytes.

    ``extra`` keeps all other fields (``name``, ``dtype``, ``shape``, ``platform``, ``urls`` ...),
    since processors must not drop them.
    """

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def from_json(cls, value: object, label: str = "descriptor") -> Descriptor:
        """Parse a descriptor from JSON.

        An absent ``mediaType`` becomes the empty string: older ollama manifests have none.

        Raises:
            FormatError: a known field is missing or of the wrong type.
        """
        if not isinstance(value, dict):
            raise FormatError(f"{label}: a descriptor must be an object")
        media_type = value.get("mediaType", "")
        size = value.get("size")
        if not isinstance(media_type, str):
            raise FormatError(f"{label}: mediaType must be a string")
        # JSON's true is an int in Python.
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE:
            raise FormatError(f"{label}: size must be a number of bytes, not {size!r:.60}")
        annotations = read_annotations(value, label)
        extra = {}
        if not value.keys() <= _KNOWN:
            extra = {key: item for key, item in value.items() if key not in _KNOWN}
            check_spelling(extra, _KNOWN, label)
        return cls(media_type, Digest.parse(value.get("digest")), size, annotations, extra)

    @classmethod
    def of(
        cls, media_type: str, data: bytes, *, algorithm: str = "sha256", **fields: Any
    ) -> Descriptor:
        """Return the descriptor of ``data``."""
        return cls(media_type, Digest.of(data, algorithm), len(data), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON: known fields first, in the specification's order."""
        value: dict[str, Any] = {"mediaType": self.media_type} if self.media_type else {}
        value |= {"digest": str(self.digest), "size": self.size}
        value |= self.extra
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value


def check_spelling(value: Mapping[str, Any], keys: frozenset[str], label: str) -> None:
    """Reject keys that differ from ``keys`` only in case.

    Tools written in Go read ``Layers`` as ``layers``, so that one document could have two meanings
    (CVE-2021-41190). Raises FormatError.
    """
    for key in value:
        if key not in keys and key.casefold() in _fold(keys):
            raise FormatError(f"{label}: invalid key {key!r}: keys are case-sensitive")


@functools.cache
def _fold(keys: frozenset[str]) -> frozenset[str]:
    return frozenset(key.casefold() for key in keys)


def read_annotations(value: Mapping[str, Any], label: str) -> Mapping[str, str]:
    """Return the annotations of a JSON object, none if absent or null. Raises FormatError."""
    annotations = value.get("annotations")
    if annotations is None:
        return {}
    if not isinstance(annotations, dict) or not {*map(type, annotations.values())} <= _TEXT:
        raise FormatError(f"{label}: annotations must map strings to strings")
    return annotations


def to_plain(descriptor: Descriptor) -> dict[str, Any]:
    """Return a descriptor without the annotations of its index."""
    value = descriptor.to_json()
    return {key: value[key] for key in ("mediaType", "digest", "size") if key in value}
