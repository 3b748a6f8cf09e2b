"""Content digests (OCI image-spec, descriptor.md, "Digests")."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from clowder_aimage.errors import FormatError

_ENCODED = {
    "sha256": re.compile(r"[0-9a-f]{64}"),
    "sha512": re.compile(r"[0-9a-f]{128}"),
}
PATTERN = "|".join(f"{name}:{encoded.pattern}" for name, encoded in _ENCODED.items())


class Hasher(Protocol):
    """The part of a hashlib object that verification needs."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """An algorithm and the lower-case hex of its value, as ``parse`` accepts them."""

    algorithm: str
    encoded: str

    def __post_init__(self) -> None:
        # A digest becomes a path and a URL. Checking it here covers each way to make one.
        pattern = _ENCODED.get(self.algorithm)
        if pattern is None:
            raise FormatError(
                f"unsupported digest algorithm {self.algorithm[:40]!r}",
                hint="expected sha256:<64 hex digits> or sha512:<128 hex digits>",
            )
        if pattern.fullmatch(self.encoded) is None:
            raise FormatError(
                f"invalid {self.algorithm} digest: {self.encoded[:140]!r}",
                hint="expected the full digest in lower-case hex",
            )

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Parse ``algorithm:encoded``.

        Raises:
            FormatError: the digest is invalid; it never becomes part of a path or a URL.
        """
        if not isinstance(text, str):
            raise FormatError(f"a digest must be a string, not {type(text).__name__}")
        algorithm, colon, encoded = text.partition(":")
        if not colon:
            raise FormatError(f"invalid digest: {text[:140]!r}")
        return cls(algorithm, encoded)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, algorithm: str = "sha256") -> Digest:
        """Return the digest of ``data``."""
        hasher = create_hasher(algorithm)
        hasher.update(data)
        return cls(algorithm, hasher.hexdigest())

    def matches(self, data: bytes) -> bool:
        """Return True if this is the digest of ``data``."""
        return hashlib.new(self.algorithm, data).hexdigest() == self.encoded

    def create_hasher(self) -> Hasher:
        """Return a new hasher of this digest's algorithm."""
        return create_hasher(self.algorithm)

    @property
    def short(self) -> str:
        """The first twelve hex digits, for display only."""
        return self.encoded[:12]

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.encoded}"


def create_hasher(algorithm: str) -> Hasher:
    """Return a hasher for one of the registered algorithms.

    Raises:
        FormatError: the image specification does not register the algorithm.
    """
    if algorithm not in _ENCODED:
        raise FormatError(f"unsupported digest algorithm {algorithm[:40]!r}")
    return hashlib.new(algorithm)
