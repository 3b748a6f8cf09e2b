"""The models that a worker is to have before it counts as ready."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence

from clowder_aimage.engine.backoff import again
from clowder_aimage.engine.transfer_queue import DESIRED, TransferQueue
from clowder_aimage.errors import AImageError
from clowder_aimage.oci import Reference

LATEST = 60.0  # seconds after which one that could not be fetched is tried again

_log = logging.getLogger("aimage.worker")


async def want(transfers: TransferQueue, wanted: Sequence[str]) -> None:
    """Fetch the models that are to be here."""
    references = [Reference.parse(name) for name in dict.fromkeys(wanted)]
    await asyncio.gather(*(_have(transfers, one) for one in references if one.registry))


async def _have(transfers: TransferQueue, reference: Reference) -> None:
    """Fetch a model, and try until it is here. What goes wrong is said, and readyz says that it is
    missing."""
    for attempts in itertools.count(1):
        delay = LATEST
        try:
            with transfers.pull(reference, urgency=DESIRED) as transfer:
                await transfer.end()
            return
        except AImageError as error:
            if transfers.is_over:
                return
            delay = min(delay, again(error, attempts, random.random(), delay).delay)
            facts = {"model": str(reference), "reason": error.message, "again": round(delay, 1)}
            _log.warning("cannot fetch a wanted model", extra=facts)
        except Exception:
            _log.exception("cannot fetch a wanted model", extra={"model": str(reference)})
        await asyncio.sleep(delay)
