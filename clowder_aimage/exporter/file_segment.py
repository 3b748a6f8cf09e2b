"""Content of the files that an export writes, as parts of blobs and bytes between them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from clowder_aimage.content import VerifyingReader
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.errors import FormatError
from clowder_aimage.exporter.layer_store import LayerStore
from clowder_aimage.exporter.plan import ExportPlan, FileChunk
from clowder_aimage.oci import Descriptor

Update = Callable[[memoryview | bytes], object]


@dataclass(frozen=True, slots=True)
class Segment:
    """``size`` bytes of a file: those of ``blob`` from ``start``, or without a blob ``data``."""

    size: int
    data: bytes = b""
    blob: Descriptor | None = None
    start: int = 0

    @classmethod
    def of(cls, data: bytes) -> Segment:
        """Return a segment with these bytes."""
        return cls(len(data), data)


def list_segments(plan: ExportPlan) -> dict[str, list[Segment]]:
    """Return the segments of the generated files of a plan, in order, by the names of the files."""
    chunks: dict[str, list[tuple[FileChunk, Descriptor]]] = {name: [] for name in plan.generated}
    for blob, members in plan.chunks.items():
        for chunk in members:
            chunks[chunk.name].append((chunk, blob))
    return {
        name: _order(*plan.generated[name], sorted(parts, key=lambda part: part[0].offset))
        for name, parts in chunks.items()
    }


def _order(start: bytes, size: int, parts: Iterable[tuple[FileChunk, Descriptor]]) -> list[Segment]:
    segments, position = [Segment.of(start)], len(start)
    for chunk, blob in parts:
        segments.append(Segment.of(bytes(chunk.offset - position)))
        segments.append(Segment(chunk.nbytes, blob=blob, start=chunk.start))
        position = chunk.offset + chunk.nbytes
    segments.append(Segment.of(bytes(size - position)))
    return [segment for segment in segments if segment.size]


def read_verified(blobs: LayerStore, segments: Iterable[Segment], update: Update) -> None:
    """Call ``update`` with the bytes of ``segments`` in order; verify every blob of them.

    A blob is read once if its parts are in ascending order.
    Raises NotFoundError, VerificationError, FormatError.
    """
    segments = list(segments)
    left = Counter(segment.blob for segment in segments if segment.blob)
    with contextlib.ExitStack() as stack:
        readers = dict[Descriptor, _PartReader]()
        for segment in segments:
            blob = segment.blob
            if blob is None:
                update(segment.data)
                continue
            if blob not in readers or readers[blob].position > segment.start:
                readers[blob] = stack.enter_context(contextlib.closing(_PartReader(blobs, blob)))
            readers[blob].read(segment, update)
            left[blob] -= 1
            # Groups of experts are interleaved with others.
            if not left[blob]:
                readers.pop(blob).finish()


class _PartReader:
    """The bytes of a blob in ascending parts; ``finish`` verifies the whole of it."""

    def __init__(self, blobs: LayerStore, blob: Descriptor) -> None:
        self._reader = VerifyingReader(blobs.open(blob), blob)
        self._buffer = new_buffer()
        self.position = 0

    def read(self, segment: Segment, update: Update) -> None:
        """Call ``update`` with the bytes of a segment."""
        self._advance(segment.start, None)
        self._advance(segment.start + segment.size, update)

    def finish(self) -> None:
        """Read the rest. Raises VerificationError."""
        while self._reader.readinto(self._buffer):
            pass
        self.close()

    def close(self) -> None:
        """Close the blob."""
        self._reader.close()

    def _advance(self, end: int, update: Update | None) -> None:
        while self.position < end:
            count = self._reader.readinto(self._buffer[: end - self.position])
            if not count:
                raise FormatError("a blob ends before its tensor")
            if update is not None:
                update(self._buffer[:count])
            self.position += count
