"""Functions that make and move AImages, in the Python interface."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from clowder_aimage import __version__
from clowder_aimage.client.progress import Progress, ProgressCounter, count_progress
from clowder_aimage.client.registry import Name, Registry, connect, to_reference
from clowder_aimage.client.store import Store, open_layout
from clowder_aimage.config.user_directory import open_dialect_cache
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.importer import PackedModel, Provenance, Recipe
from clowder_aimage.importer.hub_model import HubName, find_model
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.importer.request_default import build_request_defaults
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from clowder_aimage.content import Lease
    from clowder_aimage.layout.stored_aimage import StoredAImage
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.registry import ClientOptions


def pull(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    components: Sequence[str] = (),
    include: Sequence[str] = (),
    progress: Progress = None,
) -> str:
    """Pull an AImage from the registry in its name; return its digest.

    ``components`` and ``include`` (patterns of names) select a part of it. ``progress`` is called
    with the bytes done and their total, from several threads, one at a time; True shows a bar.

    Raises:
        UsageError: The name has no registry, or another than ``registry``.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be read.
        VerificationError, FormatError: The bytes are not those of the digest.
        StoreError, NoSpaceError: It cannot be stored.
    """
    from clowder_aimage.pull import PullOptions
    from clowder_aimage.pull import pull as pull_aimage

    layers = LayerSelection(tuple(components), tuple(include)) if components or include else None
    reference, layout = to_reference(name), open_layout(store)
    with count_progress(progress, "pulling") as counter:
        options = PullOptions(layers=layers, on_event=counter.on_event)
        pulled = pull_aimage(reference, layout, connect(reference, registry), options)
    return str(pulled.root.digest)


def push(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    dialect: str | None = None,
    progress: Progress = None,
) -> str:
    """Push an AImage to the registry in its name; return its digest in the registry.

    If the registry refuses this kind of manifest it is rewritten; ``dialect`` chooses the kind.
    ``progress`` is called as ``pull`` does.

    Raises:
        UsageError: The name has no registry, or another than ``registry``.
        NotFoundError: The AImage is not in the store.
        UnauthorizedError, NetworkError, RegistryError: It cannot be sent.
        VerificationError: The copy in the store is damaged.
    """
    from clowder_aimage.push import push as push_aimage

    reference, layout = to_reference(name), open_layout(store)
    with count_progress(progress, "pushing") as counter:
        sent = push_aimage(
            layout,
            reference,
            connect(reference, registry),
            dialect=dialect,
            on_event=counter.on_event,
            ladder=open_dialect_cache(),
        )
    return str(sent.digest)


def create(
    name: Name,
    path: str | os.PathLike[str] | None = None,
    *,
    store: Store | None = None,
    base: Name | None = None,
    loras: Sequence[str | tuple[str, float]] = (),
    dtype: str | None = None,
    quantize: str | None = None,
    license: str | None = None,  # noqa: A002 - the field's name
    source: str | None = None,
    annotations: Mapping[str, str] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    progress: Progress = None,
) -> str:
    """Pack a model as an AImage; return its digest. The digest depends on the model alone.

    ``path`` is a directory or file, or ORG/REPO or hf://ORG/REPO of the Hugging Face hub. ``base``
    is the AImage in the store that an adapter or a ControlNet at ``path`` belongs to. Without a
    path, ``loras`` are packed beside ``base`` and used by default; no other option applies.

    ``dtype`` is f32, f16, bf16 or auto; ``quantize`` is int8, int4 and so on, for the transformer
    or for each component (``transformer=int4,text_encoder=int8``). ``annotations`` of the manifest
    change the digest. ``steps`` and ``guidance`` are the defaults of pictures, None for those that
    follow from the model. ``progress`` is called as ``pull`` does, for each stage from zero.

    Raises:
        ModelError, FormatError: It is not a model that can be packed.
        UsageError: The options do not fit the model, or an extra is missing.
        NotFoundError: The base is not in the store. Also an adapter, or a model of the hub.
        UnauthorizedError, NetworkError: The hub does not give the model.
        StoreError, NoSpaceError: It cannot be stored.
    """
    recipe = Recipe.parse(dtype, quantize)
    defaults = build_request_defaults(steps, guidance)
    provenance = Provenance(license, source, annotations=annotations or {}, defaults=defaults)
    reference, layout = to_reference(name), open_layout(store)
    base_reference = None if base is None else to_reference(base)
    with count_progress(progress, "packing") as counter:
        if path is None:
            if base_reference is None or not loras or recipe != Recipe():
                raise UsageError("create needs a path, or a base and loras without other options")
            if provenance != Provenance():
                raise UsageError("loras are packed beside a base without other options")
            packed = _combine(layout, reference, base_reference, loras, counter)
        elif loras:
            raise UsageError("loras are packed beside a base, without a path")
        else:
            packed = _create(layout, reference, path, base_reference, provenance, recipe, counter)
    return str(packed.descriptor.digest)


def _create(
    layout: ImageLayout,
    reference: Reference,
    path: str | os.PathLike[str],
    base: Reference | None,
    provenance: Provenance,
    recipe: Recipe,
    counter: ProgressCounter,
) -> PackedModel:
    from clowder_aimage.create import create as create_aimage

    hub_name = HubName.parse(os.fspath(path))
    if hub_name is not None:
        fetched = find_model(
            hub_name,
            ModelForm(),
            __version__,
            lambda plan: counter.begin(plan.size),
            counter.advance,
        )
        path = fetched.path
        provenance = replace(provenance, source=provenance.source or fetched.source)
    return create_aimage(
        layout,
        reference,
        Path(path),
        form=ModelForm(is_chosen=hub_name is not None),
        base=base,
        provenance=provenance,
        recipe=recipe,
        origin=None if hub_name is None else hub_name.origin,
        on_survey=counter.begin,
        on_surveyed=counter.advance,
        on_plan=lambda plan: counter.begin(plan.size),
        on_written=lambda written: counter.advance(written.layer.descriptor.size),
    )


def _combine(
    layout: ImageLayout,
    reference: Reference,
    base: Reference,
    loras: Sequence[str | tuple[str, float]],
    counter: ProgressCounter,
) -> PackedModel:
    from clowder_aimage.adapt import combine
    from clowder_aimage.client.picture_order import read_uses
    from clowder_aimage.generation.request import GenerateRequest

    uses = read_uses(loras)
    with layout.lease() as lease:
        finder = create_finder(layout, lease, cache(partial(connect, base, None)))
        adapters = finder.find_all(GenerateRequest.of("", loras=uses))
        pairs = zip(adapters, uses, strict=True)
        return combine(
            layout,
            base,
            reference,
            [(adapter, adapter.resolve_strength(use.strength)) for adapter, use in pairs],
            on_plan=lambda plan: counter.begin(plan.size),
            on_written=lambda written: counter.advance(written.layer.descriptor.size),
        )


def create_finder(
    layout: ImageLayout, lease: Lease, connect_once: Callable[[], ClientOptions]
) -> AdapterFinder:
    """Return a finder of adapters: files, and AImages; missing ones are pulled, and leased."""
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.model.runnable import open_runnable
    from clowder_aimage.pull import pull

    def open_adapter(reference: Reference) -> StoredAImage:
        try:
            return open_runnable(layout, reference, lease)
        except NotFoundError:
            if connect_once().expand(reference).registry is None:
                raise
        return open_runnable(layout, pull(reference, layout, connect_once()).name, lease)

    return AdapterFinder(layout, open_adapter, has_files=True)
