"""Fetch a blob from the upstream into the layout, while clients read it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content.store import IngestBusyError, Source
from clowder_aimage.errors import AImageError, NoSpaceError, VerificationError
from clowder_aimage.layout import FileIngest, ImageLayout
from clowder_aimage.oci import Descriptor, Digest

PIECE = 64 * 1024  # bytes read at a time: with a slow upstream the cache must keep responding
KEEP = 256 * 1024 * 1024  # bytes between checkpoints, which survive a crash

_log = logging.getLogger(__name__)


class _GrowingIngest(FileIngest):
    """An ingest that is read while it is written."""

    def reader(self) -> BinaryIO:
        return Path(self._path).open("rb", buffering=0)


class CachedFetch:
    """A fetch that any number of clients read at their own speed; created in the event loop.

    ``front`` bytes may be sent, the last byte only after the whole blob is verified and stored.
    """

    def __init__(self, layout: ImageLayout, content: Descriptor) -> None:
        self.content = content
        self.front = 0
        self.stopped = False
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._ingest: _GrowingIngest | None = None
        self._progress: tuple[int, AImageError | None] = (0, None)
        self._error: AImageError | None = None
        self._is_reported = False

    async def begun(self) -> None:
        """Wait until the upstream sends the blob. Raises its error."""
        await asyncio.shield(self._begun)

    async def wait(self, offset: int) -> int:
        """Wait until over ``offset`` bytes may be sent; return how many. Raises ConnectionError."""
        while self.front <= offset:
            if self._error is not None:
                raise ConnectionResetError(str(self._error))
            await self._moved.wait()
        return self.front

    def open(self) -> BinaryIO:
        """Open the growing file. It stays readable when it is renamed or removed."""
        if self._ingest is not None:
            with contextlib.suppress(FileNotFoundError):
                return self._ingest.reader()
        try:
            return self._layout.path(self.content).open("rb", buffering=0)
        except AImageError as error:
            raise ConnectionResetError(str(error)) from None

    def run(self, source: Source, arrived: Callable[[Digest], None]) -> None:
        """Fetch, verify and store the blob, and call ``arrived``. Errors are passed to clients."""
        try:
            self._fetch(source)
        except VerificationError as error:
            _log.error("the upstream sent wrong content: %s", error)
            source.invalidate(self.content)
            self.fail(error)
        except AImageError as error:
            _log.warning("cannot fetch %s: %s", self.content.digest, error)
            self.fail(error)
        except Exception as error:
            _log.exception("cannot fetch %s", self.content.digest)
            self.fail(AImageError(str(error)))
        else:
            try:
                arrived(self.content.digest)
            except Exception:  # the blob is stored and verified
                _log.exception("cannot tag the manifests that %s completes", self.content.digest)
            self._report(self.content.size)

    def fail(self, error: AImageError) -> None:
        """End with an error."""
        self._report(0, error)

    def _fetch(self, source: Source) -> None:
        ingest, missing = self._begin()
        self._ingest = ingest
        if self._layout.exists(self.content):  # another process was faster
            ingest.abort()
            return
        try:
            self._receive(source, ingest, missing)
        except BaseException:
            ingest.suspend()
            raise
        ingest.commit(self.content)

    def _begin(self) -> tuple[_GrowingIngest, list[tuple[int, int]]]:
        """Return an ingest, and the spans to fetch."""
        digest = self.content.digest
        if self._layout.missing_size(self.content) > self._layout.free():
            raise NoSpaceError(f"no space left for {digest} ({self.content.size} bytes)")
        try:
            ingest = _GrowingIngest(self._layout.root, digest.encoded, self.content)
        except IngestBusyError:  # another process fetches it, with unknown progress
            ingest = _GrowingIngest(self._layout.root, f"cache-{digest.encoded}")
            return ingest, [(0, self.content.size)]
        return ingest, ingest.missing()

    def _receive(
        self, source: Source, ingest: _GrowingIngest, missing: list[tuple[int, int]]
    ) -> None:
        buffer = memoryview(bytearray(PIECE))
        kept = 0
        for start, end in missing:
            with source.open(self.content, start, end - start) as stream:
                self._report_front(start)
                while count := stream.readinto(buffer[: end - start]):
                    ingest.write_at(start, buffer[:count])
                    start, kept = start + count, kept + count
                    self._report_front(start)
                    if kept >= KEEP:
                        ingest.checkpoint()
                        kept = 0
                    if self.stopped:
                        raise AImageError("the server is shutting down")

    def _report_front(self, front: int) -> None:
        self._report(min(front, self.content.size - 1))

    def _report(self, front: int, error: AImageError | None = None) -> None:
        """Report the progress to the event loop; reports that it has not read yet are merged."""
        self._progress = (front, error)
        if not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._read_report)

    def _read_report(self) -> None:
        self._is_reported = False  # first, so that a report from now on is read again
        front, error = self._progress
        self._error = error
        self.front = max(self.front, front)
        self._moved.set()
        self._moved = asyncio.Event()  # for the next report
        if self._begun.done():
            return
        if error is None:
            self._begun.set_result(None)
        else:
            self._begun.set_exception(error)
            self._begun.exception()  # retrieved, even if all clients have left
