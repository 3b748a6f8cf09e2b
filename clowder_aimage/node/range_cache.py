"""The ranges that this node has for its peers and those it fetches for them.

A range is in a blob of the layout, in a temporary file if it was fetched for a peer, or in the
ingest of a pull. Ranges are not verified here but by the node that pulls the blob.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.copy_option import Rate
from clowder_aimage.content.store import Reader
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import PRIVATE, check_own, make_directory, open_regular
from clowder_aimage.node.range_source import RANGE, BlobRange, OnBytes, RangeOwners, RangeUpstream
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry.peer import BlobSpan, PeerError

MAX_FILES = 512
AT_ONCE = 4  # ranges fetched for peers concurrently
_MAX_WRITTEN = 32768  # ranges in ingests that are remembered
_MAX_STALL = 40.0  # seconds without a byte of a range
_TICK = 0.2  # seconds between two checks for shutdown

_log = logging.getLogger("aimage.node")


class RangeFile(io.FileIO):
    """An open file, read from ``offset`` on. Its shared file position is not used."""

    def __init__(self, fd: int, offset: int) -> None:
        super().__init__(fd)
        self.offset = offset

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self.fileno(), [buffer], self.offset)
        self.offset += count
        return count


class RangeFlight:
    """A range being fetched, shared by all requests for it."""

    def __init__(self, part: BlobRange) -> None:
        self.part = part
        self.landed = threading.Event()
        self.error: AImageError | None = None
        self.is_of_registry = False
        self.moved = time.monotonic()  # when the last byte was received


class RangeCache:
    """The ranges of this node. Thread-safe. Nothing is kept when the disk is full.

    ``on_traffic("received", count)`` is called with the bytes received from peers for peers.
    """

    def __init__(
        self, layout: ImageLayout, upstream: RangeUpstream, owners: RangeOwners, on_traffic: OnBytes
    ) -> None:
        self._layout, self.upstream, self.owners = layout, upstream, owners
        self.on_traffic, self._limits = on_traffic, owners.peers.limits
        self._lock = threading.Lock()
        self._flights: dict[BlobRange, RangeFlight] = {}
        self._files: OrderedDict[BlobRange, BinaryIO] = OrderedDict()
        self._written: OrderedDict[BlobRange, None] = OrderedDict()
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._is_closed = False

    def close(self) -> None:
        """Remove all kept ranges; waiting calls raise an error."""
        self._is_closed = True
        self.clear()

    def clear(self) -> None:
        """Remove the ranges kept for peers."""
        self._drop(lambda _: True)

    def forget(self, digest: Digest) -> None:
        """Remove the ranges of a blob that failed verification."""
        with self._lock:
            for part in [part for part in self._written if part.digest == digest]:
                del self._written[part]
        self._drop(lambda part: part.digest == digest)

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob if it is known without a request, else None."""
        known = self.upstream.known_size(digest)
        with contextlib.suppress(OSError):
            if known is None:
                return Path(self._layout.place(Descriptor("", digest, 0))).stat().st_size
        return known

    def find(self, part: BlobRange) -> RangeFile | None:
        """Return a range if it is available locally."""
        return self._in_blob(part) or self.kept_file(part) or self._in_ingest(part)

    def wait(self, part: BlobRange, seconds: float) -> RangeFile | bool:
        """Return a range, waiting for one in flight; True if it still is, False if there is none.

        Raises AImageError if its fetch failed.
        """
        found, flight = self.find(part), self._flights.get(part)
        if found is not None or flight is None:
            return found or False
        return self._landed(flight, seconds)

    def _landed(self, flight: RangeFlight, seconds: float) -> RangeFile | bool:
        if not flight.landed.wait(seconds):
            if time.monotonic() - flight.moved > _MAX_STALL:
                raise NetworkError(f"no data received for {flight.part.digest}")
            return True
        if flight.error is not None:
            raise flight.error
        return self.find(flight.part) or False

    def has(self, part: BlobRange) -> bool:
        """Return whether a range is available or in flight from a registry."""
        found, flight = self.find(part), self._flights.get(part)
        if found is not None:
            found.close()
        return found is not None or (flight is not None and flight.is_of_registry)

    def fetch(
        self, span: BlobSpan, seconds: float, first: tuple[str, ...] = ()
    ) -> RangeFile | bool:
        """Return the range of a span for a peer, fetched only once; True if still in flight.

        The source is another peer, preferably one of ``first``, or the registry. Raises AImageError
        if the fetch fails.
        """
        size = self.upstream.size(span.reference, span.digest)
        part = BlobRange(span.digest, size, span.start // RANGE)
        if not self._places.acquire(blocking=False):
            return self.wait(part, seconds) or True
        flight, is_new = self.board(part)
        if is_new:
            work = (span.reference, flight, first)
            Thread(target=self._bring, args=work, name="aimage-range", daemon=True).start()
        else:
            self._places.release()
        return self._landed(flight, seconds)

    def _bring(self, reference: Reference, flight: RangeFlight, first: tuple[str, ...]) -> None:
        part, error = flight.part, None
        try:
            if (found := self.find(part)) is not None:  # it arrived after the caller's check
                found.close()
                return
            self._keep(part, self._fetched(reference, flight, first))
        except (AImageError, OSError) as failure:
            error = failure if isinstance(failure, AImageError) else StoreError(str(failure))
            _log.warning("cannot fetch a range for a neighbour", extra={"reason": error.message})
        finally:
            self.land(flight, error)
            self._places.release()

    def _fetched(
        self, reference: Reference, flight: RangeFlight, first: tuple[str, ...]
    ) -> BinaryIO:
        part = flight.part
        if self._layout.free() < self._limits.spared + part.length:
            raise StoreError("not enough disk space for ranges of neighbours")
        directory = make_directory(self._layout.root, PRIVATE, "range")
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - it is kept
        try:
            span = BlobSpan(reference, part.digest, part.start, part.end)
            stream = self.owners.open_stored(span, first)
            if stream is not None:
                with contextlib.suppress(PeerError), contextlib.closing(stream):
                    self._copy(stream, file, flight)
                    self.on_traffic("received", part.length)
                    return file
            flight.is_of_registry = True
            with self.upstream.open(reference, part) as reader:
                self._copy(reader, file, flight, self.upstream.rate(reference.registry or ""))
        except BaseException:
            file.close()
            raise
        return file

    def _copy(
        self, reader: Reader, file: BinaryIO, flight: RangeFlight, rate: Rate | None = None
    ) -> None:
        buffer, at, length = new_buffer(), 0, flight.part.length
        while at < length:
            view = buffer[: min(length - at, rate.burst if rate else length)]
            count = reader.readinto(view)
            if not count:
                raise NetworkError(f"the response for {flight.part.digest} is incomplete")
            if self._is_closed:
                raise NetworkError("this node is shutting down")
            os.pwrite(file.fileno(), view[:count], at)
            at, flight.moved = at + count, time.monotonic()
            if rate is not None:
                rate.passed(count)

    def _keep(self, part: BlobRange, file: BinaryIO) -> None:
        with self._lock:
            old = self._files.pop(part, None)
            self._files[part] = file
            size, gone = sum(each.length for each in self._files), [old] if old else []
            while size > self._limits.kept or len(self._files) > MAX_FILES:
                removed, old = self._files.popitem(last=False)
                gone.append(old)
                size -= removed.length
        for each in gone:
            each.close()
        if self._is_closed:
            self.clear()

    def board(self, part: BlobRange) -> tuple[RangeFlight, bool]:
        """Return the flight of a range and whether it is new: then the caller must ``land`` it."""
        with self._lock:
            found = self._flights.get(part)
            if found is not None:
                return found, False
            made = self._flights[part] = RangeFlight(part)
            return made, True

    def land(self, flight: RangeFlight, error: AImageError | None = None) -> None:
        """End a flight: the range is available, or failed."""
        with self._lock:
            if self._flights.get(flight.part) is flight:
                del self._flights[flight.part]
        if error is not None and not isinstance(error, NotFoundError):
            error = NetworkError(error.message)
        flight.error = error
        flight.landed.set()

    def is_coming(self, part: BlobRange) -> bool:
        """Return whether a range is being fetched."""
        return part in self._flights

    def join(self, flight: RangeFlight) -> None:
        """Wait until a flight has landed. Raises NetworkError on shutdown."""
        while not flight.landed.wait(_TICK):
            if self._is_closed:
                raise NetworkError("this node is shutting down", hint="try again")

    def wrote(self, part: BlobRange) -> None:
        """Record that a pull has written a range to its ingest."""
        with self._lock:
            self._written[part] = None
            self._written.move_to_end(part)
            while len(self._written) > _MAX_WRITTEN:
                self._written.popitem(last=False)
        self._drop(lambda each: each == part)

    def kept_file(self, part: BlobRange) -> RangeFile | None:
        """Return the temporary file of a range that was fetched for a peer."""
        with self._lock:
            file = self._files.get(part)
            return RangeFile(os.dup(file.fileno()), 0) if file is not None else None

    def _drop(self, is_gone: Callable[[BlobRange], bool]) -> None:
        with self._lock:
            gone = [self._files.pop(part) for part in list(self._files) if is_gone(part)]
        for each in gone:
            each.close()

    def _in_blob(self, part: BlobRange) -> RangeFile | None:
        found = _opened(self._layout.place(part.content), part)
        if found is None or os.fstat(found.fileno()).st_size == part.size:
            return found
        found.close()
        return None

    def _in_ingest(self, part: BlobRange) -> RangeFile | None:
        with self._lock:
            if part not in self._written:
                return None
        with contextlib.suppress(StoreError):
            directory = Path(check_own(self._layout.root, "ingest"))
            found = _opened(directory / part.digest.encoded, part)
            if found is None:
                return self._in_blob(part)  # published in the meantime
            if os.fstat(found.fileno()).st_size >= part.end:
                return found
            found.close()
        return None


def _opened(path: str | Path, part: BlobRange) -> RangeFile | None:
    try:
        return RangeFile(open_regular(path), part.start)
    except OSError:
        return None
