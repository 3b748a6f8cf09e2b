"""One request on its way through the engine: its place in line, and what ends it early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

from clowder_aimage.engine.engine_error import DeadlineError
from clowder_aimage.engine.job import FOR_EVER
from clowder_aimage.engine.model_slot import ModelSlot
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import AImageError

T = TypeVar("T")
_HINTS = {
    "waiting": "it was still waiting for its turn; try again later",
    "pulling": "the model was still being fetched; pull it first",
    "loading": "the model was still being loaded; ask again, or load it first",
    "drawing": "ask for fewer steps or a smaller picture",
}


class QueuedRequest:
    """What the engine knows of a request. ``stage`` is one of waiting, pulling, loading, drawing;
    one that does not draw only wants the model loaded.

    ``moved`` is set when there is news for who waits: the load has begun, or it is its turn.
    """

    def __init__(self, number: int, deadline: float, *, draws: bool) -> None:
        self.number, self.draws = number, draws
        self.stage = "waiting"
        self.model: ModelSlot | None = None
        self.runner: Runner | None = None  # from its turn on
        self.moved, self.turn = asyncio.Event(), asyncio.Event()
        self.error: AImageError | None = None
        self._deadline = deadline
        self._end = None if deadline == FOR_EVER else asyncio.get_running_loop().time() + deadline
        self._limit: asyncio.Timeout | None = None

    @property
    def is_begun(self) -> bool:
        """Whether its turn has come."""
        return self.turn.is_set()

    @property
    def is_over(self) -> bool:
        """Whether it is not who asked that ends it."""
        late = self._end is not None and asyncio.get_running_loop().time() >= self._end
        return late or self.error is not None

    def interrupt(self, error: AImageError) -> None:
        """End it with ``error``, whatever it is at."""
        self.error = self.error or error
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def watch(self, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The events, until the deadline or an interruption: then what is under way is cancelled.

        Raises:
            DeadlineError; what ``interrupt`` was given; what the events raise.
        """
        async with contextlib.aclosing(events):
            while True:
                if self.error is not None:
                    raise self.error
                limit = asyncio.timeout_at(self._end)
                try:
                    async with limit:
                        self._limit = limit
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except (TimeoutError, AImageError) as error:
                    if self.error is not None:  # the rest is what became of that
                        raise self.error from None
                    if limit.expired():
                        raise self._late() from None
                    raise error
                finally:
                    self._limit = None
                yield event

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"the request took longer than {self._deadline:g} seconds", hint=_HINTS[self.stage]
        )
