"""The models of the store by exact name, complete or partial.

All functions but ``delete`` read files and must run in a thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from typing_extensions import TypedDict

from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError, NotFoundError, describe_each
from clowder_aimage.generation.request import LoraUse
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_completeness
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.snapshot import find_descriptor
from clowder_aimage.model.runnable import read_model
from clowder_aimage.oci import Descriptor, Reference

_log = logging.getLogger("aimage.worker")
_T = TypeVar("_T")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A name in the store and its manifest; ``size`` of all blobs, ``missing`` blobs."""

    reference: Reference
    descriptor: Descriptor
    size: int
    missing: tuple[Descriptor, ...]


def list_entries(store: ImageLayout) -> list[ModelEntry]:
    """Return all names that a client can request, in order; skip unreadable ones."""
    tags = store.list_tags()
    entries = describe_each(
        tags, lambda tag: read_entry(store, Reference.parse(tag[0]), tag[1]), _skip
    )
    return sorted(entries, key=lambda item: str(item.reference))


def describe_all(models: Iterable[_T], describe: Callable[[_T], _V]) -> list[_V]:
    """Return the descriptions of a list's models; leave out and log those that have none."""
    return list(describe_each(models, describe, _leave_out))


def _skip(tag: tuple[str, Descriptor], error: Exception) -> None:
    """Skip another tool's name, or a damaged manifest."""
    if not isinstance(error, AImageError):
        _leave_out(tag[0], error)


def _leave_out(model: object, error: Exception) -> None:
    name = str(getattr(model, "reference", model))
    _log.warning("a model was left out of a list", extra={"model": name, "reason": repr(error)})


def find_entry(store: ImageLayout, reference: Reference) -> ModelEntry | None:
    """Return the entry with exactly this name. Raises ContentError, StoreError."""
    descriptor = find_descriptor(store, reference)
    return None if descriptor is None else read_entry(store, reference, descriptor)


def read_entry(store: ImageLayout, reference: Reference, descriptor: Descriptor) -> ModelEntry:
    """Return the entry of a name and its manifest. Raises as ``item``."""
    completeness = check_completeness(store, descriptor)
    return ModelEntry(reference, descriptor, completeness.total, completeness.missing)


def read_valid(store: ImageLayout, descriptor: Descriptor) -> AImage | None:
    """Return the AImage with a manifest; None if it is unreadable or invalid."""
    with contextlib.suppress(AImageError):
        return read_model(store, descriptor).aimage
    return None


def read_stored_time(store: ImageLayout, descriptor: Descriptor) -> datetime:
    """Return the modification time of the stored manifest."""
    with contextlib.suppress(OSError):
        return datetime.fromtimestamp(store.find_path(descriptor).stat().st_mtime, UTC)
    return datetime.fromtimestamp(0, UTC)


def build_missing_error(reference: Reference) -> NotFoundError:
    """Return the error for a missing name, without local paths."""
    hint = "pull it first" if reference.registry else "create it, or add a registry to the name"
    return NotFoundError(f"model {reference} not found", hint=hint)


async def delete(service: Service, reference: Reference) -> None:
    """Remove a name, its model from memory if unused, and unreferenced blobs.

    Recent blobs that no name needed are kept for the grace period. Raises NotFoundError,
    StoreError; ApiError (409) if the name is pinned, or in a read-only store.
    """
    store = service.store
    descriptor = await run_io(find_descriptor, store, reference)
    if descriptor is None:
        raise build_missing_error(reference)
    if await run_io(store.pins.get, index_name(reference)) is not None:
        raise ApiError(409, f"{reference} is pinned; unpin it first", code="pinned")
    try:
        await run_locking(store.untag, reference)
    except NotFoundError as error:
        if await run_io(find_descriptor, store, reference) is None:
            # Another request has removed it
            raise build_missing_error(reference) from None
        message = f"{reference} is in a read-only store"
        raise ApiError(409, message, code="read_only") from error
    remaining = await run_io(lambda: {tagged.digest for _, tagged in store.list_tags()})
    if descriptor.digest not in remaining:
        await service.engine.forget(descriptor.digest)
    service.on_removed()
    await run_locking(_collect, store)


def _collect(store: ImageLayout) -> None:
    """Remove unreferenced blobs. A failure is only logged, as the name has been removed."""
    try:
        Collector(store).run()
    except AImageError as error:
        _log.warning("garbage collection failed", extra={"reason": error.message})


# -- adapters in use


class UsedLora(TypedDict):
    """An adapter that was used; the digest is that of its manifest, or of its file."""

    model: str
    strength: float | None
    digest: str | None


def describe_loras(loras: Sequence[LoraUse]) -> list[UsedLora]:
    """Return the adapters in use."""
    return [{"model": use.model, "strength": use.strength, "digest": use.digest} for use in loras]


def describe_use(loras: Sequence[LoraUse], warnings: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the fields of a response with the adapters in use, and with warnings, if any."""
    fields: dict[str, list[Any]] = {
        "loras": describe_loras(loras),
        "warnings": [*warnings],
    }
    return {name: values for name, values in fields.items() if values}
