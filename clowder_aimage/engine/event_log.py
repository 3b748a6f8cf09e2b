"""What happens in a worker, told to whoever listens; the last of it is kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

KEPT = 1000
# What is worth a line of the log, too: it happens without a request that would have one
LOGGED = frozenset({"pull", "present", "failed", "drift", "evict", "gc", "neighbour"})
_log = logging.getLogger("aimage.worker")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """Number ``id`` of what happened: ``kind`` (pull, load, generate, evict, ...), and facts."""

    id: int
    kind: str
    facts: dict[str, Any]
    at: float = field(default_factory=time.time)


class EventLog:
    """A log in memory. Prompts are never in it."""

    def __init__(self) -> None:
        self._items: deque[LoggedEvent] = deque(maxlen=KEPT)
        self._next = 1
        self._changed = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def tell(self, kind: str, **facts: Any) -> None:
        """Add an item."""
        self.attach()
        if kind in LOGGED:
            _log.info(kind, extra=facts)
        async with self._changed:
            self._items.append(LoggedEvent(self._next, kind, facts))
            self._next += 1
            self._changed.notify_all()

    def attach(self) -> None:
        """Be of the event loop that runs: what other threads tell goes there."""
        self._loop = asyncio.get_running_loop()

    def tell_from_thread(self, kind: str, **facts: Any) -> None:
        """Add an item from another thread than the event loop's, once it is attached to that."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended
            asyncio.run_coroutine_threadsafe(self.tell(kind, **facts), self._loop)

    async def listen(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """The items after number ``after`` that are still known, then new ones as they come."""
        while True:
            async with self._changed:
                found = [item for item in self._items if item.id > after]
                if not found:
                    await self._changed.wait()
                    continue
            for item in found:
                after = item.id
                yield item
