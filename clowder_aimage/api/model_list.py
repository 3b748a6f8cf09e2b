"""What the store has, as the interfaces ask for it: by exact name, whole or in part.

All but ``forget`` reads files and belongs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from clowder_aimage.api.service import Service
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_completeness
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.index import same_name
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Digest, Reference

_log = logging.getLogger("aimage.worker")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A name in the store, and the manifest that it means. ``size`` is that of all blobs,
    ``missing`` are those that are not here."""

    reference: Reference
    descriptor: Descriptor
    size: int
    missing: tuple[Descriptor, ...]


def items(store: ImageLayout) -> list[ModelEntry]:
    """Every name that a client could ask for, in order; what cannot be read is left out."""
    found = []
    for name, descriptor in store.tags():
        with contextlib.suppress(AImageError):  # another tool's name, or a manifest that is damaged
            found.append(item_of(store, Reference.parse(name), descriptor))
    return sorted(found, key=lambda item: str(item.reference))


def item(store: ImageLayout, reference: Reference) -> ModelEntry | None:
    """What is here by this very name. Raises ContentError, StoreError: it is damaged."""
    descriptor = entry(store, reference)
    return None if descriptor is None else item_of(store, reference, descriptor)


def entry(store: ImageLayout, reference: Reference) -> Descriptor | None:
    """What the store has by this very name: not, for a digest, by another name."""
    wanted = index_name(reference)
    meant = Reference.parse(wanted)
    for name, descriptor in store.tags():
        is_meant = name == wanted or same_name(name, meant)
        if is_meant and reference.digest in (None, descriptor.digest):
            return descriptor
    return None


def item_of(store: ImageLayout, reference: Reference, descriptor: Descriptor) -> ModelEntry:
    """What a name means that stands for a manifest. Raises as ``item``."""
    found = check_completeness(store, descriptor)
    return ModelEntry(reference, descriptor, found.total, found.missing)


def properties(store: ImageLayout, reference: Reference) -> dict[str, Any]:
    """The config of the AImage; empty for what is none, or cannot be read."""
    try:
        return dict(read_aimage(store, reference).aimage.properties)
    except AImageError:
        return {}


def changed(store: ImageLayout, descriptor: Descriptor) -> datetime:
    """When the manifest came here."""
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(store.path(descriptor).stat().st_mtime, UTC)
    return datetime.fromtimestamp(0, UTC)


def unknown(reference: Reference) -> NotFoundError:
    """That there is no such name here: the store's own words hold a path of this machine."""
    hint = "pull it first" if reference.registry else "create it, or name a registry"
    return NotFoundError(f"model {reference} not found here", hint=hint)


async def forget(service: Service, reference: Reference) -> None:
    """Let go of a name, of the model in memory that nobody uses, and of the blobs that nothing
    needs any more; those that came lately stay for a while ('aimage gc', --grace).

    Raises:
        NotFoundError: there is no such name.
        ApiError: 409, it is pinned.
        StoreError: the store cannot be written.
    """
    store = service.store
    found = await asyncio.to_thread(entry, store, reference)
    if found is None:
        raise unknown(reference)
    if await asyncio.to_thread(store.pins.get, index_name(reference)) is not None:
        raise ApiError(
            409, f"{reference} is pinned; let it go first: aimage unpin {reference}", code="pinned"
        )
    try:
        await asyncio.to_thread(store.untag, reference)
    except NotFoundError as error:
        if await asyncio.to_thread(entry, store, reference) is None:
            raise unknown(reference) from None  # another was faster
        raise UsageError(f"{reference} is in a store that is only read") from error
    others = await asyncio.to_thread(lambda: {one.digest for _, one in store.tags()})
    if found.digest not in others:
        await let_go(service, found.digest)
    service.has_gone()
    await asyncio.to_thread(_collect, store)


async def let_go(service: Service, digest: Digest) -> None:
    """Unload a model: now where nobody uses it, else when its last request has ended."""
    for model in service.engine.loaded():
        if model.digest == digest:
            model.keep_alive = 0.0
    await service.engine.expire()


def _collect(store: ImageLayout) -> None:
    """Remove what nothing needs. Where that fails the name is gone all the same."""
    try:
        Collector(store).run()
    except AImageError as error:
        _log.warning("collection failed", extra={"reason": error.message})
