"""Smaller variants, for use until the AImages themselves are in the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.engine.event import PullingEvent
from clowder_aimage.engine.executor import run_generation, run_io
from clowder_aimage.engine.model_fetch import Begin, fetch, find
from clowder_aimage.engine.transfer_queue import DESIRED, TransferQueue
from clowder_aimage.engine.variant import find_variant
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Reference

_log = logging.getLogger("aimage.worker")


@dataclass(slots=True)
class FirstVariant:
    """The variants of one precision; with None, none are used.

    After a variant, the AImage itself is fetched in the background, for later requests.
    """

    _store: ImageLayout
    _transfers: TransferQueue
    _precision: str | None
    _variants: dict[Reference, Reference] = field(default_factory=dict)
    _tasks: dict[Reference, asyncio.Task[None]] = field(default_factory=dict)

    async def fetch(
        self, reference: Reference, emit: Callable[[PullingEvent], None], begin: Begin
    ) -> StoredAImage:
        """Pull an AImage, or its variant if the store lacks it. Raises as ``find_variant``.

        ``begin`` is as in ``model_fetch.fetch``.
        """
        variant = await self._choose(reference)
        if variant is None:
            await fetch(self._transfers, reference, emit, begin)
            return await run_generation(find, self._store, reference)
        try:
            stored = await run_generation(find, self._store, variant)
        except NotFoundError:
            await fetch(self._transfers, variant, emit, begin)
            stored = await run_generation(find, self._store, variant)
        if reference not in self._tasks:
            self._tasks[reference] = task = asyncio.create_task(self._complete(reference))
            task.add_done_callback(lambda _: self._tasks.pop(reference))
        return stored

    async def _choose(self, reference: Reference) -> Reference | None:
        """Return the variant to use; None for an AImage in the store, or without a variant."""
        if self._precision is None or reference.digest is not None:
            return None
        with contextlib.suppress(NotFoundError):
            await run_generation(find, self._store, reference)
            return None
        if reference not in self._variants:
            connection = self._transfers.connection
            variant = await run_io(find_variant, reference, connection, self._precision)
            if variant is None:
                facts = {"model": str(reference), "precision": self._precision}
                _log.info("no variant of this precision", extra=facts)
                return None
            self._variants[reference] = variant
        return self._variants[reference]

    async def _complete(self, reference: Reference) -> None:
        # Logged by the queue; the next request repeats it
        with contextlib.suppress(AImageError):
            with self._transfers.pull(reference, urgency=DESIRED) as transfer:
                await transfer.wait()
            self._variants.pop(reference, None)

    def close(self) -> None:
        """End the work in the background."""
        for task in [*self._tasks.values()]:
            task.cancel()
