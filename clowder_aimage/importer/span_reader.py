"""Reader of spans of source files, in one pass; files must not have changed since the plan."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.errors import ModelError
from clowder_aimage.tensor.weight import FileRange

JOBS = 8  # threads that read, hash and write


class SpanReader:
    """A reader of the bytes of ``span``, until ``stopped`` is set."""

    def __init__(self, span: FileRange, stopped: threading.Event) -> None:
        self._span = span
        self._stopped = stopped
        self._left = span.nbytes
        self._parts = span.decoded.parts() if span.decoded else None
        self._part = memoryview(b"")
        with self._errors():
            self._file = span.path.open("rb", buffering=0)
            self._file.seek(span.offset)

    def readinto(self, buffer: memoryview) -> int:
        """Fill ``buffer`` from the span and return the number of bytes, 0 at its end.

        Raises:
            ModelError: The file cannot be read, or has changed.
            ParallelStoppedError: The write was cancelled.
        """
        count = 0
        while self._left and count < len(buffer):
            if self._stopped.is_set():
                raise ParallelStoppedError
            with self._errors():
                read = self._fill(buffer[count : count + self._left])
            if not read:
                raise changed(self._span.path)
            count += read
            self._left -= read
        return count

    def _fill(self, buffer: memoryview) -> int:
        if self._parts is None:
            return self._file.readinto(buffer) or 0
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part = memoryview(part).cast("B")
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the rest of the span in one buffer of ``size`` bytes. Raises as ``readinto``."""
        buffer = memoryview(bytearray(min(size, self._left)))
        while count := self.readinto(buffer):
            yield buffer[:count]

    def read(self) -> bytearray:
        """Return the rest of the span. Raises as ``readinto``."""
        data = bytearray(self._left)
        self.readinto(memoryview(data))
        return data

    def check_unchanged(self) -> None:
        """Check that the file has not changed since its header was read."""
        with self._errors():
            status = os.fstat(self._file.fileno())
        if status.st_mtime_ns != self._span.modified:
            raise changed(self._span.path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"cannot read {self._span.path}: {error.strerror}") from error

    def __enter__(self) -> SpanReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def changed(path: Path) -> ModelError:
    """Return the error for a file that changed since the plan was made."""
    return ModelError(
        f"{path} changed while it was read", hint="wait until it is complete, then pack it again"
    )
