"""A tar that is read once, from its beginning to its end, and not trusted.

Headers are tarfile's to read; what they may cost is bounded here. Nothing is ever extracted by its
path: a member is a name, a size and bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, BinaryIO, cast

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.verify import readinto
from clowder_aimage.errors import FormatError, StoreError

_HEADER_LIMIT = 64 * 1024  # bytes of a member's header with all its extensions
_ROOM = 64 * 1024 * 1024  # bytes that gzip may unpack to before its ratio is looked at
_RATIO = 200  # weights do not shrink to a hundredth; deflate's most is 1032
_TRAILER = 1024 * 1024  # bytes after the end that a writer is let write
_GZIP = b"\x1f\x8b"
_COMPRESSIONS = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}
_TAR_FAULTS = (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError)
_GZIP_FAULTS = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in the archive. ``name`` has no ``.`` and no ``..``; ``open`` gives its
    ``size`` bytes, once, until the next member is asked for."""

    name: tuple[str, ...]
    size: int
    open: Callable[[], BinaryIO]


class Source(io.RawIOBase):
    """The bytes of ``file``, an unbuffered stream, counted; the first may be looked at before.

    Errors of reading are StoreErrors that call it ``name``. ``size`` is 0 where nobody knows.
    """

    def __init__(self, file: BinaryIO, name: str, on_read: Callable[[int], None]) -> None:
        self.name = name
        self._file = file
        self._on_read = on_read
        self._front = b""
        self.count = 0
        status = os.fstat(file.fileno())
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else 0

    def readable(self) -> bool:
        return True

    def peek(self, count: int) -> bytes:
        """The first ``count`` bytes, or all where there are fewer; they stay to be read."""
        while len(self._front) < count and (data := self._read(count - len(self._front))):
            self._front += data
        return self._front

    def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self._fill(memoryview(buffer))])

    def _fill(self, view: memoryview) -> int:
        try:
            return readinto(self._file, view)
        except OSError as error:
            raise StoreError(f"cannot read {self.name}: {error.strerror or error}") from error

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)
        if self._front:
            count = min(len(view), len(self._front))
            view[:count], self._front = self._front[:count], self._front[count:]
        else:
            count = self._fill(view)
        self._passed(count)
        return count

    def skip(self, count: int) -> bool:
        """Pass over bytes without reading them; whether that can be."""
        if not self.size:
            return False
        front = min(count, len(self._front))
        self._front = self._front[front:]
        self._file.seek(count - front, os.SEEK_CUR)
        self._passed(count)
        return True

    def _passed(self, count: int) -> None:
        self.count += count
        self._on_read(count)


class Tape:
    """The members of the archive in ``source``, plain or compressed with gzip."""

    def __init__(self, source: Source) -> None:
        """Look at its first bytes. Raises FormatError for a compression that is not read."""
        self._source = source
        self._position = 0  # in the archive, unpacked
        self._budget = _HEADER_LIMIT
        self._last = b""  # what tarfile read last: the end, or what breaks the archive off
        front = source.peek(6)
        for magic, tool in _COMPRESSIONS.items():
            if front.startswith(magic):
                raise FormatError(
                    f"{source.name} is compressed with {tool}, which is not read here",
                    hint=f"unpack it on the way: {tool} -dc FILE | aimage load -",
                )
        self._is_packed = front.startswith(_GZIP)
        packed = gzip.GzipFile(fileobj=source, mode="rb") if self._is_packed else source
        self._stream = cast(BinaryIO, packed)

    @property
    def name(self) -> str:
        """What errors call it."""
        return self._source.name

    def members(self) -> Iterator[Member]:
        """The regular files in the archive, in its order; directories are passed over.

        Raises:
            FormatError: it is not a tar, breaks off, or has what no layout has in a tar: links,
                devices, names that lead out of it.
            StoreError: it cannot be read.
        """
        with self._faults("is not a tar archive"):
            tar = tarfile.open(  # noqa: SIM115 - it holds nothing to be closed
                fileobj=cast(IO[bytes], self), mode="r:", encoding="utf-8"
            )
        while True:
            self._budget = _HEADER_LIMIT
            with self._faults(f"is damaged at byte {self._position}"):
                found = tar.next()
            if found is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # or it would keep all of them
            if (member := self._member(found)) is not None:
                yield member
        if len(self._last) < tarfile.BLOCKSIZE:
            raise self._broken()
        if self._last.strip(b"\0"):
            raise FormatError(f"{self.name} is damaged at byte {self._position}: no header there")
        self._drain()

    def _member(self, found: tarfile.TarInfo) -> Member | None:
        """What a header stands for; None for a directory. Raises FormatError."""
        parts = tuple(part for part in found.name.split("/") if part not in ("", "."))
        where = f"{self.name} has {found.name[:200]!r}"
        if found.name.startswith("/") or ".." in parts:
            raise FormatError(f"{where}, a name that leads out of it: it is not taken in")
        if found.isdir():
            return None
        if found.issparse():
            raise FormatError(f"{where}, a sparse file: it is not taken in")
        if not found.isreg():
            kind = _KINDS.get(found.type, f"an entry of the kind {found.type!r}")
            raise FormatError(f"{where}, {kind}: no OCI image layout has any")
        end, whole = self._position + found.size, self._source.size
        if found.size < 0 or (whole and not self._is_packed and end > whole):
            raise FormatError(
                f"{where} with {found.size} bytes, more than there are: it is damaged, or not whole"
            )
        return Member(parts, found.size, lambda: cast(BinaryIO, _Section(self, found.size)))

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        try:
            yield
        except _TAR_FAULTS as error:
            raise FormatError(f"{self.name} {what}: {error}") from None

    def _broken(self) -> FormatError:
        return FormatError(
            f"{self.name} breaks off at byte {self._position}", hint="copy or save it again"
        )

    def _drain(self) -> None:
        """Let whoever writes into a pipe finish its last record, as tar does."""
        buffer, left = new_buffer(), _TRAILER
        while left > 0 and (count := self._source.readinto(buffer)):
            left -= count

    # -- what tarfile calls: for headers alone

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes of headers. Raises FormatError where a member has too many."""
        self._budget -= max(size, 1)
        if size < 0 or self._budget < 0:
            raise FormatError(
                f"{self.name} has a header of more than {_HEADER_LIMIT} bytes "
                f"at byte {self._position}"
            )
        buffer = bytearray(size)
        self._last = bytes(buffer[: self.readinto(memoryview(buffer))])
        return self._last

    def seek(self, position: int) -> None:
        """Pass over what was not read of a member. Raises FormatError for a way back."""
        count = position - self._position
        if count < 0:
            raise FormatError(f"{self.name} is damaged: its headers contradict each other")
        if not self._is_packed and self._source.skip(count):
            self._position += count
            return
        buffer = new_buffer(min(CHUNK_SIZE, count))
        while count and (passed := self.readinto(buffer[: min(len(buffer), count)])):
            count -= passed

    # -- what a member reads

    def readinto(self, view: memoryview) -> int:
        """Fill ``view``; less is there only at the end."""
        done = 0
        try:
            while done < len(view) and (count := readinto(self._stream, view[done:])):
                done += count
        except _GZIP_FAULTS as error:
            raise FormatError(f"{self.name} is not whole, or no gzip: {error}") from None
        self._position += done
        if self._is_packed and self._position > max(_ROOM, _RATIO * self._source.count):
            raise FormatError(
                f"{self.name} unpacks to more than {_RATIO} times its size",
                hint="if that is meant, unpack it yourself: gzip -dc FILE | aimage load -",
            )
        return done

    def read_member(self, view: memoryview) -> None:
        """Fill ``view`` from the member. Raises FormatError where the archive breaks off."""
        if self.readinto(view) < len(view):
            raise self._broken()


class _Section(io.RawIOBase):
    """The next ``size`` bytes of a tape."""

    def __init__(self, tape: Tape, size: int) -> None:
        self._tape = tape
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: self._left]
        self._tape.read_member(view)
        self._left -= len(view)
        return len(view)
