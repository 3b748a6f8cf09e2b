"""A registry whose bytes are counted."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO, cast

from clowder_aimage.content.copy_option import Rate
from clowder_aimage.content.store import Source, WrappedSource
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.oci import Descriptor, mediatype
from clowder_aimage.registry import Repository


class CountedSource(WrappedSource):
    """A registry whose blobs are counted, and limited to ``rate``.

    ``count`` is called with "registry" or "mirror" and the bytes of each reader.
    """

    def __init__(
        self, source: Source, count: Callable[[str, int], None], rate: Rate | None = None
    ) -> None:
        super().__init__(source)
        self._report, self._rate = count, rate

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        reader = self._source.open(content, offset, length)
        if content.media_type in mediatype.DOCUMENTS:
            return reader  # of which there may be many, from memory

        def ended(count: int) -> None:
            source = self._source
            is_mirrored = isinstance(source, Repository) and source.was_mirrored(content)
            self._report("mirror" if is_mirrored else "registry", count)

        return cast(BinaryIO, _Reader(reader, ended, self._rate))


class _Reader(io.RawIOBase):
    def __init__(self, source: BinaryIO, ended: Callable[[int], None], rate: Rate | None) -> None:
        self._source, self._ended, self._rate = source, ended, rate
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)
        count = readinto(self._source, view[: self._rate.burst] if self._rate else view)
        self._count += count
        if self._rate is not None:
            self._rate.passed(count)
        return count

    def close(self) -> None:
        if not self.closed:
            self._source.close()
            self._ended(self._count)
        super().close()
