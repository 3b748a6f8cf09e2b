"""Fetch a blob from the upstream into the layout, while clients read it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content.store import IngestBusyError, Source
from clowder_aimage.distribution.arrival import Arrival
from clowder_aimage.errors import AImageError, NoSpaceError, VerificationError
from clowder_aimage.layout import FileIngest, ImageLayout
from clowder_aimage.oci import Descriptor, Digest

# Bytes read at a time. Small: clients of a slow upstream receive bytes at once
READ_SIZE = 64 * 1024
# Bytes between two checkpoints, up to which bytes survive a crash
CHECKPOINT_SIZE = 256 * 1024 * 1024

_log = logging.getLogger(__name__)


class _GrowingIngest(FileIngest):
    """An ingest that is read while it is written."""

    def open_reader(self) -> BinaryIO:
        return Path(self._path).open("rb", buffering=0)


class CachedFetch(Arrival):
    """A fetch that any number of clients read at their own speed.

    The last byte may be sent only after the whole blob is verified and stored.
    """

    def __init__(self, layout: ImageLayout, content: Descriptor) -> None:
        super().__init__(content.size)
        self.content = content
        self.stopped = False
        self._layout = layout
        self._ingest: _GrowingIngest | None = None

    def open(self) -> BinaryIO:
        """Open the growing file. It stays readable when it is renamed or removed."""
        if self._ingest is not None:
            with contextlib.suppress(FileNotFoundError):
                return self._ingest.open_reader()
        try:
            return self._layout.find_path(self.content).open("rb", buffering=0)
        except AImageError as error:
            raise ConnectionResetError(str(error)) from None

    def run(self, source: Source, arrived: Callable[[Digest], None]) -> None:
        """Fetch, verify and store the blob, and call ``arrived``. Errors are passed to clients."""
        try:
            self._fetch(source)
        except VerificationError as error:
            _log.error("the upstream sent wrong content: %s", error)
            source.invalidate(self.content)
            self.end(error)
        except AImageError as error:
            _log.warning("cannot fetch %s: %s", self.content.digest, error)
            self.end(error)
        except Exception as error:
            _log.exception("cannot fetch %s", self.content.digest)
            self.end(AImageError(str(error)))
        else:
            try:
                arrived(self.content.digest)
            except Exception:
                # The blob is stored and verified: its clients need no error
                _log.exception("cannot tag the manifests that %s completes", self.content.digest)
            self.end()

    def _fetch(self, source: Source) -> None:
        ingest, missing = self._begin()
        self._ingest = ingest
        # Another process stored it in the meantime
        if self._layout.exists(self.content):
            ingest.abort()
            return
        try:
            self._receive(source, ingest, missing)
        except BaseException:
            ingest.suspend()
            raise
        ingest.commit(self.content)

    def _begin(self) -> tuple[_GrowingIngest, list[tuple[int, int]]]:
        """Return an ingest, and the ranges to fetch."""
        digest = self.content.digest
        if self._layout.compute_missing_size(self.content) > self._layout.measure_free():
            raise NoSpaceError(f"no space left for {digest} ({self.content.size} bytes)")
        try:
            ingest = _GrowingIngest(self._layout.root, digest.encoded, self.content)
        except IngestBusyError:
            # Another process fetches it, with unknown progress: fetch it into a separate ingest
            ingest = _GrowingIngest(self._layout.root, f"cache-{digest.encoded}")
            return ingest, [(0, self.content.size)]
        return ingest, ingest.list_missing()

    def _receive(
        self, source: Source, ingest: _GrowingIngest, missing: list[tuple[int, int]]
    ) -> None:
        buffer = memoryview(bytearray(READ_SIZE))
        unsaved = 0
        for start, end in missing:
            with source.open(self.content, start, end - start) as stream:
                while count := stream.readinto(buffer[: end - start]):
                    ingest.write_at(start, buffer[:count])
                    start, unsaved = start + count, unsaved + count
                    # The last byte is held back until the blob is verified
                    self.advance(min(start, self.content.size - 1))
                    if unsaved >= CHECKPOINT_SIZE:
                        ingest.checkpoint()
                        unsaved = 0
                    if self.stopped:
                        raise AImageError("the server is shutting down")
