"""Reader of ranges of source files, in one pass. A file must not have changed since the plan."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.errors import ModelError
from clowder_aimage.tensor.weight import FileRange

# Threads that read, hash and write.
THREADS = 8


class RangeReader:
    """A reader of the bytes of ``file_range``, until ``stopped`` is set."""

    def __init__(self, file_range: FileRange, stopped: threading.Event) -> None:
        self._range = file_range
        self._stopped = stopped
        self._remaining = file_range.nbytes
        self._decoded_chunks = file_range.decoded.iter_bytes() if file_range.decoded else None
        self._chunk = memoryview(b"")
        with self._translate_errors():
            # Unbuffered: reads go directly into the buffer of the encoder.
            self._file = file_range.path.open("rb", buffering=0)
            self._file.seek(file_range.offset)

    def readinto(self, buffer: memoryview) -> int:
        """Fill ``buffer`` from the range and return the number of bytes, 0 at its end.

        Raises:
            ModelError: The file cannot be read, or has changed.
            ParallelStoppedError: The write was cancelled.
        """
        count = 0
        while self._remaining and count < len(buffer):
            if self._stopped.is_set():
                raise ParallelStoppedError
            with self._translate_errors():
                read = self._fill(buffer[count : count + self._remaining])
            if not read:
                raise build_changed_error(self._range.path)
            count += read
            self._remaining -= read
        return count

    def _fill(self, buffer: memoryview) -> int:
        if self._decoded_chunks is None:
            return self._file.readinto(buffer) or 0
        while not self._chunk:
            chunk = next(self._decoded_chunks, None)
            if chunk is None:
                return 0
            self._chunk = memoryview(chunk).cast("B")
        count = min(len(buffer), len(self._chunk))
        buffer[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    def iter_chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the rest of the range in one buffer of ``size`` bytes. Raises as ``readinto``."""
        buffer = memoryview(bytearray(min(size, self._remaining)))
        while count := self.readinto(buffer):
            yield buffer[:count]

    def read(self) -> bytearray:
        """Return the rest of the range. Raises as ``readinto``."""
        data = bytearray(self._remaining)
        self.readinto(memoryview(data))
        return data

    def check_unchanged(self) -> None:
        """Check that the file has not changed since its header was read."""
        with self._translate_errors():
            status = os.fstat(self._file.fileno())
        if self._range.modified not in (None, status.st_mtime_ns):
            raise build_changed_error(self._range.path)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"cannot read {self._range.path}: {error.strerror}") from error

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def build_changed_error(path: Path) -> ModelError:
    """Return the error for a file that changed since the plan was made."""
    return ModelError(
        f"{path} changed while it was read",
        hint="wait until it is complete, then pack it again",
    )
