"""A request in the engine: its parameters, its place in the queue and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from clowder_aimage.dialect import AImage
from clowder_aimage.engine.engine_error import DeadlineError
from clowder_aimage.engine.limits import FOR_EVER, IF_MISSING
from clowder_aimage.engine.model_slot import ModelSlot
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import AImageError
from clowder_aimage.model.pipeline import GenerateRequest, PictureEncoding
from clowder_aimage.oci import Reference

MakeRequest = Callable[[AImage], GenerateRequest]
_HINTS = {
    "waiting": "it was still waiting for its turn; try again later",
    "pulling": "the model was still being fetched; pull it first",
    "loading": "the model was still being loaded; ask again, or load it first",
    "drawing": "ask for fewer steps or a smaller picture",
}


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request on its way through the engine.

    ``make`` returns the parameters once the AImage is in the store; None for a request that only
    loads the model. ``stage`` is one of waiting, pulling, loading, drawing. ``moved`` is set when
    the load has begun or the turn has come, ``turn`` when the turn has come.
    """

    reference: Reference
    make: MakeRequest | None = None
    encoding: PictureEncoding = field(default_factory=PictureEncoding)
    keep_alive: float | None = None
    pull: str = IF_MISSING

    number: int = 0
    stage: str = "waiting"
    model: ModelSlot | None = None
    runner: Runner | None = None  # from its turn on
    error: AImageError | None = None
    limit: asyncio.Timeout | None = None
    deadline: float = FOR_EVER
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_begun(self) -> bool:
        """True once its turn has come."""
        return self.turn.is_set()

    @property
    def is_interrupted(self) -> bool:
        """True if the deadline or an interruption ends it."""
        return self.error is not None or (self.limit is not None and self.limit.expired())

    def timeout(self) -> asyncio.Timeout:
        """Return the context that the deadline and ``interrupt`` end."""
        is_limited = self.deadline != FOR_EVER
        self.limit = asyncio.timeout(self.deadline if is_limited else None)
        return self.limit

    def interrupt(self, error: AImageError) -> None:
        """End the request with ``error``."""
        self.error = self.error or error
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def cause(self, error: Exception) -> Exception:
        """Return the error that ended the request: ``error``, or the interruption before it."""
        if self.error is not None:
            return self.error
        if self.limit is not None and self.limit.expired():
            return DeadlineError(
                f"the request took longer than {self.deadline:g} seconds", hint=_HINTS[self.stage]
            )
        return error
