"""The ranges that this node has for its peers, also while they arrive.

A range is in a blob of the layout, in a temporary file if it was fetched for a peer, or in the
ingest of a pull. Ranges are not verified here but by the node that pulls the blob.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clowder_aimage.distribution.arrival import Arrival
from clowder_aimage.errors import AImageError, NetworkError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import PRIVATE, check_own, make_directory, open_regular
from clowder_aimage.node.peers import SharingLimits
from clowder_aimage.node.range_source import BlobRange
from clowder_aimage.oci import Digest

MAX_FILES = 512
# Ranges in ingests that are remembered.
_MAX_WRITTEN = 32768
# Seconds between two checks for shutdown.
_TICK = 0.2


class RangeFile(io.FileIO):
    """An open file, read from ``offset`` on. Its shared file position is not used.

    ``arrival`` is that of a range that is not complete yet.
    """

    def __init__(self, fd: int, offset: int, arrival: Arrival | None = None) -> None:
        super().__init__(fd)
        self.offset, self.arrival = offset, arrival

    def copy(self, arrival: Arrival | None = None) -> RangeFile:
        """Return another descriptor of the file."""
        return RangeFile(os.dup(self.fileno()), self.offset, arrival)

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self.fileno(), [buffer], self.offset)
        self.offset += count
        return count


class RangeArrival(Arrival):
    """A range that arrives once, in ``file``, for this node and its peers."""

    def __init__(self, blob_range: BlobRange) -> None:
        super().__init__(blob_range.length)
        self.blob_range = blob_range
        self.is_of_registry = False
        self.file: RangeFile | None = None


class RangeCache:
    """The ranges of this node. Thread-safe. Nothing is kept when the disk is full."""

    def __init__(self, layout: ImageLayout, limits: SharingLimits) -> None:
        self._layout, self._limits = layout, limits
        self._lock = threading.Lock()
        self._arrivals: dict[BlobRange, RangeArrival] = {}
        self._files: OrderedDict[BlobRange, RangeFile] = OrderedDict()
        self._written: OrderedDict[BlobRange, None] = OrderedDict()
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
            for blob_range in [
                blob_range for blob_range in self._written if blob_range.digest == digest
            ]:
                del self._written[blob_range]
        self._drop(lambda blob_range: blob_range.digest == digest)

    # -- reading

    def find(self, blob_range: BlobRange) -> RangeFile | None:
        """Return a range if it is available locally, or begins to arrive."""
        file = (
            self._open_in_blob(blob_range)
            or self.open_cached(blob_range)
            or self._open_in_ingest(blob_range)
        )
        return file or self._open_arriving(blob_range)

    def has(self, blob_range: BlobRange, offset: int) -> bool:
        """Return True if the byte at ``offset`` of a range is local, or comes from a registry."""
        arrival, file = self._arrivals.get(blob_range), self.find(blob_range)
        if file is not None:
            file.close()
            if file.arrival is None:
                return True
        return arrival is not None and (arrival.is_of_registry or arrival.front > offset)

    def find_arrival(self, blob_range: BlobRange) -> RangeArrival | None:
        """Return the arrival of a range that is being fetched."""
        return self._arrivals.get(blob_range)

    def open_cached(self, blob_range: BlobRange) -> RangeFile | None:
        """Return the temporary file of a range that was fetched for a peer."""
        with self._lock:
            file = self._files.get(blob_range)
            return file.copy() if file is not None else None

    def _open_arriving(self, blob_range: BlobRange) -> RangeFile | None:
        with self._lock:
            arrival = self._arrivals.get(blob_range)
            return arrival.file.copy(arrival) if arrival and arrival.file else None

    def _open_in_blob(self, blob_range: BlobRange) -> RangeFile | None:
        file = _open_at(self._layout.locate(blob_range.content), blob_range)
        if file is None or os.fstat(file.fileno()).st_size == blob_range.size:
            return file
        file.close()
        return None

    def _open_in_ingest(self, blob_range: BlobRange) -> RangeFile | None:
        with self._lock:
            if blob_range not in self._written:
                return None
        file = self._ingest_file(blob_range)
        if file is None:
            # Published in the meantime.
            return self._open_in_blob(blob_range)
        if os.fstat(file.fileno()).st_size >= blob_range.end:
            return file
        file.close()
        return None

    def _ingest_file(self, blob_range: BlobRange) -> RangeFile | None:
        with contextlib.suppress(StoreError):
            directory = Path(check_own(self._layout.root, "ingest"))
            return _open_at(directory / blob_range.digest.encoded, blob_range)
        return None

    # -- arriving

    def begin_arrival(self, blob_range: BlobRange) -> tuple[RangeArrival, bool]:
        """Return the arrival of a range and True if it is new: the caller must then ``land`` it."""
        with self._lock:
            arrival = self._arrivals.get(blob_range)
            if arrival is not None:
                return arrival, False
            arrival = self._arrivals[blob_range] = RangeArrival(blob_range)
            return arrival, True

    def write_to_ingest(self, arrival: RangeArrival) -> None:
        """Let peers read a range in the ingest of the pull that writes it."""
        arrival.file = self._ingest_file(arrival.blob_range)

    def write_to_file(self, arrival: RangeArrival) -> int:
        """Let peers read a range in a new temporary file; return its descriptor.

        Raises StoreError, OSError.
        """
        if self._layout.measure_free() < self._limits.spared + arrival.blob_range.length:
            raise StoreError("not enough disk space for ranges of neighbours")
        directory = make_directory(self._layout.root, PRIVATE, "range")
        with tempfile.TemporaryFile(dir=directory) as file:
            arrival.file = RangeFile(os.dup(file.fileno()), 0)
        return arrival.file.fileno()

    def land(self, arrival: RangeArrival, error: AImageError | None = None) -> None:
        """End an arrival: the range is available, or failed."""
        with self._lock:
            if self._arrivals.get(arrival.blob_range) is arrival:
                del self._arrivals[arrival.blob_range]
            file, arrival.file = arrival.file, None
        if file is not None:
            file.close()
        arrival.end(error)

    def join(self, arrival: RangeArrival) -> None:
        """Wait until an arrival has ended. Raises NetworkError on shutdown."""
        while not arrival.join(_TICK):
            self.check_open()

    def check_open(self) -> None:
        """Raise NetworkError on shutdown."""
        if self._is_closed:
            raise NetworkError("this node is shutting down", hint="try again")

    # -- keeping

    def record_written(self, blob_range: BlobRange) -> None:
        """Record that a pull has written a range to its ingest."""
        with self._lock:
            self._written[blob_range] = None
            self._written.move_to_end(blob_range)
            while len(self._written) > _MAX_WRITTEN:
                self._written.popitem(last=False)
        self._drop(lambda cached: cached == blob_range)

    def keep(self, arrival: RangeArrival) -> None:
        """Keep the temporary file of a complete range; remove the oldest ones beyond the limits."""
        blob_range = arrival.blob_range
        with self._lock:
            file, arrival.file = arrival.file, None
            evicted = [self._files.pop(blob_range, None)]
            if file is not None:
                self._files[blob_range] = file
            size = sum(cached.length for cached in self._files)
            while size > self._limits.kept or len(self._files) > MAX_FILES:
                removed, oldest = self._files.popitem(last=False)
                evicted.append(oldest)
                size -= removed.length
        for cached in filter(None, evicted):
            cached.close()
        if self._is_closed:
            self.clear()

    def _drop(self, is_gone: Callable[[BlobRange], bool]) -> None:
        with self._lock:
            files = [
                self._files.pop(blob_range)
                for blob_range in list(self._files)
                if is_gone(blob_range)
            ]
        for file in files:
            file.close()


def _open_at(path: str | Path, blob_range: BlobRange) -> RangeFile | None:
    try:
        return RangeFile(open_regular(path), blob_range.start)
    except OSError:
        return None
