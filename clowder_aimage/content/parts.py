"""Blobs that are put together from ranges of other blobs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from clowder_aimage.content.store import Reader, Source, WrappedSource
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.dialect.mountable import Extent, Parts
from clowder_aimage.errors import RegistryError
from clowder_aimage.oci import Descriptor, Digest

# Opens ``length`` bytes at ``offset``; or has these bytes.
OpenPart = Callable[[int, int], Reader]


class PartsReader(RawReader):
    """The bytes of ``parts`` in order: each is a length, and a function that opens a range of it.

    A part is opened when its first byte is read, and one is open at a time.
    """

    def __init__(
        self, parts: Sequence[tuple[int, OpenPart]], offset: int = 0, length: int | None = None
    ) -> None:
        self._ranges = _clip(parts, offset, length)
        self._current: Reader | None = None
        self._left = 0

    def _fill(self, view: memoryview) -> int:
        while view:
            if self._current is None:
                following = next(self._ranges, None)
                if following is None:
                    return 0
                self._left, opener = following
                self._current = opener()
            if count := self._current.readinto(view[: self._left]):
                self._left -= count
                return count
            # A part that ends too early is found by the digest of the whole.
            self._close_current()
        return 0

    def close(self) -> None:
        self._close_current()
        super().close()

    def _close_current(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


def _clip(
    parts: Sequence[tuple[int, OpenPart]], offset: int, length: int | None
) -> Iterator[tuple[int, Callable[[], Reader]]]:
    """Yield the sizes and openers of the ranges of ``parts`` in ``length`` bytes at ``offset``."""
    end = sum(size for size, _ in parts)
    end = end if length is None else min(end, offset + length)
    position = 0
    for size, opener in parts:
        start, stop = max(offset, position), min(end, position + size)
        if start < stop:
            yield stop - start, _bind(opener, start - position, stop - start)
        position += size


def _bind(opener: OpenPart, start: int, size: int) -> Callable[[], Reader]:
    return lambda: opener(start, size)


def build_bytes_part(data: bytes) -> tuple[int, OpenPart]:
    """Return a part with these bytes."""
    return len(data), lambda offset, length: io.BytesIO(data[offset : offset + length])


class PartsSource(WrappedSource):
    """A source that also has ``blobs``, whose parts are ranges of blobs of ``source``.

    Reads raise RegistryError if that is a registry that sends no ranges.
    """

    def __init__(self, source: Source, blobs: Mapping[Digest, Parts]) -> None:
        super().__init__(source)
        self._blobs = blobs

    def exists(self, content: Descriptor, /) -> bool:
        parts = self._blobs.get(content.digest)
        if parts is None:
            return super().exists(content)
        return all(self._source.exists(part.layer) for part in parts if isinstance(part, Extent))

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        parts = self._blobs.get(content.digest)
        if parts is None:
            return super().open(content, offset, length)
        return PartsReader([self._build_part(part) for part in parts], offset, length)

    def supports_ranges(self, content: Descriptor, /) -> bool:
        parts = self._blobs.get(content.digest, ())
        layers = [part.layer for part in parts if isinstance(part, Extent)]
        return all(map(self._source.supports_ranges, layers or [content]))

    def invalidate(self, content: Descriptor, /) -> bool:
        parts = self._blobs.get(content.digest, ())
        layers = [part.layer for part in parts if isinstance(part, Extent)]
        # Each is excluded, not only the first.
        excluded = [self._source.invalidate(layer) for layer in layers or [content]]
        return any(excluded)

    def _build_part(self, part: Extent | bytes) -> tuple[int, OpenPart]:
        if isinstance(part, bytes):
            return build_bytes_part(part)
        return part.size, partial(self._open_extent, part)

    def _open_extent(self, part: Extent, offset: int, length: int) -> Reader:
        reader = self._source.open(part.layer, part.offset + offset, length)
        if not self._source.refuses_ranges(part.layer):
            return reader
        # Each part would be read from the beginning of its layer.
        reader.close()
        raise RegistryError(
            f"the registry ignores the header Range, and sends all of {part.layer.digest}: the "
            "blobs of an AImage are ranges of the layers of its mountable image",
            hint="copy the image to another registry, or push the AImage itself",
        )
