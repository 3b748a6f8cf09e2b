"""Verification of streamed bytes."""

from __future__ import annotations

import io
from typing import BinaryIO

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.errors import VerificationError
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor


class SourceReader(io.RawIOBase):
    """A stream over ``source``, which is closed with it. Subclasses implement ``readinto``."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()


class VerifyingReader(SourceReader):
    """A stream over ``source`` that verifies its bytes against ``expected``.

    The error is raised by the read at the end of the stream, or at the first excess byte: all bytes
    are verified once the end has been read without an error.
    """

    def __init__(self, source: BinaryIO, expected: Descriptor) -> None:
        super().__init__(source)
        self._expected = expected
        self._hasher = expected.digest.hasher()
        self._count = 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not len(buffer):
            return 0
        count = readinto(self._source, buffer)
        if count == 0:
            check(self._expected, self._count, self._hasher.hexdigest())
            return 0
        self._count += count
        if self._count > self._expected.size:
            raise VerificationError(
                f"{self._expected.digest} is longer than the {self._expected.size} bytes "
                "that its descriptor promises"
            )
        self._hasher.update(memoryview(buffer)[:count])
        return count


def readinto(source: BinaryIO, buffer: memoryview) -> int:
    """Fill ``buffer`` from ``source``, without a copy if possible; return 0 at the end."""
    direct = getattr(source, "readinto", None)
    if direct is not None:
        return int(direct(buffer) or 0)
    data = source.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)


def check(expected: Descriptor, size: int, encoded: str) -> None:
    """Raise VerificationError unless ``size`` bytes with hash ``encoded`` match ``expected``."""
    check_size(expected, size)
    if encoded != expected.digest.encoded:
        raise VerificationError(
            f"the content of {expected.digest} hashes to "
            f"{expected.digest.algorithm}:{encoded} instead",
            remedy="repair_store",
        )


def check_size(expected: Descriptor, size: int) -> None:
    """Raise VerificationError unless ``expected`` has ``size`` bytes."""
    if size != expected.size:
        raise VerificationError(
            f"{expected.digest} has {size} bytes instead of the {expected.size} "
            "that its descriptor promises"
        )


def verify(source: BinaryIO, expected: Descriptor) -> None:
    """Read ``source`` to its end. Raises VerificationError if it does not match ``expected``."""
    with VerifyingReader(source, expected) as reader:
        buffer = new_buffer()
        while reader.readinto(buffer):
            pass


def read_all(source: BinaryIO, expected: Descriptor, limit: int = MAX_MANIFEST_SIZE) -> bytes:
    """Read content of up to ``limit`` bytes into memory. Raises VerificationError."""
    if expected.size > limit:
        raise VerificationError(f"{expected.digest} claims {expected.size} bytes, over {limit}")
    with VerifyingReader(source, expected) as reader:
        data = bytearray()
        while chunk := reader.read(CHUNK_SIZE):
            data += chunk
    return bytes(data)
