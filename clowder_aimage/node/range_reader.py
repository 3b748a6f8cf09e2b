"""Ranges of blobs from the first source that sends them: a node that owns or has one, a registry.

A range is fetched once, for a pull of this node and for its peers. Meanwhile peers read the bytes
that have arrived.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.store import Reader, Source, WrittenStream
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.errors import AImageError, NetworkError, StoreError
from clowder_aimage.node.range_cache import RangeArrival, RangeCache
from clowder_aimage.node.range_source import BlobRange, OnBytes, RangeOwners, RangeUpstream
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import Repository
from clowder_aimage.registry.peer import PeerError, PeerRange

# Ranges fetched for peers concurrently.
AT_ONCE = 4
# Failed peers for a range before the registry is used.
_MAX_FAILURES = 3

_log = logging.getLogger("aimage.node")


@dataclass(slots=True)
class _Part:
    """The bytes from ``start`` to ``end`` of a blob, which are in one range of it."""

    blob_range: BlobRange
    start: int
    end: int
    arrival: RangeArrival | None

    def advance(self, end: int) -> None:
        """Record that the bytes up to ``end`` of the blob have been written."""
        if self.arrival is not None and self.arrival.file is not None:
            self.arrival.advance(end - self.blob_range.start)


class RangeReader(RawReader, WrittenStream):
    """The requested bytes of a blob, one range after another.

    A range is available to peers as far as its bytes are written. ``count`` is
    called with the source of bytes and their number: "neighbour", "registry", or "cache" for kept
    ranges. With an ``arrival``, ``peer_range`` is its range. It is fetched for a peer, if possible
    from one of ``preferred``.
    """

    def __init__(
        self,
        exchange: RangeExchange,
        source: Source,
        peer_range: PeerRange,
        count: OnBytes,
        arrival: RangeArrival | None = None,
        preferred: tuple[str, ...] = (),
    ) -> None:
        self._exchange, self._source, self._peer_range, self._count = (
            exchange,
            source,
            peer_range,
            count,
        )
        self._at = self._written = peer_range.start
        self._peer_arrival, self._preferred = arrival, preferred
        self._sources: Iterator[tuple[Reader, str]] = iter(())
        self._stream: Reader | None = None
        self._name = ""
        self._received = 0
        # What is being read, and what is not completely written, in order
        self._part: _Part | None = None
        self._parts: deque[_Part] = deque()

    def record_written(self, count: int) -> None:
        """Let peers read further bytes: those of this stream that are in the file by now."""
        self._written += count
        while self._parts and self._parts[0].end <= self._written:
            self._land(self._parts.popleft())
        if self._parts:
            self._parts[0].advance(self._written)

    def _fill(self, view: memoryview) -> int:
        if self._part is not None and self._at >= self._part.end:
            self._close_stream()
            self._part = None
        view = view[: self._peer_range.end - self._at]
        if not view:
            return 0
        if self._part is None:
            self._part = self._begin_part()
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
        self._at, self._received = self._at + count, self._received + count
        return count

    def _begin_part(self) -> _Part:
        blob_range = BlobRange.at(self._peer_range.content, self._at)
        end = min(blob_range.end, self._peer_range.end)
        part = _Part(blob_range, self._at, end, self._peer_arrival)
        self._parts.append(part)
        return part

    def _find_sources(self, part: _Part) -> Iterator[tuple[Reader, str]]:
        """Yield the sources of a range; the next one has the rest of one that failed."""
        cache, owners, blob_range = self._exchange.cache, self._exchange.owners, part.blob_range
        while part.arrival is None:
            if (cached := cache.open_cached(blob_range)) is not None:
                cached.offset += self._at - blob_range.start
                yield cached, "cache"
            arrival, is_new = cache.begin_arrival(blob_range)
            if is_new:
                part.arrival = arrival
            else:
                cache.join(arrival)
        if self._peer_arrival is None:
            # Peers read a range from its start on.
            if part.start == blob_range.start:
                cache.write_to_ingest(part.arrival)
            for _ in range(_MAX_FAILURES):
                if (stream := owners.open(self._build_remainder(part))) is None:
                    break
                yield stream, "neighbour"
        if (stream := owners.open_stored(self._build_remainder(part), self._preferred)) is not None:
            yield stream, "neighbour"
        part.arrival.is_of_registry = True
        missing = self._build_remainder(part)
        reader = self._source.open(missing.content, missing.start, missing.end - missing.start)
        if not self._source.supports_ranges(missing.content) and not blob_range.is_whole:
            self._exchange.upstream.record_ignored_ranges(missing.reference.registry or "")
        yield reader, "registry"

    def _build_remainder(self, part: _Part) -> PeerRange:
        return replace(self._peer_range, start=self._at, end=part.end)

    def _land(self, part: _Part) -> None:
        """End a part: its range is available if all bytes of it were written."""
        if self._peer_arrival is not None:
            return
        is_complete = self._written >= part.blob_range.end
        if is_complete and part.start == part.blob_range.start:
            self._exchange.cache.record_written(part.blob_range)
        if part.arrival is not None:
            error = None if is_complete else NetworkError("a pull has ended early")
            self._exchange.cache.land(part.arrival, error)

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._received:
            self._count(self._name, self._received)
        self._stream, self._received = None, 0

    def close(self) -> None:
        if not self.closed:
            self._close_stream()
            while self._parts:
                self._land(self._parts.popleft())
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
        self._fetch_slots = threading.BoundedSemaphore(AT_ONCE)

    def fetch(
        self, reference: Reference, blob_range: BlobRange, preferred: tuple[str, ...] = ()
    ) -> RangeArrival | None:
        """Begin to fetch a range for a peer; return its arrival, None if too many are fetched.

        The source is another peer, preferably one of ``preferred``, or the registry.
        """
        if not self._fetch_slots.acquire(blocking=False):
            return self.cache.find_arrival(blob_range)
        arrival, is_new = self.cache.begin_arrival(blob_range)
        if is_new:
            work = (reference, arrival, preferred)
            Thread(target=self._fetch, args=work, name="aimage-range", daemon=True).start()
        else:
            self._fetch_slots.release()
        return arrival

    def _fetch(
        self, reference: Reference, arrival: RangeArrival, preferred: tuple[str, ...]
    ) -> None:
        error, blob_range = None, arrival.blob_range
        try:
            # The range arrived before this arrival was registered.
            if (file := self.cache.find(blob_range)) is not None:
                file.close()
                return
            peer_range = PeerRange(reference, blob_range.content, blob_range.start, blob_range.end)
            with self.upstream.connect(reference) as repository:
                count = partial(self._count, repository, blob_range.content)
                reader = RangeReader(self, repository, peer_range, count, arrival, preferred)
                self._write(reader, arrival, reference.registry or "")
            self.cache.keep(arrival)
        except (AImageError, OSError) as failure:
            error = failure if isinstance(failure, AImageError) else StoreError(str(failure))
            _log.warning("cannot fetch a range for a neighbour", extra={"reason": error.message})
        finally:
            self.cache.land(arrival, error)
            self._fetch_slots.release()

    def _write(self, reader: RangeReader, arrival: RangeArrival, registry: str) -> None:
        fd, rate = self.cache.write_to_file(arrival), self.upstream.find_rate(registry)
        buffer, offset = new_buffer(), 0
        with reader:
            while offset < arrival.blob_range.length:
                count = reader.readinto(buffer[: rate.burst] if rate else buffer)
                if not count:
                    raise NetworkError(
                        f"the response for {arrival.blob_range.digest} is incomplete"
                    )
                self.cache.check_open()
                os.pwrite(fd, buffer[:count], offset)
                reader.record_written(count)
                offset += count
                if rate is not None and arrival.is_of_registry:
                    rate.consume(count)

    def _count(self, repository: Repository, content: Descriptor, name: str, count: int) -> None:
        if name == "neighbour":
            self.on_traffic("received", count)
        else:
            self.upstream.count(repository, content, count)
