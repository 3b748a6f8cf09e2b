"""export: write an AImage in a store as the directory that it was created from."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content import ContentStore
from clowder_aimage.content.atomic_file import open_atomic, write_all
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.exporter.directory import LinkMethod, new_directory, new_file, translate_errors
from clowder_aimage.exporter.family_plan import FamilyPlanner
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.plan import ExportPlan, ExportPlanner
from clowder_aimage.exporter.writer import ExportWriter
from clowder_aimage.family.component_names import DIFFUSERS
from clowder_aimage.family.image_family import find_family
from clowder_aimage.formats.weight_file import SHARD
from clowder_aimage.layout.completeness import open_complete, require_complete
from clowder_aimage.layout.stored_aimage import (
    MAX_CONFIG_SIZE,
    StoredAImage,
    interpret,
    lease_manifest,
    list_packed_layers,
    read_aimage,
    read_manifest,
)
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor.config_fields import parse_object


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """Counts of the exported content: ``files`` with ``size`` bytes in total.

    ``tensors`` counts those in weight files. ``methods`` counts how whole files were written,
    ``quantized`` has the form of components' weights.
    """

    descriptor: Descriptor
    files: int
    tensors: int
    size: int
    methods: Counter[LinkMethod]
    quantized: Mapping[str, str]


def export(
    store: ContentStore,
    reference: Reference,
    directory: Path,
    *,
    links: bool = False,
    layout: str | None = None,
    shard: int = SHARD,
    on_plan: Callable[[ExportPlan], None] = lambda _: None,
    on_written: Callable[[int], None] = lambda _: None,
) -> ExportSummary:
    """Write the AImage ``reference`` to ``directory``.

    The directory must not exist, or be empty. It is complete or not created. An image model may be
    written in another ``layout``, one of LAYOUTS. With ``links``, whole files share their bytes
    with the store if the file system can. ``on_plan`` is called before a byte is written,
    ``on_written`` with the number of bytes that were read and written.

    Raises:
        UsageError: the directory is not a valid target; zstd is needed and not installed; the
            layout cannot express the model.
        NotFoundError: the AImage is not in the store, or not all of it.
        FormatError, VerificationError: it is not an AImage, does not form a directory, or a blob is
            damaged or does not match its layer.
        ModelError: a quantized weight has no name in any vendor's form.
        StoreError, NoSpaceError: it cannot be written.
    """
    with store.lease() as lease:
        lease_manifest(store, reference, lease)
        stored = read_aimage(store, reference)
        lease.add(*(layer.descriptor.digest for layer in stored.aimage.layers))
        pairs = zip(stored.aimage.layers, stored.manifest.layers, strict=True)
        # A blob may be stored in its compressed form only.
        if not all(
            store.exists(layer.descriptor) or store.exists(compressed)
            for layer, compressed in pairs
        ):
            require_complete(store, reference, stored)
        blobs = LayerStore(store, list_packed_layers(store, stored))
        with new_directory(directory) as root:
            plan = _create_planner(blobs, stored, reference, layout, shard).plan()
            on_plan(plan)
            written = ExportWriter(
                plan, blobs, root, path=directory, links=links, on_written=on_written
            ).run()
    store.use(stored.descriptor)
    return ExportSummary(
        stored.descriptor,
        written.files,
        plan.tensors,
        written.size,
        written.methods,
        plan.quantized,
    )


def _create_planner(
    blobs: LayerStore, stored: StoredAImage, reference: Reference, layout: str | None, shard: int
) -> ExportPlanner | FamilyPlanner:
    if layout is None:
        return ExportPlanner(blobs, stored.aimage, shard, is_ours(stored))
    family = find_family(stored.aimage.properties.get("family"))
    if family is None or layout not in (DIFFUSERS, *family.layouts):
        raise UsageError(
            f"{reference} is not an image model that {layout} has a layout for",
            remedy="export_model",
        )
    if layout == DIFFUSERS:
        return ExportPlanner(blobs, stored.aimage, shard, is_ours(stored))
    return FamilyPlanner(blobs, stored.aimage, layout, family)


def is_adapter(store: ContentStore, reference: Reference) -> bool:
    """Return True if an AImage in the store is an adapter. Raises NotFoundError, FormatError."""
    return read_aimage(store, reference).aimage.properties.get("format") == "lora"


ADAPTER_DIALECTS = ("diffusers", "comfyui", "kohya", "peft")


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """An adapter that was written: its manifest, the number of tensors, and the bytes."""

    descriptor: Descriptor
    tensors: int
    size: int


def export_adapter(
    store: ContentStore, reference: Reference, path: Path, dialect: str
) -> ExportedAdapter:
    """Write the adapter ``reference`` in the names of another tool, one of ADAPTER_DIALECTS.

    It is a new safetensors file, or for peft a new directory. The layers are those of its base, if
    the store has it, else those of Z-Image.

    Raises:
        UsageError: it is not an adapter, the dialect cannot express it, or ``path`` exists.
        NotFoundError: it is not in the store, or not all of it.
        FormatError: it is damaged.
        StoreError, NoSpaceError: it cannot be written.
    """
    from clowder_aimage.adapter.writer import convert_adapter

    with store.lease() as lease:
        stored = open_complete(store, reference, lease)
        weights = [layer for layer in stored.aimage.layers if layer.name.endswith(".safetensors")]
        if stored.aimage.properties.get("format") != "lora" or len(weights) != 1:
            raise UsageError(f"{reference} is not an adapter", remedy="export_model")
        converted = convert_adapter(
            Path(store.find_path(weights[0].descriptor)),
            dialect,
            label=str(reference),
            shapes=_read_base_shapes(store, stored),
            config=_read_adapter_config(store, stored),
        )
    size = _write_adapter(path, converted.encode(), converted.config)
    return ExportedAdapter(stored.descriptor, len(converted.tensors), size)


def _read_base_shapes(
    store: ContentStore, stored: StoredAImage
) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the base's tensors, or None if the store lacks it."""
    subject = stored.aimage.subject
    if subject is None or subject.media_type in mediatype.INDEXES:
        return None
    try:
        base = interpret(store, subject, read_manifest(store, subject)).aimage
    except (NotFoundError, FormatError):
        return None
    return {layer.name: layer.shape for layer in base.layers if layer.shape} or None


def _read_adapter_config(store: ContentStore, stored: StoredAImage) -> dict[str, Any] | None:
    layer = stored.aimage.find("adapter_config.json")
    if layer is None or layer.descriptor.size > MAX_CONFIG_SIZE:
        return None
    with store.open(layer.descriptor) as file:
        return parse_object(layer.name, file.read(layer.descriptor.size))


def _write_adapter(path: Path, data: Iterator[bytes], config: Mapping[str, Any] | None) -> int:
    size = 0

    def write(fd: int) -> None:
        nonlocal size
        for chunk in data:
            write_all(fd, chunk)
            size += len(chunk)

    if config is not None:
        text = json.dumps(config, indent=2).encode() + b"\n"
        with new_directory(path) as root:
            with translate_errors(path), new_file(root, "adapter_config.json") as fd:
                write_all(fd, text)
            with translate_errors(path), new_file(root, "adapter_model.safetensors") as fd:
                write(fd)
        return size + len(text)
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already", hint="choose another name")
    with translate_errors(path), open_atomic(path) as file:
        write(file.fileno())
    return size
