"""A model that is loaded, or about to be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from clowder_aimage.engine.runner import Runner
from clowder_aimage.oci import Descriptor, Digest, Reference

LONGEST = 100 * 365 * 86400.0  # seconds to stay; who says more means for ever


class ModelSlot:
    """A model that somebody uses, or used of late. ``size`` is that of its blobs; ``at_work`` says
    whose turn it is, ``users`` how many wait or are served."""

    def __init__(
        self,
        reference: Reference,
        manifest: Descriptor,
        *,
        size: int = 0,
        keep_alive: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference, self.manifest, self.size = reference, manifest, size
        self.keep_alive = keep_alive
        self.runner: Runner | None = None
        self.load: asyncio.Task[Runner] | None = None
        self.leaving: asyncio.Task[None] | None = None  # of one that was stopped as it was loaded
        self.at_work: object | None = None
        self.users = 0
        self.is_stopped = False
        self.used = clock()
        self._clock = clock

    @property
    def digest(self) -> Digest:
        """Of its manifest."""
        return self.manifest.digest

    @property
    def is_ready(self) -> bool:
        """Whether it is in memory."""
        return self.runner is not None and self.runner.is_alive

    @property
    def is_free(self) -> bool:
        """Whether it is in memory, and a request would be served at once."""
        runner = self.runner
        return self.at_work is None and runner is not None and runner.is_free

    @property
    def left(self) -> float:
        """For how many seconds it stays if nobody asks for it."""
        if self.users:
            return self.keep_alive
        return max(0.0, self.used + self.keep_alive - self._clock())

    @property
    def until(self) -> datetime | None:
        """When it goes if nobody asks for it; None for never."""
        left = self.left
        return None if left >= LONGEST else datetime.now(UTC) + timedelta(seconds=left)

    @property
    def pinned(self) -> str:
        """Its name, with the digest that the name meant when it was first asked for."""
        return f"{str(self.reference).partition('@')[0]}@{self.digest}"
