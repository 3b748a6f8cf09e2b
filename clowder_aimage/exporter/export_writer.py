"""A plan carried out: each blob is read once, and hashed while it is written.

Because of the hash every byte passes through memory, a chunk at a time. The kernel's own ways
(``copy_file_range``, ``sendfile``) would be a second pass over the same bytes then, and tensors do
not lie at blocks that a file system could share; whole files may, and with ``links`` do.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clowder_aimage.content import VerifyingReader
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import MAX_PLAIN, open_plain
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.exporter.directory import faults, is_folding
from clowder_aimage.exporter.export_plan import ExportPlan, FilePiece
from clowder_aimage.exporter.layer_store import LayerStore
from clowder_aimage.exporter.output_file import LinkMethod, link, make_directories, new_file
from clowder_aimage.exporter.tar_layer import TarExtractor
from clowder_aimage.oci import Descriptor

JOBS = 8  # threads that read, hash and write
_SHARE = 95  # per cent of the free disk that may be taken by what says nothing of its size
OnWritten = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """Counts of files and bytes, and of the ways that whole files were made."""

    files: int
    size: int
    ways: Counter[LinkMethod]


def write_files(
    plan: ExportPlan,
    blobs: LayerStore,
    root: Path,
    *,
    path: Path,
    links: bool,
    on_written: OnWritten,
    jobs: int = JOBS,
) -> ExportedFiles:
    """Fill ``root``, which is empty, and which errors call ``path``.

    Raises:
        NoSpaceError: it cannot fit, or did not.
        VerificationError: a blob is damaged.
        FormatError: a layer is not what it should be, unpacks to too much, or to what cannot be
            there.
        NotFoundError, StoreError: a blob cannot be read, or a file not written.
    """
    return _Writer(plan, blobs, root, path, links, on_written).run(jobs)


class _Writer:
    """State that the threads of one export share."""

    def __init__(
        self,
        plan: ExportPlan,
        blobs: LayerStore,
        root: Path,
        path: Path,
        links: bool,
        on_written: OnWritten,
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

    def run(self, jobs: int) -> ExportedFiles:
        with faults(self._path):
            self._plan.names.fit(self._root)
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
        calls.sort(key=lambda call: -call[0])  # what takes longest first
        in_parallel([call for _, call in calls], jobs, self._stopped.set)
        for layer in self._plan.tars:  # one after the other: what is in them is not known before
            self._untar(layer, room - self._size)
        with faults(self._path):
            for name in self._plan.made:
                _synchronise(self._root / name)
        return ExportedFiles(self._files, self._size, self._ways)

    def _linkable(self) -> set[Descriptor]:
        """Return the whole layers that lie on the same file system."""
        with faults(self._path):
            device = self._root.stat().st_dev
            found = {x.descriptor for x in self._plan.whole if self._blobs.is_there(x.descriptor)}
            return {one for one in found if self._blobs.path(one).stat().st_dev == device}

    def _check_room(self) -> int:
        """Return the bytes that may be written. Raises NoSpaceError where that is not enough."""
        free = shutil.disk_usage(self._root).free
        shared = [x.descriptor.size for x in self._plan.whole if x.descriptor in self._shared]
        needed = self._plan.needed - sum(shared)
        if needed > free:
            raise NoSpaceError(
                f"the directory takes {needed} bytes, and {self._path.parent} has room for {free}",
                remedy="export_room",
            )
        return min(MAX_PLAIN, free * _SHARE // 100)

    def _make(self) -> None:
        """Make the directories, and the files up to their headers."""
        for name in self._plan.names.directories:
            make_directories(self._root, name)
        for name, (start, size) in self._plan.made.items():
            file = new_file(self._root / name)
            try:
                write_all(file, start)
                os.ftruncate(file, size)
            finally:
                os.close(file)
            self._count(size)

    def _count(self, size: int, way: LinkMethod | None = None) -> None:
        with self._lock:
            self._files += 1
            self._size += size
            if way is not None:
                self._ways[way] += 1

    @property
    def _buffer(self) -> memoryview:
        """Return the calling thread's."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = new_buffer()
        buffer: memoryview = self._own.buffer
        return buffer

    def _chunks(self, content: Descriptor, *, is_counted: bool = True) -> Iterator[memoryview]:
        """Yield the bytes of a blob, verified once there are no more."""
        with VerifyingReader(self._blobs.open(content), content) as reader:
            while True:
                if self._stopped.is_set():
                    raise ParallelStoppedError
                with _reading(content):
                    count = reader.readinto(self._buffer)
                if not count:
                    return
                yield self._buffer[:count]
                if is_counted:
                    self._on_written(count)

    def _gather(self, blob: Descriptor, pieces: Sequence[FilePiece]) -> None:
        """Copy the tensors in a blob, each to its place."""
        left = sorted(pieces, key=lambda piece: (piece.start, piece.nbytes))  # empty ones first
        files: dict[str, int] = {}
        try:
            for name in {piece.name for piece in pieces}:
                with faults(self._path):
                    files[name] = os.open(self._root / name, os.O_WRONLY | os.O_CLOEXEC)
            position = 0
            for chunk in self._chunks(blob):
                with faults(self._path):
                    left = _scatter(chunk, position, left, files)
                position += len(chunk)
        finally:
            for file in files.values():
                os.close(file)

    def _whole(self, layer: Layer) -> None:
        target, content = self._root / layer.name, layer.descriptor
        is_shared = content in self._shared
        if is_shared:
            for _ in self._chunks(content):
                pass
            with faults(self._path):
                way = link(self._blobs.path(content), target)
            if way is not None:
                return self._count(content.size, way)
        with faults(self._path):
            file = new_file(target)
        try:
            for chunk in self._chunks(content, is_counted=not is_shared):
                with faults(self._path):
                    write_all(file, chunk)
            with faults(self._path):
                os.fsync(file)
        finally:
            os.close(file)
        return self._count(content.size, LinkMethod.COPIED)

    def _unpack(self, layer: Layer, room: int) -> None:
        size = 0
        limit = room if layer.content is None else layer.content.size
        with (
            open_plain(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            faults(self._path),
        ):
            file = new_file(self._root / layer.name)
            try:
                while count := self._read(source, layer.descriptor):
                    write_all(file, self._buffer[:count])
                    size += count
                os.fsync(file)
            finally:
                os.close(file)
        self._on_written(layer.descriptor.size)
        self._count(size)

    def _read(self, source: object, content: Descriptor) -> int:
        if self._stopped.is_set():
            raise ParallelStoppedError
        with _reading(content):
            return readinto(source, self._buffer)  # type: ignore[arg-type]

    def _untar(self, layer: Layer, room: int) -> None:
        limit = room if layer.content is None else layer.content.size
        with (
            open_plain(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            faults(self._path),
        ):
            unpacked = TarExtractor(
                source, f"layer {layer.name}", self._root, self._plan.names, room
            )
            unpacked.run()
        self._on_written(layer.descriptor.size)
        self._files += unpacked.done.files
        self._size += unpacked.done.size


def _scatter(
    chunk: memoryview, position: int, left: Sequence[FilePiece], files: dict[str, int]
) -> list[FilePiece]:
    """Write what of ``chunk``, which begins at ``position`` of the blob, belongs to pieces.

    Returns:
        the pieces that are not whole yet. Raises OSError.
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


@contextmanager
def _reading(content: Descriptor) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot read {content.digest} in the store: {error.strerror or error}"
        ) from error


def _synchronise(path: Path) -> None:
    """Flush a file to the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
