"""An OCI image layout in a tar (OCI image-spec, image-layout.md), written and read as a stream.

Nothing is extracted by its path: a member is a name, a size and bytes.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.content.atomic_file import DISK_FULL
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.copy import CopyPlan
from clowder_aimage.content.copy_option import CopyEvent, CopyOptions
from clowder_aimage.content.file_system import ADVICE
from clowder_aimage.content.store import LAYOUT_FILE, Body, Reader, Source, Target
from clowder_aimage.content.tar import MAX_MEMBERS, TarReader, build_tar_header, check_members
from clowder_aimage.content.verified_reader import RawReader, VerifyingReader
from clowder_aimage.content.volume import VolumeReader, is_list
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UsageError,
)
from clowder_aimage.oci import Descriptor, Digest, Reference

_BLOCK = tarfile.BLOCKSIZE
# POSIX pax, "ustar Interchange Format": two blocks of zeros
_END = bytes(2 * _BLOCK)
# Bytes that gzip may unpack to before its ratio is checked
_MIN_UNPACKED = 64 * 1024 * 1024
# Weights compress by less than a hundred; the limit of deflate is 1032
_MAX_RATIO = 200
# Bytes that are read after the end, as tar pads its last record
_TRAILER = 1024 * 1024
_GZIP = b"\x1f\x8b"
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
_COMPRESSIONS = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}


def write_error(error: OSError, name: object) -> AImageError:
    """Return the error for an archive that cannot be written."""
    if error.errno in DISK_FULL:
        return NoSpaceError(
            f"no space left for the archive {name}",
            hint="free some space, or write it to another disk",
        )
    if error.errno == errno.EPIPE:
        return StoreError(f"the reader closed the pipe before the archive {name} was complete")
    message = f"cannot write the archive {name}: {error.strerror or error}"
    return StoreError(message, hint=ADVICE.get(error.errno or 0))


class TarTarget(Target):
    """A tar that is written in one pass, with the same bytes for the same content.

    The index and the documents of ``plan`` come first, parents before children, then the blobs in
    the order of their digests. Raises UsageError for more members than a TarStream accepts.
    """

    def __init__(self, index: bytes, plan: CopyPlan) -> None:
        self._documents = {
            content.digest: document.raw
            for content, document in reversed(plan.documents)
            if document.raw != index
        }
        self._blobs = [
            blob
            for blob in sorted(plan.blobs, key=lambda blob: blob.digest)
            if blob.digest not in self._documents
        ]
        digests = [*self._documents, *(blob.digest for blob in self._blobs)]
        directories = ["blobs", *sorted({f"blobs/{digest.algorithm}" for digest in digests})]
        count = 2 + len(directories) + len(digests)
        if count > MAX_MEMBERS:
            raise UsageError(
                f"the archive would have {count} members, over {MAX_MEMBERS}",
                hint="write several archives",
            )
        self._head = b"".join(
            [
                _encode_file("oci-layout", LAYOUT_FILE),
                _encode_file("index.json", index),
                *(build_tar_header(name, type=tarfile.DIRTYPE, mode=0o755) for name in directories),
                *(_encode_file(_name(digest), raw) for digest, raw in self._documents.items()),
            ]
        )
        self._file: BinaryIO | None = None
        self._file_name: object = ""
        self._hasher: Any = None

    @property
    def size(self) -> int:
        """The size of the archive in bytes."""
        sizes = (
            len(_encode_header(blob)) + blob.size + -blob.size % _BLOCK for blob in self._blobs
        )
        return len(self._head) + sum(sizes) + len(_END)

    @property
    def digest(self) -> Digest | None:
        """The digest of all written bytes, if they were hashed."""
        return Digest("sha256", self._hasher.hexdigest()) if self._hasher else None

    def open_file(self, file: BinaryIO, name: object, *, is_hashed: bool) -> None:
        """Write to ``file``, an unbuffered stream; errors contain ``name``."""
        self._file, self._file_name = file, name
        self._hasher = hashlib.sha256() if is_hashed else None

    def resolve(self, reference: Reference, /) -> Descriptor:
        raise NotFoundError(f"cannot read {reference} from a write-only archive")

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._documents

    def open(self, content: Descriptor, _: int = 0, __: int | None = None, /) -> Reader:
        raise NotFoundError(f"cannot read {content.digest} from a write-only archive")

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        """Do nothing: the documents and names are written before the blobs."""

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        """Do nothing: the names are in the index."""

    def receive(self, source: Source, _: Sequence[Descriptor], options: CopyOptions) -> None:
        buffer = new_buffer()
        self._write(self._head)
        for blob in self._blobs:
            options.on_event(CopyEvent("start", blob, blob.size))
            self._write(_encode_header(blob))
            with VerifyingReader(source.open(blob), blob) as reader:
                while count := reader.readinto(buffer):
                    self._write(buffer[:count])
                    options.on_event(CopyEvent("progress", blob, count))
            self._write(_build_padding(blob.size))
            options.on_event(CopyEvent("done", blob, blob.size))
        self._write(_END)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None  # noqa: S101 - open_file comes first
        if self._hasher is not None:
            self._hasher.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise write_error(error, self._file_name) from error


def _name(digest: Digest) -> str:
    return f"blobs/{digest.algorithm}/{digest.encoded}"


def _encode_header(blob: Descriptor) -> bytes:
    return build_tar_header(_name(blob.digest), size=blob.size, mode=0o644)


def _encode_file(name: str, data: bytes) -> bytes:
    return build_tar_header(name, size=len(data), mode=0o644) + data + _build_padding(len(data))


def _build_padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


@contextmanager
def open_archive(archive: Path | io.FileIO) -> Iterator[tuple[io.FileIO | VolumeReader, str]]:
    """Open an archive as an unbuffered stream, and return its name for errors.

    The path of a list of volumes opens these, verified. Raises NotFoundError, UsageError,
    StoreError, FormatError, VerificationError.
    """
    if not isinstance(archive, Path):
        yield archive, "the archive on stdin"
        return
    try:
        file = archive.open("rb", buffering=0)
    except FileNotFoundError:
        raise NotFoundError(f"archive not found: {archive}") from None
    except IsADirectoryError:
        raise UsageError(f"{archive} is a directory", remedy="layout_as_store") from None
    except OSError as error:
        raise StoreError(f"cannot read {archive}: {error.strerror or error}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or not is_list(
            os.pread(file.fileno(), _BLOCK, 0)
        ):
            yield file, str(archive)
            return
    with VolumeReader(archive) as volumes:
        yield volumes, str(archive)


def is_tar(front: bytes) -> bool:
    """Return True if these first bytes of a file are those of a tar, plain or compressed."""
    return front[257:262] == b"ustar" or front.startswith((_GZIP, *_COMPRESSIONS))


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file in an archive.

    ``name`` has no ``.`` and no ``..``. ``open`` works once, until the next member is read.
    """

    name: tuple[str, ...]
    size: int
    open: Callable[[], Reader]


class _Input(RawReader):
    """A counting reader of ``file``, an unbuffered stream, that can peek at its first bytes."""

    def __init__(
        self, file: io.FileIO | VolumeReader, name: str, on_read: Callable[[int], None]
    ) -> None:
        self.name, self._file, self._on_read = name, file, on_read
        self._front = b""
        self.count = 0
        # 0 if unknown, as for a pipe.
        self.size = _measure(file)

    def peek(self, count: int) -> bytes:
        """Return the first ``count`` bytes, or all of a shorter file."""
        buffer = memoryview(bytearray(count))
        while len(self._front) < count and (read := self._read(buffer[len(self._front) :])):
            self._front += buffer[len(self._front) :][:read]
        return self._front

    def _read(self, view: memoryview) -> int:
        try:
            return self._file.readinto(view) or 0
        except OSError as error:
            raise StoreError(f"cannot read {self.name}: {error.strerror or error}") from error

    def _fill(self, view: memoryview) -> int:
        if self._front:
            count = min(len(view), len(self._front))
            view[:count], self._front = self._front[:count], self._front[count:]
        else:
            count = self._read(view)
        self._advance(count)
        return count

    def skip(self, count: int) -> bool:
        """Skip bytes without reading them; return False if that is not possible."""
        if not self.size:
            return False
        front = min(count, len(self._front))
        self._front = self._front[front:]
        self._file.seek(count - front, os.SEEK_CUR)
        self._advance(count)
        return True

    def _advance(self, count: int) -> None:
        self.count += count
        self._on_read(count)


def _measure(file: io.FileIO | VolumeReader) -> int:
    if isinstance(file, VolumeReader):
        return file.size
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


class TarStream:
    """The members of an untrusted archive, plain or compressed with gzip, read in one pass.

    ``file`` is unbuffered; ``on_read`` is called with the number of bytes read. Raises FormatError
    for another compression, StoreError if the archive cannot be read; if it is a plain file, also
    FormatError for too many members, before any is used. In pipes they are counted as they arrive.
    """

    def __init__(
        self,
        file: io.FileIO | VolumeReader,
        name: str,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._input = _Input(file, name, on_read)
        front = self._input.peek(6)
        for magic, tool in _COMPRESSIONS.items():
            if front.startswith(magic):
                raise FormatError(
                    f"{name} is compressed with {tool}, which is unsupported",
                    remedy="load_decompressed",
                    tool=tool,
                )
        self._is_packed = front.startswith(_GZIP)
        self._stream: Reader = self._input
        if self._is_packed:
            self._stream = gzip.GzipFile(fileobj=self._input, mode="rb")
        skip = (lambda _: False) if self._is_packed else self._input.skip
        self._tar = TarReader(self._read, name, hint="copy or save it again", skip=skip)
        self._unpacked = 0  # bytes
        if self.size and not self._is_packed:
            file.seek(-len(front), os.SEEK_CUR)
            check_members(file, name)
            file.seek(len(front), os.SEEK_CUR)

    @property
    def size(self) -> int:
        """The size of the file in bytes; 0 if it is not known in advance."""
        return self._input.size

    def iter_members(self) -> Iterator[TarMember]:
        """Yield the regular files in the archive, in its order.

        Raises:
            FormatError: it is not a tar, is truncated, or has members that a layout cannot have:
                links, devices, names outside the archive.
            StoreError: it cannot be read.
        """
        for header in self._tar.iter_members():
            if (member := self._parse_member(header)) is not None:
                yield member
        # The padding after the end is read, so that a writer into a pipe does not fail.
        buffer, remaining = new_buffer(), _TRAILER
        while remaining > 0 and (count := self._input.readinto(buffer)):
            remaining -= count

    def _parse_member(self, header: tarfile.TarInfo) -> TarMember | None:
        """Return the member of a header; None for a directory. Raises FormatError."""
        segments = tuple(segment for segment in header.name.split("/") if segment not in ("", "."))
        description = f"{self.name} contains {header.name[:200]!r}"
        if header.name.startswith("/") or ".." in segments:
            raise FormatError(f"{description}, a path outside the archive")
        if header.isdir():
            return None
        if header.issparse():
            raise FormatError(f"{description}, a sparse file, which is unsupported")
        if not header.isreg():
            kind = _KINDS.get(header.type, f"an entry of type {header.type!r}")
            raise FormatError(f"{description}, {kind}, which is invalid in an OCI image layout")
        end = self._tar.position + header.size
        if header.size < 0 or (self.size and not self._is_packed and end > self.size):
            raise FormatError(
                f"{description} with {header.size} bytes, past its end: it is damaged or truncated"
            )
        return TarMember(segments, header.size, lambda: _Section(self._tar, header.size))

    def _read(self, view: memoryview) -> int:
        """Read some unpacked bytes; return 0 at the end."""
        try:
            count = self._stream.readinto(view)
        except _GZIP_ERRORS as error:
            raise FormatError(f"{self.name} is truncated, or not gzip: {error}") from None
        self._unpacked += count
        limit = max(_MIN_UNPACKED, _MAX_RATIO * self._input.count)
        if self._is_packed and self._unpacked > limit:
            raise FormatError(
                f"{self.name} decompresses to more than {_MAX_RATIO} times its size",
                remedy="load_decompressed",
                tool="gzip",
            )
        return count


class _Section(RawReader):
    """The next ``size`` bytes of a tar."""

    def __init__(self, tar: TarReader, size: int) -> None:
        self._tar, self._left = tar, size

    def _fill(self, view: memoryview) -> int:
        view = view[: self._left]
        self._tar.read_exactly(view)
        self._left -= len(view)
        return len(view)
