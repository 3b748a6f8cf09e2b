"""The offer for a short name: variants with the bytes to download, and the one that fits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from clowder_aimage import __version__
from clowder_aimage.config.name_index import NamedModel, Variant, choose
from clowder_aimage.content import OnEvent
from clowder_aimage.errors import NotFoundError
from clowder_aimage.importer.hub_model import HubName, plan_fetch
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.registry import ClientOptions


@dataclass(frozen=True, slots=True)
class Offer:
    """A model of the index for a name that the store lacks, and the variant that is chosen.

    ``fits`` is None if it is unknown; ``memory`` is what is free.
    """

    reference: Reference
    model: NamedModel
    variant: Variant
    fits: bool | None
    memory: int | None


def is_stored(layout: ImageLayout, reference: Reference) -> bool:
    """Return True if the store has a name."""
    with contextlib.suppress(NotFoundError):
        layout.resolve(reference)
        return True
    return False


def find_stored_variant(
    layout: ImageLayout, reference: Reference, model: NamedModel
) -> Reference | None:
    """Return the first variant of a model that the store has under its own name, or None."""
    names = (replace(reference, tag=variant.name) for variant in model.variants)
    return next((name for name in names if is_stored(layout, name)), None)


def make_offer(
    layout: ImageLayout,
    reference: Reference,
    model: NamedModel,
    connection: ClientOptions,
    memory: int | None,
) -> Offer:
    """Choose the variant that fits into ``memory``; unknown sizes are asked for.

    Raises as ``find_model`` and ``pull``.
    """
    model = replace(model, variants=_measure(layout, model, connection))
    choice = choose(model.variants, memory)
    return Offer(reference, model, choice.variant, choice.fits, memory)


def pull_as(
    layout: ImageLayout,
    source: Reference,
    name: Reference,
    connection: ClientOptions,
    on_event: OnEvent,
) -> Descriptor:
    """Pull an AImage and give it a local name too; return its manifest. Raises as ``pull``."""
    pulled = pull(source, layout, connection, PullOptions(on_event=on_event))
    with layout.keep():
        descriptor = layout.resolve(pulled.name)
        layout.tag(descriptor, name)
    return descriptor


def _measure(
    layout: ImageLayout, model: NamedModel, connection: ClientOptions
) -> tuple[Variant, ...]:
    """Return the variants with the bytes to download."""
    from_hub = [variant for variant in model.variants if variant.reference is None]
    download = _measure_hub(model, from_hub) if from_hub else None
    return tuple(
        _measure_packed(layout, variant, connection)
        if variant.reference is not None
        else replace(variant, download=variant.download if download is None else download)
        for variant in model.variants
    )


def _measure_hub(model: NamedModel, variants: list[Variant]) -> int | None:
    """Return the bytes that the cache of the hub lacks; None if the index has them."""
    asks_hub = any(variant.download is None for variant in variants)
    name = HubName(model.hub, model.revision)
    plan = plan_fetch(name, ModelForm(), __version__, asks_hub=asks_hub)
    return None if plan is None else plan.size


def _measure_packed(layout: ImageLayout, variant: Variant, connection: ClientOptions) -> Variant:
    """Return a variant with the sizes that the manifest in the registry states."""
    if variant.reference is None or (variant.download is not None and variant.size is not None):
        return variant
    reference = connection.expand(variant.reference)
    plan = pull(reference, layout, connection, PullOptions(is_dry_run=True)).plan
    missing = sum(layout.compute_missing_size(blob) for blob in plan.list_missing(layout))
    size = sum(blob.size for blob in plan.blobs)
    return replace(variant, download=missing, size=variant.size or size)
