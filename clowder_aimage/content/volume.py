"""An archive in several files of a limited size, for media that hold no larger ones.

The volumes ``FILE.001``, ``FILE.002`` ... are the bytes of the archive in order. ``FILE.list``, a
JSON document, has their names, sizes and digests; it is written last, and read first.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.content.atomic_file import open_atomic, write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError, NotFoundError, StoreError, VerificationError
from clowder_aimage.oci import Descriptor, Digest

MEDIA_TYPE = "application/vnd.clowder.aimage.volumes.v1+json"
_VOLUME = "application/octet-stream"
_MAX_LIST = 4 * 1024 * 1024
_MAX_VOLUMES = 10_000
# Volumes of an archive that is written: each has two open descriptors until the end.
MAX_WRITTEN = 400
# The smallest volume: a smaller one would be a mistake.
MIN_SIZE = 1_000_000


class VolumeWriter(io.RawIOBase):
    """An unbuffered stream into volumes of at most ``limit`` bytes.

    ``open_next`` opens the file of the next volume, by its number from 1.
    """

    def __init__(self, path: Path, limit: int, open_next: Callable[[Path], BinaryIO]) -> None:
        self._path, self._limit, self._open_next = path, limit, open_next
        self._file: BinaryIO | None = None
        self._hasher = hashlib.sha256()
        self._size = 0
        self._volumes: list[tuple[str, Descriptor]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        if self._file is None or self._size == self._limit:
            self._finish()
            self._file = self._open_next(build_name(self._path, len(self._volumes) + 1))
        count = self._file.write(view[: self._limit - self._size])
        self._hasher.update(view[:count])
        self._size += count
        return count

    def encode_list(self) -> bytes:
        """End the last volume, and return the list of all."""
        self._finish()
        value = {
            "mediaType": MEDIA_TYPE,
            "volumes": [{"name": name} | volume.to_json() for name, volume in self._volumes],
        }
        return json.dumps(value, indent=2).encode() + b"\n"

    def _finish(self) -> None:
        if self._file is None:
            return
        digest = Digest("sha256", self._hasher.hexdigest())
        name = build_name(self._path, len(self._volumes) + 1).name
        self._volumes.append((name, Descriptor(_VOLUME, digest, self._size)))
        self._file, self._hasher, self._size = None, hashlib.sha256(), 0


def build_name(path: Path, number: int) -> Path:
    """Return the path of a volume of the archive ``path``."""
    return path.with_name(f"{path.name}.{number:03}")


def build_list_name(path: Path) -> Path:
    """Return the path of the list of the volumes of ``path``."""
    return path.with_name(f"{path.name}.list")


@contextmanager
def open_volumes(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a stream into volumes beside ``path``; all appear when the block ends, the list last.

    Raises OSError; no volume is left then.
    """
    with contextlib.ExitStack() as stack:
        # Entered first, and so renamed last
        listed = stack.enter_context(open_atomic(build_list_name(path), removes_leftovers=True))
        writer = VolumeWriter(
            path,
            limit,
            lambda name: stack.enter_context(open_atomic(name, removes_leftovers=True)),
        )
        yield writer  # type: ignore[misc]  # a raw stream, as that of open_atomic
        write_all(listed.fileno(), writer.encode_list())


@dataclass(frozen=True, slots=True)
class _Volume:
    path: Path
    content: Descriptor


class VolumeReader(io.RawIOBase):
    """The archive in the volumes of a list: a stream of ``size`` bytes that can seek."""

    def __init__(self, path: Path) -> None:
        """Open the volumes of the list ``path``, and verify them all.

        Raises:
            FormatError: it is not a list of volumes.
            NotFoundError: a volume is missing.
            VerificationError: a volume is not the one that the list names.
            StoreError: a volume cannot be read.
        """
        self._volumes = _read_list(path)
        for volume in self._volumes:
            _verify(volume, path)
        self.size = sum(volume.content.size for volume in self._volumes)
        self._position = 0
        self._open: tuple[_Volume, io.FileIO] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        start = 0
        for volume in self._volumes:
            if self._position < start + volume.content.size:
                file = self._open_volume(volume)
                file.seek(self._position - start)
                left = start + volume.content.size - self._position
                count = file.readinto(memoryview(buffer)[:left]) or 0
                self._position += count
                return count
            start += volume.content.size
        return 0

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
        super().close()

    def _open_volume(self, volume: _Volume) -> io.FileIO:
        if self._open is None or self._open[0] is not volume:
            if self._open is not None:
                self._open[1].close()
            self._open = (volume, _open_regular(volume.path))
        return self._open[1]


def is_list(front: bytes) -> bool:
    """Return True if these first bytes of a file are those of a list of volumes, not of a tar."""
    return front.lstrip().startswith(b"{") and MEDIA_TYPE.encode() in front


def _read_list(path: Path) -> Sequence[_Volume]:
    with path.open("rb") as file:
        raw = file.read(_MAX_LIST + 1)
    value = read_json(raw, str(path)) if len(raw) <= _MAX_LIST else None
    if not isinstance(value, dict) or value.get("mediaType") != MEDIA_TYPE:
        raise FormatError(f"{path} is neither a tar nor a list of volumes")
    entries = value.get("volumes")
    if not isinstance(entries, list) or not 0 < len(entries) <= _MAX_VOLUMES:
        raise FormatError(f"{path} must list 1 to {_MAX_VOLUMES} volumes")
    volumes: dict[str, _Volume] = {}
    for entry in entries:
        content = Descriptor.from_json(entry, str(path))
        name = content.extra.get("name")
        # A list leads to no other directory
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise FormatError(f"{path} lists a volume with the name {name!r:.80}")
        if name in volumes:
            raise FormatError(f"{path} lists the volume {name} twice")
        volumes[name] = _Volume(path.with_name(name), content)
    return [*volumes.values()]


def _open_regular(path: Path) -> io.FileIO:
    """Open a file to read it, and wait for no other process. Raises OSError, StoreError."""
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise StoreError(f"the volume {path} is not a regular file")


def _verify(volume: _Volume, path: Path) -> None:
    hint = "copy it again from where the archive was saved"
    content, buffer, size = volume.content, new_buffer(), 0
    hasher = content.digest.create_hasher()
    try:
        with _open_regular(volume.path) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                size += count
    except FileNotFoundError:
        raise NotFoundError(
            f"the volume {volume.path} is missing, which {path.name} lists", hint=hint
        ) from None
    except OSError as error:
        raise StoreError(f"cannot read {volume.path}: {error.strerror or error}") from error
    if size != content.size:
        raise VerificationError(
            f"the volume {volume.path} has {size} bytes, and {path.name} lists {content.size}",
            hint=hint,
        )
    if hasher.hexdigest() != content.digest.encoded:
        raise VerificationError(
            f"the volume {volume.path} is not the one that {path.name} lists: its digest differs",
            hint=hint,
        )
