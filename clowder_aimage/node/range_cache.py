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
_MAX_WRITTEN = 32768  # ranges in ingests that are remembered
_TICK = 0.2  # seconds between two checks for shutdown


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

    def __init__(self, part: BlobRange) -> None:
        super().__init__(part.length)
        self.part = part
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
            for part in [part for part in self._written if part.digest == digest]:
                del self._written[part]
        self._drop(lambda part: part.digest == digest)

    # -- reading

    def find(self, part: BlobRange) -> RangeFile | None:
        """Return a range if it is available locally, or begins to arrive."""
        found = self._in_blob(part) or self.kept_file(part) or self._in_ingest(part)
        return found or self._arriving_file(part)

    def has(self, part: BlobRange, offset: int) -> bool:
        """Return whether the byte at ``offset`` of a range is here, or comes from a registry."""
        arrival, found = self._arrivals.get(part), self.find(part)
        if found is not None:
            found.close()
            if found.arrival is None:
                return True
        return arrival is not None and (arrival.is_of_registry or arrival.front > offset)

    def arrival(self, part: BlobRange) -> RangeArrival | None:
        """Return the arrival of a range that is being fetched."""
        return self._arrivals.get(part)

    def kept_file(self, part: BlobRange) -> RangeFile | None:
        """Return the temporary file of a range that was fetched for a peer."""
        with self._lock:
            file = self._files.get(part)
            return file.copy() if file is not None else None

    def _arriving_file(self, part: BlobRange) -> RangeFile | None:
        with self._lock:
            arrival = self._arrivals.get(part)
            return arrival.file.copy(arrival) if arrival and arrival.file else None

    def _in_blob(self, part: BlobRange) -> RangeFile | None:
        found = _opened(self._layout.locate(part.content), part)
        if found is None or os.fstat(found.fileno()).st_size == part.size:
            return found
        found.close()
        return None

    def _in_ingest(self, part: BlobRange) -> RangeFile | None:
        with self._lock:
            if part not in self._written:
                return None
        found = self._ingest_file(part)
        if found is None:
            return self._in_blob(part)  # published in the meantime
        if os.fstat(found.fileno()).st_size >= part.end:
            return found
        found.close()
        return None

    def _ingest_file(self, part: BlobRange) -> RangeFile | None:
        with contextlib.suppress(StoreError):
            directory = Path(check_own(self._layout.root, "ingest"))
            return _opened(directory / part.digest.encoded, part)
        return None

    # -- arriving

    def board(self, part: BlobRange) -> tuple[RangeArrival, bool]:
        """Return the arrival of a range and whether it is new: then the caller must ``land`` it."""
        with self._lock:
            found = self._arrivals.get(part)
            if found is not None:
                return found, False
            made = self._arrivals[part] = RangeArrival(part)
            return made, True

    def write_to_ingest(self, arrival: RangeArrival) -> None:
        """Let peers read a range in the ingest of the pull that writes it."""
        arrival.file = self._ingest_file(arrival.part)

    def write_to_file(self, arrival: RangeArrival) -> int:
        """Let peers read a range in a new temporary file; return its descriptor.

        Raises StoreError, OSError.
        """
        if self._layout.free() < self._limits.spared + arrival.part.length:
            raise StoreError("not enough disk space for ranges of neighbours")
        directory = make_directory(self._layout.root, PRIVATE, "range")
        with tempfile.TemporaryFile(dir=directory) as file:
            arrival.file = RangeFile(os.dup(file.fileno()), 0)
        return arrival.file.fileno()

    def land(self, arrival: RangeArrival, error: AImageError | None = None) -> None:
        """End an arrival: the range is available, or failed."""
        with self._lock:
            if self._arrivals.get(arrival.part) is arrival:
                del self._arrivals[arrival.part]
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

    def wrote(self, part: BlobRange) -> None:
        """Record that a pull has written a range to its ingest."""
        with self._lock:
            self._written[part] = None
            self._written.move_to_end(part)
            while len(self._written) > _MAX_WRITTEN:
                self._written.popitem(last=False)
        self._drop(lambda each: each == part)

    def keep(self, arrival: RangeArrival) -> None:
        """Keep the temporary file of a complete range; remove the oldest ones beyond the limits."""
        part = arrival.part
        with self._lock:
            file, arrival.file = arrival.file, None
            gone = [self._files.pop(part, None)]
            if file is not None:
                self._files[part] = file
            size = sum(each.length for each in self._files)
            while size > self._limits.kept or len(self._files) > MAX_FILES:
                removed, old = self._files.popitem(last=False)
                gone.append(old)
                size -= removed.length
        for each in filter(None, gone):
            each.close()
        if self._is_closed:
            self.clear()

    def _drop(self, is_gone: Callable[[BlobRange], bool]) -> None:
        with self._lock:
            gone = [self._files.pop(part) for part in list(self._files) if is_gone(part)]
        for each in gone:
            each.close()


def _opened(path: str | Path, part: BlobRange) -> RangeFile | None:
    try:
        return RangeFile(open_regular(path), part.start)
    except OSError:
        return None
