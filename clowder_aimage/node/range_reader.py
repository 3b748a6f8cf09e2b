"""Ranges of blobs from the first source that sends them: a node that owns or has one, a registry.

A range is fetched once, whether this node pulls its blob or a peer needs it. Meanwhile peers read
what has arrived.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from threading import Thread

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.store import Reader, Source
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.errors import AImageError, NetworkError, StoreError
from clowder_aimage.node.range_cache import RangeArrival, RangeCache
from clowder_aimage.node.range_source import BlobRange, OnBytes, RangeOwners, RangeUpstream
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import Repository
from clowder_aimage.registry.peer import BlobSpan, PeerError

AT_ONCE = 4  # ranges fetched for peers concurrently
_MAX_FAILURES = 3  # failed peers for a range before the registry is used

_log = logging.getLogger("aimage.node")


class RangeReader(RawReader):
    """The bytes of a span of a blob, one range after another.

    The bytes of a read have been written when the next one begins. ``count`` is called with the
    source of bytes and their number: "neighbour", "registry", or "cache" for kept ranges. With an
    ``arrival``, the span is its range, which is fetched for a peer, if possible from one of
    ``first``.
    """

    def __init__(
        self,
        exchange: RangeExchange,
        source: Source,
        span: BlobSpan,
        count: OnBytes,
        arrival: RangeArrival | None = None,
        first: tuple[str, ...] = (),
    ) -> None:
        self._exchange, self._source, self._span, self._count = exchange, source, span, count
        self._at = self._began = span.start
        self._arrival, self._is_for_peer, self._first = arrival, arrival is not None, first
        self._part: BlobRange | None = None
        self._sources: Iterator[tuple[Reader, str]] = iter(())
        self._stream: Reader | None = None
        self._name = ""
        self._came = 0

    def _fill(self, view: memoryview) -> int:
        if self._part is not None:
            self._advance(self._part)
        view = view[: self._span.end - self._at]
        if not view:
            return 0
        if self._part is None:
            self._part, self._began = BlobRange.at(self._span.content, self._at), self._at
            self._sources = self._find_sources(self._part)
        view = view[: self._part.end - self._at]
        count = 0
        while not count:
            try:
                if self._stream is None:
                    self._stream, self._name = next(self._sources)
                count = self._stream.readinto(view)
                if count or self._name == "registry":
                    break
            except PeerError:
                pass
            self._close_stream()
        self._at, self._came = self._at + count, self._came + count
        return count

    def _advance(self, part: BlobRange) -> None:
        """Record that all bytes up to here have been written."""
        if self._at >= min(part.end, self._span.end):
            self._finish()
        elif self._arrival is not None and self._arrival.file is not None:
            self._arrival.advance(self._at - part.start)

    def _find_sources(self, part: BlobRange) -> Iterator[tuple[Reader, str]]:
        """Yield the sources of a range; the next one has the rest of one that failed."""
        cache, owners = self._exchange.cache, self._exchange.owners
        while self._arrival is None:
            if (kept := cache.kept_file(part)) is not None:
                kept.offset += self._at - part.start
                yield kept, "cache"
            arrival, is_new = cache.board(part)
            if is_new:
                self._arrival = arrival
            else:
                cache.join(arrival)
        if not self._is_for_peer:
            if self._began == part.start:
                cache.write_to_ingest(self._arrival)
            for _ in range(_MAX_FAILURES):
                if (stream := owners.open(self._rest(part))) is None:
                    break
                yield stream, "neighbour"
        if (stream := owners.open_stored(self._rest(part), self._first)) is not None:
            yield stream, "neighbour"
        self._arrival.is_of_registry = True
        rest = self._rest(part)
        reader = self._source.open(rest.content, rest.start, rest.end - rest.start)
        if not self._source.supports_ranges(rest.content) and not part.is_whole:
            self._exchange.upstream.ignores_ranges(rest.reference.registry or "")
        yield reader, "registry"

    def _rest(self, part: BlobRange) -> BlobSpan:
        return replace(self._span, start=self._at, end=min(part.end, self._span.end))

    def _finish(self) -> None:
        """Finish a range whose bytes have all been written."""
        self._close_stream()
        part, arrival, cache = self._part, self._arrival, self._exchange.cache
        if self._is_for_peer:
            return
        self._part = self._arrival = None
        if part is not None and self._began == part.start and self._at >= part.end:
            cache.wrote(part)
        if arrival is not None:
            is_read = self._at >= arrival.part.end
            cache.land(arrival, None if is_read else NetworkError("a pull has ended early"))

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._came:
            self._count(self._name, self._came)
        self._stream, self._came = None, 0

    def close(self) -> None:
        if not self.closed:
            self._finish()
        super().close()


class RangeExchange:
    """The ranges of this node in ``cache``, of other nodes, and of registries. Thread-safe.

    ``on_traffic("received", count)`` is called with the bytes received from other nodes.
    """

    def __init__(
        self, cache: RangeCache, upstream: RangeUpstream, owners: RangeOwners, on_traffic: OnBytes
    ) -> None:
        self.cache, self.upstream, self.owners = cache, upstream, owners
        self.on_traffic = on_traffic
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def fetch(
        self, reference: Reference, part: BlobRange, first: tuple[str, ...] = ()
    ) -> RangeArrival | None:
        """Begin to fetch a range for a peer; return its arrival, None if too many are fetched.

        The source is another peer, preferably one of ``first``, or the registry.
        """
        if not self._places.acquire(blocking=False):
            return self.cache.arrival(part)
        arrival, is_new = self.cache.board(part)
        if is_new:
            work = (reference, arrival, first)
            Thread(target=self._fetch, args=work, name="aimage-range", daemon=True).start()
        else:
            self._places.release()
        return arrival

    def _fetch(self, reference: Reference, arrival: RangeArrival, first: tuple[str, ...]) -> None:
        error, part = None, arrival.part
        try:
            if (found := self.cache.find(part)) is not None:  # it arrived before the board
                found.close()
                return
            span = BlobSpan(reference, part.content, part.start, part.end)
            with self.upstream.connect(reference) as repository:
                count = partial(self._count, repository, part.content)
                reader = RangeReader(self, repository, span, count, arrival, first)
                self._write(reader, arrival, reference.registry or "")
            self.cache.keep(arrival)
        except (AImageError, OSError) as failure:
            error = failure if isinstance(failure, AImageError) else StoreError(str(failure))
            _log.warning("cannot fetch a range for a neighbour", extra={"reason": error.message})
        finally:
            self.cache.land(arrival, error)
            self._places.release()

    def _write(self, reader: Reader, arrival: RangeArrival, registry: str) -> None:
        fd, rate = self.cache.write_to_file(arrival), self.upstream.rate(registry)
        buffer, at = new_buffer(), 0
        with reader:
            while at < arrival.part.length:
                count = reader.readinto(buffer[: rate.burst] if rate else buffer)
                if not count:
                    raise NetworkError(f"the response for {arrival.part.digest} is incomplete")
                self.cache.check_open()
                os.pwrite(fd, buffer[:count], at)
                at += count
                if rate is not None and arrival.is_of_registry:
                    rate.consume(count)

    def _count(self, repository: Repository, content: Descriptor, name: str, count: int) -> None:
        if name == "neighbour":
            self.on_traffic("received", count)
        else:
            self.upstream.count(repository, content, count)
