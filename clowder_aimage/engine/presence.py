"""Whether an AImage is in the store as a whole, and fetching it where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from clowder_aimage.engine.event import PullingEvent
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import check_stored, completion, describe_missing
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Reference

_EVERY = 0.2  # seconds between two words on a download


def find(store: ImageLayout, reference: Reference) -> StoredAImage:
    """The AImage, all of whose blobs are here in their full size.

    Raises:
        NotFoundError: there is none by that name; or it is here in part, or damaged.
        FormatError: it is no AImage.
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
    transfers: TransferQueue, reference: Reference
) -> AsyncGenerator[PullingEvent, None]:
    """Fetch an AImage; those who ask for one that is under way join. Raises as ``pull``.

    Closing the iterator gives it up, where nobody else waits for it; what came is kept.
    """
    with transfers.pull(reference) as transfer:
        while not transfer.result.done():
            yield PullingEvent(transfer.completed, transfer.total)
            await asyncio.wait([transfer.result], timeout=_EVERY)
        transfer.result.result()
    yield PullingEvent(transfer.total, transfer.total)
