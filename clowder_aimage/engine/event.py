"""Events of a request, from the queue to the last picture, and events of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextEvent,
    TextRequest,
)

MAX_EVENTS = 1000
# Written to the log as well, since no request's log line reports them
LOGGED = frozenset(
    {"load", "pull", "present", "failed", "drift", "evict", "gc", "job", "neighbour"}
)
_log = logging.getLogger("aimage.worker")


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """The request is queued; ``ahead`` requests are served first."""

    ahead: int


@dataclass(frozen=True, slots=True)
class PullingEvent:
    """The model is being pulled: ``done`` of ``total`` bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LoadingEvent:
    """The model is being loaded into memory."""


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The model has accepted the request; ``warnings`` name its fields without effect."""

    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ComputedEvent:
    """The model is free for the next request, while pictures of this one are encoded."""


@dataclass(frozen=True, slots=True, eq=False)
class PreviewEvent:
    """A preview of picture ``picture``, encoded in the format of the picture.

    ``number`` counts the previews of a picture from 0.
    """

    data: bytes
    number: int
    picture: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageEvent:
    """A finished picture, encoded, with its metadata; ``digest`` is that of the AImage."""

    data: bytes
    seed: int
    picture: int
    width: int
    height: int
    digest: str = ""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)


ModelRequest = GenerateRequest | TextRequest | EmbeddingRequest
PictureEvent = Step | PreviewEvent | ImageEvent
Event = (
    QueuedEvent
    | PullingEvent
    | LoadingEvent
    | StartedEvent
    | ComputedEvent
    | PictureEvent
    | TextEvent
    | Embeddings
)


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """Event ``id`` of a worker: its ``kind`` (pull, load, generate, evict, ...) and fields."""

    id: int
    kind: str
    facts: dict[str, Any]
    at: float = field(default_factory=time.time)


class EventLog:
    """The most recent events of a worker, without prompts, for clients."""

    def __init__(self) -> None:
        self._retained: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def record(self, kind: str, **facts: Any) -> None:
        """Add an event from the event loop."""
        self.attach()
        if kind in LOGGED:
            _log.info(kind, extra=facts)
        self._retained.append(LoggedEvent(next(self._numbers), kind, facts))
        self._changed.set()
        self._changed = asyncio.Event()

    def attach(self) -> None:
        """Attach the running event loop, so that other threads can add events."""
        self._loop = asyncio.get_running_loop()

    def record_from_thread(self, kind: str, **facts: Any) -> None:
        """Add an event from another thread, if an event loop is attached."""
        if self._loop is not None:
            # The loop is closed
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(partial(self.record, kind, **facts))

    async def listen(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Yield the retained events after number ``after``, then new ones."""
        while True:
            events = [event for event in self._retained if event.id > after]
            for event in events:
                after = event.id
                yield event
            if not events:
                if self._is_closed:
                    return
                await self._changed.wait()

    def close(self) -> None:
        """End the generators of all listeners."""
        self._is_closed = True
        self._changed.set()
        self._changed = asyncio.Event()
