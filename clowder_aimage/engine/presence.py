"""Find an AImage in the store, and fetch one that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from clowder_aimage.engine.event import PullingEvent
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_stored, completion, describe_missing
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Reference

_INTERVAL = 0.2  # seconds between two events of a download


def find(store: ImageLayout, reference: Reference) -> StoredAImage:
    """Return the AImage if all its blobs are in the store in their full size.

    Raises:
        NotFoundError: the name is unknown, or the AImage is incomplete or damaged.
        FormatError: it is not an AImage.
    """
    try:
        root = store.resolve(reference)
    except NotFoundError:
        raise NotFoundError(
            f"there is no model {reference} here",
            hint="pull it first" if reference.registry else "create it, or name a registry",
        ) from None
    try:
        stored = read_aimage(store, reference)
        found = check_stored(store, stored)
    except (NotFoundError, VerificationError):  # the manifest or the config
        missing = "its manifest or config"
    else:
        if found.is_complete:
            return stored
        missing = describe_missing(stored, found)
    raise NotFoundError(
        f"the model {reference} is incomplete or damaged: the store lacks {missing}",
        **completion(store, reference, root),
    )


async def fetch(
    transfers: TransferQueue, reference: Reference, emit: Callable[[PullingEvent], None]
) -> None:
    """Pull an AImage; requests for the same one share the transfer. Raises as ``pull``.

    If this is cancelled, the transfer is too, unless others wait for it; partial content is kept.
    """
    with transfers.pull(reference) as transfer:
        while not transfer.result.done():
            emit(PullingEvent(transfer.completed, transfer.total))
            await asyncio.wait([transfer.result], timeout=_INTERVAL)
        transfer.result.result()
    emit(PullingEvent(transfer.total, transfer.total))
