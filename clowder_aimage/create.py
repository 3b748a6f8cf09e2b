"""create: a model directory becomes an AImage in a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content import ContentStore, bytes_body
from clowder_aimage.dialect import DEFAULT, DIALECTS, AImage
from clowder_aimage.importer import Plan, Provenance, make_plan, take_inventory, write_layers
from clowder_aimage.importer.write import OnWritten, Written
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.schema import validate

_JOBS = 8  # threads that hash and write


@dataclass(frozen=True, slots=True)
class Created:
    """The new AImage, and what became of its layers."""

    descriptor: Descriptor
    manifest: Manifest
    layers: tuple[Written, ...]


def create(
    store: ContentStore,
    reference: Reference,
    directory: Path,
    *,
    dialect: str = DEFAULT,
    algorithm: str = "sha256",
    provenance: Provenance | None = None,
    jobs: int | None = None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> Created:
    """Pack the model in ``directory`` and name it ``reference``.

    The same directory gives the same manifest digest on every machine. ``algorithm`` hashes the
    layers and the config; the manifest is always known by its sha256, for registries' sake.

    Raises:
        ModelError: the directory is not a model that can be packed; nothing was written then,
            unless a file changed in the middle.
        FormatError: the provenance is not what the config's schema allows; nothing was written.
        StoreError, NoSpaceError: the store cannot keep it; what was stored in full stays.
    """
    chosen = DIALECTS[dialect]
    plan = make_plan(take_inventory(directory), chosen, provenance or Provenance(), algorithm)
    validate("aimage-config", AImage(plan.config, ()).properties)
    on_plan(plan)
    with store.lease() as lease:
        with store.batch():
            written = write_layers(plan, store, lease, jobs=jobs or _JOBS, on_written=on_written)
        aimage = AImage(plan.config, tuple(item.layer for item in written))
        manifest, config = chosen.write(aimage)
        lease.add(manifest.config.digest, manifest.digest)
        store.push(manifest.config, bytes_body(config))
        store.push(manifest.descriptor, bytes_body(manifest.raw), reference)
    return Created(manifest.descriptor, manifest, tuple(written))
