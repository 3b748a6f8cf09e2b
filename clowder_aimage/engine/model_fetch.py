"""Find and fetch AImages for requests and for preloading."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import tenacity

from clowder_aimage.engine.backoff import compute_backoff
from clowder_aimage.engine.event import PullingEvent
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.transfer_queue import DESIRED, TransferQueue
from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_stored, describe_missing, suggest_completion
from clowder_aimage.layout.stored_aimage import StoredAImage, admit, read_stored
from clowder_aimage.model.runnable import prepare
from clowder_aimage.oci import Reference

# Seconds between two attempts to fetch a model
MAX_DELAY = 60.0
# Seconds between two events of a download
_INTERVAL = 0.2

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
        admit(store, root, reference)
        stored = read_stored(store, root)
        completeness = check_stored(store, stored)
    except (NotFoundError, VerificationError):
        # Raised for the manifest or the config
        missing = "its manifest or config"
    else:
        if completeness.is_complete:
            with store.lease(root.digest) as lease:
                return prepare(store, stored, lease)
        missing = describe_missing(stored, completeness)
    raise NotFoundError(
        f"model {reference} is incomplete or damaged: the store lacks {missing}",
        **suggest_completion(store, reference, root),
    )


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
    """Fetch models until all are in the store; log failures, and missing local models."""
    references = [Reference.parse(name) for name in dict.fromkeys(names)]
    for local in [reference for reference in references if reference.registry is None]:
        try:
            await run_io(find, store, local)
        except AImageError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
            _log.warning("wanted model missing", extra={"model": str(local), "reason": reason})
    await asyncio.gather(
        *(_preload(transfers, reference) for reference in references if reference.registry)
    )


async def _preload(transfers: TransferQueue, reference: Reference) -> None:
    async def pull() -> None:
        with transfers.pull(reference, is_early=True, urgency=DESIRED) as transfer:
            await transfer.wait()

    retryer = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Exception),
        wait=_delay,
        stop=lambda _: transfers.is_over,
        before_sleep=partial(_log_failure, reference),
        retry_error_callback=lambda _: None,
    )
    await retryer(pull)


def _delay(state: tenacity.RetryCallState) -> float:
    """Return the seconds before the next attempt to fetch a model."""
    error = state.outcome.exception() if state.outcome else None
    if not isinstance(error, AImageError):
        return MAX_DELAY
    chance = random.random()  # noqa: S311 - jitter
    return min(compute_backoff(error, state.attempt_number, chance, MAX_DELAY).delay, MAX_DELAY)


def _log_failure(reference: Reference, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    facts: dict[str, object] = {"model": str(reference)}
    if isinstance(error, AImageError):
        facts |= {"reason": error.message, "again": round(state.upcoming_sleep, 1)}
        _log.warning("preload failed", extra=facts)
    else:
        _log.error("preload failed", extra=facts, exc_info=error)
