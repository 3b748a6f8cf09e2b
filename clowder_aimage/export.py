"""export: write an AImage in a store as the directory it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content import ContentStore
from clowder_aimage.exporter.directory import LinkMethod, whole_directory
from clowder_aimage.exporter.export_plan import ExportPlan, ExportPlanner
from clowder_aimage.exporter.export_writer import ExportWriter
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.weight_file import SHARD
from clowder_aimage.layout.completeness import require_complete
from clowder_aimage.layout.stored_aimage import hold, packed_layers, read_aimage
from clowder_aimage.oci import Descriptor, Reference


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """Counts of the exported content: ``files`` with ``size`` bytes in total.

    ``tensors`` counts those in weight files. ``ways`` counts how whole files were written,
    ``quantized`` has the form of components' weights.
    """

    descriptor: Descriptor
    files: int
    tensors: int
    size: int
    ways: Counter[LinkMethod]
    quantized: Mapping[str, str]


def export(
    store: ContentStore,
    reference: Reference,
    directory: Path,
    *,
    links: bool = False,
    shard: int = SHARD,
    on_plan: Callable[[ExportPlan], None] = lambda _: None,
    on_written: Callable[[int], None] = lambda _: None,
) -> ExportSummary:
    """Write the AImage ``reference`` to ``directory``, which must not exist, or be empty.

    The directory is complete or not created. With ``links``, whole files share their bytes with the
    store if the file system can. ``on_plan`` is called before a byte is written, ``on_written``
    with the number of bytes that were read and written.

    Raises:
        UsageError: the directory is not a valid target; zstd is needed and not installed.
        NotFoundError: the AImage is not in the store, or not all of it.
        FormatError, VerificationError: it is not an AImage, does not form a directory, or a blob is
            damaged or does not match its layer.
        ModelError: a quantized weight has no name in any vendor's form.
        StoreError, NoSpaceError: it cannot be written.
    """
    with store.lease() as lease:
        hold(store, reference, lease)
        stored = read_aimage(store, reference)
        lease.add(*(layer.descriptor.digest for layer in stored.aimage.layers))
        pairs = zip(stored.aimage.layers, stored.manifest.layers, strict=True)
        # a blob may be stored in its compressed form only
        if not all(store.exists(layer.descriptor) or store.exists(came) for layer, came in pairs):
            require_complete(store, reference, stored)
        blobs = LayerStore(store, packed_layers(store, stored))
        with whole_directory(directory) as root:
            plan = ExportPlanner(blobs, stored.aimage, shard, is_ours(stored)).plan()
            on_plan(plan)
            written = ExportWriter(
                plan, blobs, root, path=directory, links=links, on_written=on_written
            ).run()
    store.use(stored.descriptor)
    return ExportSummary(
        stored.descriptor, written.files, plan.tensors, written.size, written.ways, plan.quantized
    )
