"""Digests of the files that an export would write, without writing them.

The blobs of tensors are read once and verified meanwhile; a file that is a whole blob needs no
read, because its digest is in the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial

from clowder_aimage.content import ContentStore, VerifyingReader
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.content.store import Reader
from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.packing import is_packed
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.plan import ExportPlan, ExportPlanner, FileChunk
from clowder_aimage.formats.weight_file import SHARD
from clowder_aimage.layout.completeness import lease_aimage, require_complete
from clowder_aimage.layout.stored_aimage import inflate, read_stored
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.oci.digest import Hasher

_THREADS = 8


def hash_stored_files(
    store: ContentStore, reference: Reference, content: Descriptor, hash_type: str = "sha256"
) -> dict[str, str]:
    """Return the hex digests of the files of an AImage, as ``export`` writes them, by their paths.

    ``content`` is its manifest; ``reference`` names it in errors.

    Raises:
        UsageError: another tool packed it as a tar, whose files are known once it is unpacked.
        NotFoundError, FormatError, VerificationError, ModelError: as ``export``.
    """
    with store.lease(content.digest) as lease:
        stored = read_stored(store, content)
        lease_aimage(stored, lease)
        require_complete(store, reference, stored)
        inflate(store, stored)
        blobs = LayerStore(store)
        plan = ExportPlanner(blobs, stored.aimage, SHARD, is_ours(stored)).plan()
        if plan.tars:
            raise UsageError(
                f"{reference} has its files in a tar", hint="export it, and sign the directory"
            )
        return _hash_files(plan, blobs, hash_type)


def _hash_files(plan: ExportPlan, blobs: LayerStore, hash_type: str) -> dict[str, str]:
    digests: dict[str, str] = {}

    def hash_file(name: str, compute: Callable[[], str]) -> None:
        digests[name] = compute()

    run_parallel(
        [
            *(
                partial(hash_file, name, partial(_hash_gathered, plan, blobs, name, hash_type))
                for name in plan.generated
            ),
            *(
                partial(hash_file, layer.name, partial(_hash_whole, blobs, layer, hash_type))
                for layer in (*plan.whole_layers, *plan.packed)
            ),
        ],
        _THREADS,
        lambda: None,
    )
    return digests


def _hash_whole(blobs: LayerStore, layer: Layer, hash_type: str) -> str:
    content = layer.content or layer.descriptor
    if content.digest.algorithm == hash_type and (layer.content or not is_packed(layer)):
        return content.digest.encoded
    hasher = hashlib.new(hash_type)
    with open_decompressed(blobs, layer.descriptor, layer.content) as reader:
        _update(hasher, reader)
    return hasher.hexdigest()


def _update(hasher: Hasher, reader: Reader) -> None:
    buffer = new_buffer()
    while count := reader.readinto(buffer):
        hasher.update(buffer[:count])


def _hash_gathered(plan: ExportPlan, blobs: LayerStore, name: str, hash_type: str) -> str:
    """Return the digest of a file of tensors: its first bytes, and parts of blobs."""
    start, size = plan.generated[name]
    hasher, position = hashlib.new(hash_type), len(start)
    hasher.update(start)
    parts = [
        (chunk, blob)
        for blob, chunks in plan.chunks.items()
        for chunk in chunks
        if chunk.name == name
    ]
    left = Counter(blob for _, blob in parts)
    with contextlib.ExitStack() as stack:
        readers = dict[Descriptor, _PartReader]()
        for chunk, blob in sorted(parts, key=lambda part: part[0].offset):
            hasher.update(bytes(chunk.offset - position))
            position = chunk.offset + chunk.nbytes
            if blob not in readers or readers[blob].position > chunk.start:
                readers[blob] = stack.enter_context(contextlib.closing(_PartReader(blobs, blob)))
            readers[blob].read(chunk, hasher)
            left[blob] -= 1
            # Groups of experts are interleaved with others.
            if not left[blob]:
                readers.pop(blob).finish()
    hasher.update(bytes(size - position))
    return hasher.hexdigest()


class _PartReader:
    """The bytes of a blob in ascending parts; ``finish`` verifies the whole of it."""

    def __init__(self, blobs: LayerStore, blob: Descriptor) -> None:
        self._reader = VerifyingReader(blobs.open(blob), blob)
        self._buffer = new_buffer()
        self.position = 0

    def read(self, chunk: FileChunk, hasher: Hasher) -> None:
        """Add the bytes of a chunk to a hash."""
        self._advance(chunk.start, None)
        self._advance(chunk.start + chunk.nbytes, hasher)

    def finish(self) -> None:
        """Read the rest. Raises VerificationError."""
        while self._reader.readinto(self._buffer):
            pass
        self.close()

    def close(self) -> None:
        """Close the blob."""
        self._reader.close()

    def _advance(self, end: int, hasher: Hasher | None) -> None:
        while self.position < end:
            count = self._reader.readinto(self._buffer[: end - self.position])
            if not count:
                raise FormatError("a blob ends before its tensor")
            if hasher is not None:
                hasher.update(self._buffer[:count])
            self.position += count
