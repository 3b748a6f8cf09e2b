"""An OCI image layout in a tar, plain or compressed with gzip, that is read once and not trusted.

Nothing is ever extracted by its path: a member is a name, a size and bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.tar import TarReader
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.errors import FormatError, StoreError

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
_GZIP_FAULTS = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in the archive. ``name`` has no ``.`` and no ``..``; ``open`` gives its
    ``size`` bytes, once, until the next member is asked for."""

    name: tuple[str, ...]
    size: int
    open: Callable[[], BinaryIO]


class TapeSource(io.RawIOBase):
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

    def __init__(self, source: TapeSource) -> None:
        """Look at its first bytes. Raises FormatError for a compression that is not read."""
        self._source = source
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
        skip = (lambda _: False) if self._is_packed else source.skip
        self._tar = TarReader(self._read, source.name, hint="copy or save it again", skip=skip)
        self._unpacked = 0  # bytes

    @property
    def name(self) -> str:
        """What errors call it."""
        return self._source.name

    def members(self) -> Iterator[Member]:
        """The regular files in the archive, in its order; directories are passed over.

        Raises:
            FormatError: it is no tar, breaks off, or has what no layout has in a tar: links,
                devices, names that lead out of it.
            StoreError: it cannot be read.
        """
        for found in self._tar.members():
            if (member := self._member(found)) is not None:
                yield member
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
        end, whole = self._tar.position + found.size, self._source.size
        if found.size < 0 or (whole and not self._is_packed and end > whole):
            raise FormatError(
                f"{where} with {found.size} bytes, more than there are: it is damaged, or not whole"
            )
        return Member(parts, found.size, lambda: cast(BinaryIO, _Section(self._tar, found.size)))

    def _drain(self) -> None:
        """Let whoever writes into a pipe finish its last record, as tar does."""
        buffer, left = new_buffer(), _TRAILER
        while left > 0 and (count := self._source.readinto(buffer)):
            left -= count

    def _read(self, view: memoryview) -> int:
        """Some bytes, unpacked; 0 at the end."""
        try:
            count = readinto(self._stream, view)
        except _GZIP_FAULTS as error:
            raise FormatError(f"{self.name} is not whole, or no gzip: {error}") from None
        self._unpacked += count
        if self._is_packed and self._unpacked > max(_ROOM, _RATIO * self._source.count):
            raise FormatError(
                f"{self.name} unpacks to more than {_RATIO} times its size",
                hint="if that is meant, unpack it yourself: gzip -dc FILE | aimage load -",
            )
        return count


class _Section(io.RawIOBase):
    """The next ``size`` bytes of a tar."""

    def __init__(self, tar: TarReader, size: int) -> None:
        self._tar = tar
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: self._left]
        self._tar.read_exactly(view)
        self._left -= len(view)
        return len(view)
