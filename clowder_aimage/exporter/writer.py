"""Writer of an export plan: each blob is read once, and hashed as it is written.

Hashing needs every byte in memory, so copying in the kernel would read the data twice. Tensors are
not aligned to blocks that a file system could share; whole files may be.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clowder_aimage.content import VerifyingReader
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import MAX_PLAIN, compression_of, open_decompressed
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.store import Reader
from clowder_aimage.content.tar import check_members
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.exporter.directory import (
    DIRECTORY_MODE,
    LinkMethod,
    faults,
    is_folding,
    link,
    new_file,
)
from clowder_aimage.exporter.layer_store import LayerStore
from clowder_aimage.exporter.plan import ExportPlan, FilePiece
from clowder_aimage.exporter.tar_layer import TarExtractor
from clowder_aimage.family.tensor_change import to_channels_last
from clowder_aimage.oci import Descriptor

JOBS = 8
_SHARE = 95  # per cent of the free disk for layers of unknown unpacked size


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """Counts of files and bytes, and of the ways in which whole files were created."""

    files: int
    size: int
    ways: Counter[LinkMethod]


class ExportWriter:
    """One export into the empty directory ``root``; errors name it ``path``."""

    def __init__(
        self,
        plan: ExportPlan,
        blobs: LayerStore,
        root: OpenDirectory,
        *,
        path: Path,
        links: bool,
        on_written: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._blobs = blobs
        self._root = root
        self._path = path
        self._on_written = on_written
        self._stopped = threading.Event()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._ways = Counter[LinkMethod]()
        self._files = self._size = 0
        self._shared = self._linkable() if links else set[Descriptor]()

    def run(self) -> ExportedFiles:
        """Write everything; JOBS threads read, hash and write.

        Raises:
            NoSpaceError: The export does not fit.
            VerificationError: A blob is damaged.
            FormatError: A layer is invalid, unpacks to too many bytes, or contains unsupported
                entries.
            NotFoundError, StoreError: A blob cannot be read, or a file cannot be written.
        """
        with faults(self._path):
            self._plan.names.fit(self._root.path)
            if is_folding(self._root):
                self._plan.names.fold()
            room = self._check_room()
            self._make()
        blobs = [*self._plan.pieces.items()]
        calls: list[tuple[int, Callable[[], None]]] = [
            *((blob.size, partial(self._gather, blob, pieces)) for blob, pieces in blobs),
            *((x.descriptor.size, partial(self._whole, x)) for x in self._plan.whole),
            *((x.descriptor.size, partial(self._unpack, x, room)) for x in self._plan.packed),
        ]
        calls.sort(key=lambda call: -call[0])  # longest first
        in_parallel([call for _, call in calls], JOBS, self._stopped.set)
        for layer in self._plan.tars:  # sequential: their contents are unknown until they are read
            self._untar(layer, room - self._size)
        with faults(self._path):
            for name in self._plan.made:  # another user may have replaced a directory by a link
                os.close(self._root.open(name))
        return ExportedFiles(self._files, self._size, self._ways)

    def _linkable(self) -> set[Descriptor]:
        """Return the whole layers that are on the same file system."""
        with faults(self._path):
            device = os.fstat(self._root.fd).st_dev
            found = {x.descriptor for x in self._plan.whole if self._blobs.is_there(x.descriptor)}
            return {one for one in found if self._blobs.path(one).stat().st_dev == device}

    def _check_room(self) -> int:
        """Return the bytes that may be written. Raises NoSpaceError if they do not suffice."""
        free = shutil.disk_usage(self._root.fd).free
        shared = [x.descriptor.size for x in self._plan.whole if x.descriptor in self._shared]
        needed = self._plan.needed - sum(shared)
        if needed > free:
            raise NoSpaceError(
                f"the export requires {needed / 1e6:.1f} MB, and {self._path.parent} has "
                f"{free / 1e6:.1f} MB free",
                remedy="export_room",
            )
        return min(MAX_PLAIN, free * _SHARE // 100)

    def _make(self) -> None:
        """Create the directories, and the files with their headers."""
        for name in self._plan.names.directories:
            self._root.make(name, DIRECTORY_MODE)
        for name, (start, size) in self._plan.made.items():
            with new_file(self._root, name) as file:
                write_all(file, start)
                os.ftruncate(file, size)
            self._count(size)

    def _count(self, size: int, way: LinkMethod | None = None) -> None:
        with self._lock:
            self._files += 1
            self._size += size
            if way is not None:
                self._ways[way] += 1

    @property
    def _buffer(self) -> memoryview:
        """Return the buffer of the calling thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = new_buffer()
        buffer: memoryview = self._own.buffer
        return buffer

    def _verified(self, content: Descriptor) -> Iterator[memoryview]:
        """Yield the bytes of a blob; its digest is verified at the end."""
        with VerifyingReader(self._blobs.open(content), content) as reader:
            yield from self._chunks(reader, content)

    def _chunks(self, source: Reader, content: Descriptor) -> Iterator[memoryview]:
        while not self._stopped.is_set():
            try:
                count = source.readinto(self._buffer)
            except OSError as error:
                reason = error.strerror or error
                raise StoreError(f"cannot read {content.digest} in the store: {reason}") from error
            if not count:
                return
            yield self._buffer[:count]
        raise ParallelStoppedError

    def _gather(self, blob: Descriptor, pieces: Sequence[FilePiece]) -> None:
        """Copy the tensors in a blob to their places."""
        left = sorted(pieces, key=lambda piece: (piece.start, piece.nbytes))  # empty ones first
        files: dict[str, int] = {}
        try:
            for name in {piece.name for piece in pieces}:
                with faults(self._path):
                    files[name] = self._root.open(name, os.O_WRONLY)
            if any(piece.shape for piece in pieces):
                self._reorder(b"".join(map(bytes, self._verified(blob))), left, files)
                return
            position = 0
            for chunk in self._verified(blob):
                with faults(self._path):
                    left = _scatter(chunk, position, left, files)
                position += len(chunk)
                self._on_written(len(chunk))
        finally:
            for file in files.values():
                os.close(file)

    def _reorder(self, data: bytes, pieces: Sequence[FilePiece], files: Mapping[str, int]) -> None:
        """Write the convolution in a blob with its channels last."""
        for piece in pieces:
            part = data[piece.start : piece.start + piece.nbytes]
            made = to_channels_last(part, piece.dtype, piece.shape) if piece.shape else part
            with faults(self._path):
                write_all(files[piece.name], memoryview(made), piece.offset)
        self._on_written(len(data))

    def _whole(self, layer: Layer) -> None:
        content = layer.descriptor
        if content in self._shared:
            with faults(self._path):
                shared = link(self._blobs.path(content), self._root, layer.name)
            if shared is not None:
                way, linked = shared
                with VerifyingReader(linked, content) as reader:
                    for chunk in self._chunks(reader, content):
                        self._on_written(len(chunk))
                return self._count(content.size, way)
        with faults(self._path), new_file(self._root, layer.name) as file:
            for chunk in self._verified(content):
                write_all(file, chunk)
                self._on_written(len(chunk))
        return self._count(content.size, LinkMethod.COPIED)

    def _unpack(self, layer: Layer, room: int) -> None:
        size = 0
        limit = room if layer.content is None else layer.content.size
        with (
            open_decompressed(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            faults(self._path),
            new_file(self._root, layer.name) as file,
        ):
            for chunk in self._chunks(source, layer.descriptor):
                write_all(file, chunk)
                size += len(chunk)
        self._on_written(layer.descriptor.size)
        self._count(size)

    def _untar(self, layer: Layer, room: int) -> None:
        limit = room if layer.content is None else layer.content.size
        name = f"layer {layer.name}"
        blob = layer.descriptor
        if self._blobs.is_there(blob) and not compression_of(blob.media_type):
            with faults(self._path), self._blobs.path(blob).open("rb", 0) as file:
                check_members(file, name)
        with (
            open_decompressed(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            faults(self._path),
        ):
            tar = TarExtractor(source, name, self._root, self._plan.names, room)
            tar.run()
        self._on_written(layer.descriptor.size)
        self._files += tar.files
        self._size += tar.size


def _scatter(
    chunk: memoryview, position: int, left: Sequence[FilePiece], files: dict[str, int]
) -> list[FilePiece]:
    """Write the parts of ``chunk``, at ``position`` of the blob, that belong to pieces.

    Return the pieces that are not complete yet.
    """
    end = position + len(chunk)
    done = 0
    for piece in left:
        if piece.start >= end:
            break
        start, stop = max(piece.start, position), min(piece.start + piece.nbytes, end)
        if start < stop:
            view = chunk[start - position : stop - position]
            write_all(files[piece.name], view, piece.offset + start - piece.start)
        done += piece.start + piece.nbytes <= end
    return list(left[done:])
