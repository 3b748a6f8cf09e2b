"""Writer of an export plan: each blob is read once and hashed while it is written.

Hashing needs all bytes in memory, so a copy in the kernel would read the data twice. Tensors are
not aligned to blocks that a file system could share; whole files can be shared.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clowder_aimage.content import VerifyingReader
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import MAX_PLAIN, open_decompressed, parse_compression
from clowder_aimage.content.file_system import extend, measure_space
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.content.parallel import ParallelStoppedError, run_parallel
from clowder_aimage.content.store import UNKNOWN_SIZE, Reader
from clowder_aimage.content.tar import check_members
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.exporter.directory import (
    DIRECTORY_MODE,
    LinkMethod,
    is_folding,
    link,
    new_file,
    translate_errors,
)
from clowder_aimage.exporter.layer_store import LayerStore
from clowder_aimage.exporter.plan import ExportPlan, FileChunk
from clowder_aimage.exporter.tar_layer import TarExtractor
from clowder_aimage.family.tensor_change import to_channels_last
from clowder_aimage.oci import Descriptor

THREADS = 8
# Per cent of the free disk for layers of unknown unpacked size.
_SHARE = 95


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """Counts of files and bytes, and of the methods by which whole files were created."""

    files: int
    size: int
    methods: Counter[LinkMethod]


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
        self._local = threading.local()
        self._lock = threading.Lock()
        self._methods = Counter[LinkMethod]()
        self._files = self._size = 0
        self._shared = self._find_linkable() if links else set[Descriptor]()

    def run(self) -> ExportedFiles:
        """Write all files, with THREADS threads.

        Raises:
            NoSpaceError: The export does not fit.
            VerificationError: A blob is damaged.
            FormatError: A layer is invalid, unpacks to too many bytes, or contains unsupported
                entries.
            NotFoundError, StoreError: A blob cannot be read, or a file cannot be written.
        """
        with translate_errors(self._path):
            self._plan.names.fit(self._root.path)
            if is_folding(self._root):
                self._plan.names.fold()
            limit = self._check_space()
            self._make()
        blobs = [*self._plan.chunks.items()]
        calls: list[tuple[int, Callable[[], None]]] = [
            *((blob.size, partial(self._gather, blob, chunks)) for blob, chunks in blobs),
            *((x.descriptor.size, partial(self._write_whole, x)) for x in self._plan.whole_layers),
            *((x.descriptor.size, partial(self._unpack, x, limit)) for x in self._plan.packed),
        ]
        # Largest first, so that the threads end together.
        calls.sort(key=lambda call: -call[0])
        run_parallel([call for _, call in calls], THREADS, self._stopped.set)
        # Sequential: names in tars are unknown before, and may collide.
        for layer in self._plan.tars:
            self._untar(layer, limit - self._size)
        with translate_errors(self._path):
            # Another user may have replaced a directory by a link: opening fails then.
            for name in self._plan.generated:
                os.close(self._root.open(name))
        return ExportedFiles(self._files, self._size, self._methods)

    def _find_linkable(self) -> set[Descriptor]:
        """Return the blobs of whole layers on the same file system."""
        with translate_errors(self._path):
            device = os.fstat(self._root.fd).st_dev
            contents = {
                x.descriptor for x in self._plan.whole_layers if self._blobs.is_stored(x.descriptor)
            }
            return {
                content
                for content in contents
                if self._blobs.find_path(content).stat().st_dev == device
            }

    def _check_space(self) -> int:
        """Return the limit of bytes to write. Raises NoSpaceError: The plan exceeds the disk."""
        space = measure_space(self._root.path)
        free = UNKNOWN_SIZE if space is None else space.free
        shared = [
            x.descriptor.size for x in self._plan.whole_layers if x.descriptor in self._shared
        ]
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
        for name, (start, size) in self._plan.generated.items():
            with new_file(self._root, name) as file:
                write_all(file, start)
                extend(file, size)
            self._count(size)

    def _count(self, size: int, method: LinkMethod | None = None) -> None:
        with self._lock:
            self._files += 1
            self._size += size
            if method is not None:
                self._methods[method] += 1

    @property
    def _buffer(self) -> memoryview:
        """Return the buffer of the calling thread."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = new_buffer()
        buffer: memoryview = self._local.buffer
        return buffer

    def _read_verified(self, content: Descriptor) -> Iterator[memoryview]:
        """Yield the bytes of a blob; verify its digest at the end."""
        with VerifyingReader(self._blobs.open(content), content) as reader:
            yield from self._iter_chunks(reader, content)

    def _iter_chunks(self, source: Reader, content: Descriptor) -> Iterator[memoryview]:
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

    def _gather(self, blob: Descriptor, chunks: Sequence[FileChunk]) -> None:
        """Copy the chunks of a blob to their files."""
        # Empty chunks come first: _scatter drops complete chunks from the front.
        pending = sorted(chunks, key=lambda file_chunk: (file_chunk.start, file_chunk.nbytes))
        files: dict[str, int] = {}
        try:
            for name in {file_chunk.name for file_chunk in chunks}:
                with translate_errors(self._path):
                    files[name] = self._root.open(name, os.O_WRONLY)
            if any(file_chunk.shape for file_chunk in chunks):
                self._reorder(b"".join(map(bytes, self._read_verified(blob))), pending, files)
                return
            position = 0
            for chunk in self._read_verified(blob):
                with translate_errors(self._path):
                    pending = _scatter(chunk, position, pending, files)
                position += len(chunk)
                self._on_written(len(chunk))
        finally:
            for file in files.values():
                os.close(file)

    def _reorder(self, data: bytes, chunks: Sequence[FileChunk], files: Mapping[str, int]) -> None:
        """Write the convolution in a blob with its channels last."""
        for chunk in chunks:
            data_range = data[chunk.start : chunk.start + chunk.nbytes]
            reordered = (
                to_channels_last(data_range, chunk.dtype, chunk.shape)
                if chunk.shape
                else data_range
            )
            with translate_errors(self._path):
                write_all(files[chunk.name], memoryview(reordered), chunk.offset)
        self._on_written(len(data))

    def _write_whole(self, layer: Layer) -> None:
        content = layer.descriptor
        if content in self._shared:
            with translate_errors(self._path):
                shared = link(self._blobs.find_path(content), self._root, layer.name)
            if shared is not None:
                method, linked = shared
                with VerifyingReader(linked, content, is_shared=True) as reader:
                    for chunk in self._iter_chunks(reader, content):
                        self._on_written(len(chunk))
                return self._count(content.size, method)
        with translate_errors(self._path), new_file(self._root, layer.name) as file:
            for chunk in self._read_verified(content):
                write_all(file, chunk)
                self._on_written(len(chunk))
        return self._count(content.size, LinkMethod.COPIED)

    def _unpack(self, layer: Layer, max_size: int) -> None:
        size = 0
        limit = max_size if layer.content is None else layer.content.size
        with (
            open_decompressed(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            translate_errors(self._path),
            new_file(self._root, layer.name) as file,
        ):
            for chunk in self._iter_chunks(source, layer.descriptor):
                write_all(file, chunk)
                size += len(chunk)
        self._on_written(layer.descriptor.size)
        self._count(size)

    def _untar(self, layer: Layer, max_size: int) -> None:
        limit = max_size if layer.content is None else layer.content.size
        name = f"layer {layer.name}"
        blob = layer.descriptor
        if self._blobs.is_stored(blob) and not parse_compression(blob.media_type):
            with translate_errors(self._path), self._blobs.find_path(blob).open("rb", 0) as file:
                check_members(file, name)
        with (
            open_decompressed(self._blobs, layer.descriptor, layer.content, limit=limit) as source,
            translate_errors(self._path),
        ):
            tar = TarExtractor(source, name, self._root, self._plan.names, max_size)
            tar.run()
        self._on_written(layer.descriptor.size)
        self._files += tar.files
        self._size += tar.size


def _scatter(
    chunk: memoryview, position: int, pending: Sequence[FileChunk], files: dict[str, int]
) -> list[FileChunk]:
    """Write the ranges of the chunk at ``position`` of a blob that overlap with ``pending``.

    Return the file chunks that are not complete yet.
    """
    end = position + len(chunk)
    complete = 0
    for file_chunk in pending:
        if file_chunk.start >= end:
            break
        start, stop = (
            max(file_chunk.start, position),
            min(file_chunk.start + file_chunk.nbytes, end),
        )
        if start < stop:
            view = chunk[start - position : stop - position]
            write_all(files[file_chunk.name], view, file_chunk.offset + start - file_chunk.start)
        complete += file_chunk.start + file_chunk.nbytes <= end
    return list(pending[complete:])
