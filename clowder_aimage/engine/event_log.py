"""The events of a worker, for its clients; the last ones are kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

MAX_EVENTS = 1000
# Logged too: these have no request with a line in the log
LOGGED = frozenset({"pull", "present", "failed", "drift", "evict", "gc", "neighbour"})
_log = logging.getLogger("aimage.worker")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """Event number ``id``: its ``kind`` (pull, load, generate, evict, ...) and facts."""

    id: int
    kind: str
    facts: dict[str, Any]
    at: float = field(default_factory=time.time)


class EventLog:
    """A log in memory, without prompts."""

    def __init__(self) -> None:
        self._items: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._next = 1
        self._changed = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def tell(self, kind: str, **facts: Any) -> None:
        """Add an event."""
        self.attach()
        if kind in LOGGED:
            _log.info(kind, extra=facts)
        async with self._changed:
            self._items.append(LoggedEvent(self._next, kind, facts))
            self._next += 1
            self._changed.notify_all()

    def attach(self) -> None:
        """Add the events of other threads in the running event loop."""
        self._loop = asyncio.get_running_loop()

    def tell_from_thread(self, kind: str, **facts: Any) -> None:
        """Add an event from another thread, if an event loop is attached."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            asyncio.run_coroutine_threadsafe(self.tell(kind, **facts), self._loop)

    async def listen(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Yield the events after number ``after`` that are kept, then new ones."""
        while True:
            async with self._changed:
                found = [item for item in self._items if item.id > after]
                if not found and self._is_closed:
                    return
                if not found:
                    await self._changed.wait()
                    continue
            for item in found:
                after = item.id
                yield item

    async def close(self) -> None:
        """End the generators of all listeners."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()
