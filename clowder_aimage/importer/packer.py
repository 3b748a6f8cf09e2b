"""A plan becomes an AImage in a store: its layers, then its config and manifest, then its name."""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.content import ContentStore, Lease, bytes_body
from clowder_aimage.dialect import AImage, Dialect
from clowder_aimage.importer.blob_writer import JOBS, OnWritten, WrittenLayers, write_layers
from clowder_aimage.importer.create_plan import CreatePlan
from clowder_aimage.importer.weight_summary import WeightReport
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.schema import validate


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The new AImage, what became of its layers, and of its weights."""

    descriptor: Descriptor
    manifest: Manifest
    aimage: AImage
    layers: tuple[WrittenLayers, ...]
    report: WeightReport


def check_config(plan: CreatePlan) -> None:
    """Check the config against its schema. Raises FormatError."""
    validate("aimage-config", AImage(plan.config, ()).properties)


def pack(
    plan: CreatePlan,
    store: ContentStore,
    lease: Lease,
    reference: Reference,
    dialect: Dialect,
    *,
    jobs: int | None,
    on_written: OnWritten,
) -> PackedModel:
    """Store all that the plan names, and name it ``reference``.

    Raises:
        ModelError, VerificationError, StoreError, NoSpaceError: as ``write_layers``; what was
            stored in full stays, and nothing is named.
    """
    with store.batch():
        written = write_layers(plan, store, lease, jobs=jobs or JOBS, on_written=on_written)
    aimage = AImage(plan.config, tuple(item.layer for item in written), plan.subject)
    manifest, config = dialect.write(aimage)
    lease.add(manifest.config.digest, manifest.digest)
    store.push(manifest.config, bytes_body(config))
    store.push(manifest.descriptor, bytes_body(manifest.raw), reference)
    return PackedModel(manifest.descriptor, manifest, aimage, tuple(written), plan.report)
