"""Models of the index of names, in Python (docs/names.md, "Short names")."""

from __future__ import annotations

from clowder_aimage.client.progress import Progress, count_progress
from clowder_aimage.client.registry import Name, Registry, connect, to_reference
from clowder_aimage.client.store import Store, open_layout
from clowder_aimage.client.transfer import create
from clowder_aimage.errors import NotFoundError


def obtain(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    memory: int | None = None,
    progress: Progress = None,
) -> str:
    """Return the digest of a model by its short name; fetch it if the store lacks it.

    The variant is that of the tag, else the first one that fits into ``memory`` bytes; None is the
    free memory. Nothing is asked. ``progress`` is called as ``pull`` does.

    Raises:
        NotFoundError: Neither the store nor the index of names has the model, or the variant.
        UsageError: A list of names is not valid. Also what ``create`` and ``pull`` raise.
    """
    from clowder_aimage.config.name_index import read_index
    from clowder_aimage.config.variant_offer import (
        find_stored_variant,
        is_stored,
        make_offer,
        pull_as,
    )
    from clowder_aimage.engine import machine

    reference, layout = to_reference(name), open_layout(store)
    if is_stored(layout, reference):
        return str(layout.resolve(reference).digest)
    model = read_index().find(reference)
    if model is None:
        raise NotFoundError(f"{reference} is neither in the store nor a short name")
    model = model.select(reference.tag)
    if stored := find_stored_variant(layout, reference, model):
        return str(layout.resolve(stored).digest)
    memory = memory or machine.read_available_memory() or machine.read_memory_limit()
    connection = connect(reference, registry)
    offer = make_offer(layout, reference, model, connection, memory)
    variant = offer.variant
    if variant.reference is None:
        return create(
            name,
            f"hf://{model.hub}@{model.revision}",
            store=store,
            dtype=variant.dtype,
            quantize=variant.quantize,
            progress=progress,
        )
    with count_progress(progress, "pulling") as counter:
        source = connection.expand(variant.reference)
        return str(pull_as(layout, source, reference, connection, counter.on_event).digest)
