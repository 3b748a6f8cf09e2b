"""A reader of untrusted tar archives, in one pass.

Headers are parsed by tarfile; their size is bounded here. Nothing is extracted by its path: a
member is its header, and the bytes that follow it. The number of members is bounded, too.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.volume import VolumeReader
from clowder_aimage.errors import FormatError, StoreError

# Members of an archive, directories included.
MAX_MEMBERS = 100_000
# Bytes of a member's header with all its extensions
_MAX_HEADER = 64 * 1024
_ERRORS = (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError)


def build_tar_header(name: str, **fields: object) -> bytes:
    """Return a ustar header without owner and time.

    A pax header precedes it if the name or the size does not fit.
    """
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict")


def check_members(file: io.FileIO | VolumeReader, name: str) -> None:
    """Count the members from the position of ``file``, and return to it.

    A load thus fails before its first write. Damaged members are reported by the reader that
    reaches them. Raises FormatError if there are too many, StoreError.
    """
    count = 0

    def skip(count: int) -> bool:
        file.seek(count, io.SEEK_CUR)
        return True

    try:
        start = file.tell()
        reader = TarReader(lambda view: file.readinto(view) or 0, name, skip=skip)
        try:
            for count, _ in enumerate(reader.iter_members(), 1):  # noqa: B007
                pass
        except FormatError:
            if count >= MAX_MEMBERS:
                raise
        file.seek(start)
    except OSError as error:
        raise StoreError(f"cannot read {name}: {error.strerror or error}") from error


class TarReader:
    """The members of a tar; errors contain ``name``, and ``hint`` if the tar is truncated.

    ``read`` fills a view with some bytes and returns 0 at the end. ``skip`` skips bytes without
    reading them, or returns False.
    """

    def __init__(
        self,
        read: Callable[[memoryview], int],
        name: str,
        *,
        hint: str | None = None,
        skip: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._source, self._skip = read, skip
        self._name, self._hint = name, hint
        # The offset of the next byte
        self.position = 0
        self._budget = _MAX_HEADER
        # The last block that tarfile read: the end, or a block that is not a header.
        self._last = b""

    def iter_members(self) -> Iterator[tarfile.TarInfo]:
        """Yield all entries; data after the end of the archive is not read.

        Raises FormatError if the file is not a tar, is damaged, is truncated, or has more than
        MAX_MEMBERS members.
        """
        count = 0
        with self._translate_errors("is not a tar archive"):
            tar = tarfile.open(  # noqa: SIM115 - it holds nothing to be closed
                fileobj=cast(IO[bytes], self), mode="r:", encoding="utf-8"
            )
        while True:
            self._budget = _MAX_HEADER
            with self._translate_errors(f"is damaged at byte {self.position}"):
                header = tar.next()
            if header is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # or it would keep all of them
            count += 1
            if count > MAX_MEMBERS:
                raise FormatError(f"{self._name} has more than {MAX_MEMBERS} members")
            yield header
        if len(self._last) < tarfile.BLOCKSIZE:
            raise self._build_truncation_error()
        if self._last.strip(b"\0"):
            raise FormatError(f"{self._name} is damaged: no header at byte {self.position}")

    def read_exactly(self, view: memoryview) -> None:
        """Fill ``view`` from a member. Raises FormatError if the archive is truncated."""
        if self._fill(view) < len(view):
            raise self._build_truncation_error()

    def _fill(self, view: memoryview) -> int:
        count_read = 0
        while count_read < len(view) and (count := self._source(view[count_read:])):
            count_read += count
        self.position += count_read
        return count_read

    @contextmanager
    def _translate_errors(self, message: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise FormatError(f"{self._name} {message}: {error}") from None

    def _build_truncation_error(self) -> FormatError:
        return FormatError(f"{self._name} is truncated at byte {self.position}", hint=self._hint)

    # tell, read and seek form the file object of tarfile, for headers only.

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        """Read bytes of a header. Raises FormatError if it is too long."""
        self._budget -= max(size, 1)
        if size < 0 or self._budget < 0:
            raise FormatError(
                f"{self._name} has a header of more than {_MAX_HEADER} bytes "
                f"at byte {self.position}"
            )
        buffer = bytearray(size)
        self._last = bytes(buffer[: self._fill(memoryview(buffer))])
        return self._last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> None:
        """Skip bytes that were not read. Raises FormatError for a backward seek."""
        count = position - self.position
        if count < 0 or whence != io.SEEK_SET:
            raise FormatError(f"{self._name} is damaged: inconsistent headers")
        if self._skip(count):
            self.position += count
            return
        buffer = new_buffer(min(CHUNK_SIZE, count))
        while count and (skipped := self._fill(buffer[: min(len(buffer), count)])):
            count -= skipped
