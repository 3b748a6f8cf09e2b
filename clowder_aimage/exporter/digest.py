"""Digests of the files that an export would write, without writing them.

The blobs of tensors are read once and verified meanwhile; a file that is a whole blob needs no
read, because its digest is in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from clowder_aimage.content import ContentStore
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.content.store import Reader
from clowder_aimage.dialect import Layer
from clowder_aimage.dialect.packing import is_packed
from clowder_aimage.errors import UsageError
from clowder_aimage.exporter.file_segment import Segment, list_segments, read_verified
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.plan import ExportPlan, ExportPlanner
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
                partial(hash_file, name, partial(_hash_gathered, segments, blobs, hash_type))
                for name, segments in list_segments(plan).items()
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


def _hash_gathered(segments: Sequence[Segment], blobs: LayerStore, hash_type: str) -> str:
    hasher = hashlib.new(hash_type)
    read_verified(blobs, segments, hasher.update)
    return hasher.hexdigest()
