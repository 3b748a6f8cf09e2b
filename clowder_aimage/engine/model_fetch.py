"""Find and fetch AImages for requests and for preloading."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from clowder_aimage.engine.backoff import again
from clowder_aimage.engine.event import PullingEvent
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.transfer_queue import DESIRED, TransferQueue
from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_stored, completion, describe_missing
from clowder_aimage.layout.stored_aimage import StoredAImage, read_stored
from clowder_aimage.oci import Descriptor, Reference

MAX_DELAY = 60.0  # seconds between two attempts to fetch a model
_INTERVAL = 0.2  # seconds between two events of a download

Begin = Callable[[StoredAImage], Awaitable[None]]
_log = logging.getLogger("aimage.worker")


def find(store: ImageLayout, reference: Reference) -> StoredAImage:
    """Return the AImage if all its blobs are in the store with their full size.

    Raises NotFoundError, also if it is incomplete or damaged, and FormatError.
    """
    try:
        root = store.resolve(reference)
    except NotFoundError:
        hint = "pull it first" if reference.registry else "create it, or add a registry to the name"
        raise NotFoundError(f"model {reference} not found", hint=hint) from None
    try:
        stored = read_stored(store, root)
        found = check_stored(store, stored)
    except (NotFoundError, VerificationError):  # of the manifest or the config
        missing = "its manifest or config"
    else:
        if found.is_complete:
            return stored
        missing = describe_missing(stored, found)
    raise NotFoundError(
        f"model {reference} is incomplete or damaged: the store lacks {missing}",
        **completion(store, reference, root),
    )


def read_model(store: ImageLayout, root: Descriptor) -> StoredAImage:
    """Return an AImage with its config validated; its blobs may be missing.

    Raises NotFoundError, ContentError.
    """
    stored = read_stored(store, root)
    stored.aimage.validate()
    return stored


async def fetch(
    transfers: TransferQueue,
    reference: Reference,
    emit: Callable[[PullingEvent], None],
    begin: Begin | None = None,
) -> None:
    """Pull an AImage; concurrent requests for it share one transfer. Raises as ``pull``.

    ``begin`` is called when its blobs can be used as they arrive. Cancellation also cancels the
    transfer unless others wait for it; partial content is kept.
    """
    with transfers.pull(reference, is_early=True) as transfer:
        while not transfer.result.done():
            if begin is not None and (stored := transfer.stored) is not None:
                await begin(stored)
                begin = None
            emit(PullingEvent(transfer.completed, transfer.total))
            await asyncio.wait([transfer.result], timeout=_INTERVAL)
        transfer.result.result()
    emit(PullingEvent(transfer.total, transfer.total))


async def preload(store: ImageLayout, transfers: TransferQueue, names: Sequence[str]) -> None:
    """Fetch models until all are in the store; log failures, and those that no registry has."""
    references = [Reference.parse(name) for name in dict.fromkeys(names)]
    for local in [one for one in references if one.registry is None]:
        try:
            await run_io(find, store, local)
        except AImageError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
            _log.warning("wanted model missing", extra={"model": str(local), "reason": reason})
    await asyncio.gather(*(_preload(transfers, one) for one in references if one.registry))


async def _preload(transfers: TransferQueue, reference: Reference) -> None:
    for attempts in itertools.count(1):
        delay = MAX_DELAY
        try:
            with transfers.pull(reference, is_early=True, urgency=DESIRED) as transfer:
                await transfer.end()
            return
        except AImageError as error:
            if transfers.is_over:
                return
            delay = again(error, attempts, random.random(), delay).delay  # noqa: S311 - jitter
            delay = min(delay, MAX_DELAY)
            facts = {"model": str(reference), "reason": error.message, "again": round(delay, 1)}
            _log.warning("preload failed", extra=facts)
        except Exception:
            _log.exception("preload failed", extra={"model": str(reference)})
        await asyncio.sleep(delay)
