"""Verification of streamed bytes."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.store import Reader, StoredFile
from clowder_aimage.errors import VerificationError
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor

_SENT = (
    "try again; if this persists, the registry, or another source of it such as a mirror, a proxy "
    "or an archive, has wrong content"
)


class RawReader(io.RawIOBase):
    """A stream that is read only."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._fill(memoryview(buffer))

    @abstractmethod
    def _fill(self, view: memoryview) -> int:
        """Read some bytes into ``view`` and return their number, 0 at the end."""


class SourceReader(RawReader):
    """A stream over ``source`` that closes it."""

    def __init__(self, source: Reader) -> None:
        self._source = source

    @property
    def is_stored(self) -> bool:
        """True if the bytes are those of a blob in a store, and not sent by another machine."""
        return _is_stored(self._source)

    def close(self) -> None:
        self._source.close()
        super().close()


class VerifyingReader(SourceReader):
    """A stream over ``source`` that verifies its bytes against ``expected``.

    The error is raised by the read at the end of the stream, or at the first excess byte: all bytes
    are verified once the end has been read without an error. With ``is_shared``, the source is a
    file that shares its bytes with one in the store.
    """

    def __init__(self, source: Reader, expected: Descriptor, *, is_shared: bool = False) -> None:
        super().__init__(source)
        self._expected, self._is_shared = expected, is_shared
        self._hasher = expected.digest.create_hasher()
        self._count = 0

    def _fill(self, view: memoryview) -> int:
        if not view:
            return 0
        count = self._source.readinto(view)
        # Only the end of the source proves that no byte is missing.
        if count == 0:
            self._check_all()
            return 0
        self._count += count
        if self._count > self._expected.size:
            raise _build_length_error(self._expected)
        self._hasher.update(view[:count])
        return count

    def _check_all(self) -> None:
        is_stored = self._is_shared or self.is_stored
        _check_source(self._expected, self._count, self._hasher.hexdigest(), is_stored=is_stored)


def _is_stored(source: Reader) -> bool:
    return source.is_stored if isinstance(source, SourceReader) else isinstance(source, StoredFile)


def _check_source(expected: Descriptor, size: int, encoded: str, *, is_stored: bool) -> None:
    """Check as ``check`` does; for a file in a store the remedy is its repair."""
    try:
        check(expected, size, encoded)
    except VerificationError as error:
        if not is_stored:
            raise
        raise VerificationError(error.message, remedy="repair_store") from None


def check(expected: Descriptor, size: int, encoded: str) -> None:
    """Raise VerificationError unless ``size`` bytes with hash ``encoded`` match ``expected``."""
    check_size(expected, size)
    if encoded != expected.digest.encoded:
        raise VerificationError(
            f"digest mismatch: expected {expected.digest}, "
            f"got {expected.digest.algorithm}:{encoded}",
            hint=_SENT,
        )


def _build_length_error(expected: Descriptor) -> VerificationError:
    return VerificationError(
        f"{expected.digest} is longer than the {expected.size} bytes in its descriptor"
    )


def check_size(expected: Descriptor, size: int) -> None:
    """Raise VerificationError unless ``expected`` has ``size`` bytes."""
    if size != expected.size:
        raise VerificationError(
            f"size mismatch: {expected.digest} has {size} bytes, expected {expected.size}"
        )


def verify(source: Reader, expected: Descriptor) -> None:
    """Read ``source`` to its end. Raises VerificationError if it does not match ``expected``."""
    with VerifyingReader(source, expected) as reader:
        buffer = new_buffer()
        while reader.readinto(buffer):
            pass


def read_all(source: Reader, expected: Descriptor, limit: int = MAX_MANIFEST_SIZE) -> bytes:
    """Read content of up to ``limit`` bytes into memory. Raises VerificationError."""
    with source:
        if expected.size > limit:
            raise VerificationError(
                f"{expected.digest} is too large: {expected.size} bytes, the limit is {limit}"
            )
        # A byte more than expected would be too long
        buffer, count = memoryview(bytearray(expected.size + 1)), 0
        # Files of a store explain errors of the system in this method
        while added := source.readinto(buffer[count:]):
            count += added
    raw = bytes(buffer[:count])
    if len(raw) > expected.size:
        raise _build_length_error(expected)
    hasher = expected.digest.create_hasher()
    hasher.update(raw)
    _check_source(expected, len(raw), hasher.hexdigest(), is_stored=_is_stored(source))
    return raw
