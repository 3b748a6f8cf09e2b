"""Who is served: a request's way from its coming to the last picture.

A request is admitted, its AImage fetched where need be; then it stands in line for the model
(``fleet``) and is served in its turn. All of it runs on one event loop; what takes long is in other
threads and processes. Whatever a request is at, its deadline, a stop and the end of the worker end
it at once; what the model is at ends after the step, or with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from clowder_aimage.engine.available_memory import available
from clowder_aimage.engine.engine_error import BusyError, StoppedError, ending
from clowder_aimage.engine.event import Event, LoadingEvent, PullingEvent, QueuedEvent, StepEvent
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.job import ALWAYS, FOR_EVER, IF_MISSING, NEVER, EngineLimits, Job
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.model_slot import ModelSlot
from clowder_aimage.engine.presence import fetch, find
from clowder_aimage.engine.queued_request import QueuedRequest
from clowder_aimage.engine.scheduler import ModelScheduler
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Digest, Reference

__all__ = [
    "ALWAYS",
    "FOR_EVER",
    "IF_MISSING",
    "NEVER",
    "Engine",
    "EngineLimits",
    "Job",
    "ModelSlot",
]


class Engine:
    """Serves jobs with the models of one store."""

    def __init__(
        self,
        store: ImageLayout,
        transfers: TransferQueue,
        limits: EngineLimits,
        metrics: Metrics,
        *,
        news: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int | None] = available,
    ) -> None:
        self.store, self.limits, self.metrics = store, limits, metrics
        self._news = news or EventLog()
        self._transfers = transfers
        self._clock = clock
        self._fleet = ModelScheduler(
            store.roots, limits, metrics, self._news, clock=clock, free=free
        )
        self._tickets: set[QueuedRequest] = set()
        self._number = 0
        self._took = 10.0  # seconds of a request, about
        self._left = asyncio.Event()  # a request has
        self.is_draining = False

    # -- what is there

    def loaded(self) -> list[ModelSlot]:
        """The models in memory, the last used first."""
        return self._fleet.loaded()

    @property
    def waiting(self) -> int:
        """The requests whose turn has not come."""
        return sum(not ticket.is_begun for ticket in self._tickets)

    # -- serving

    async def generate(self, job: Job) -> AsyncGenerator[Event, None]:
        """Events as they come. Closing the iterator gives up, at once; what the model is at ends
        within a step.

        Raises:
            BusyError: too many wait.
            NotFoundError: the AImage is not here as a whole, and may not or cannot be fetched.
            UsageError: the model cannot make this.
            DeadlineError, StoppedError; ModelError: the model failed, or its process died.
            AImageError: whatever a pull or loading raises.
        """
        async with contextlib.aclosing(self._admitted(job, draws=True)) as events:
            async for event in events:
                yield event

    async def load(self, job: Job) -> AsyncGenerator[Event, None]:
        """Events until the model is in memory; nothing is made. Raises as ``generate``."""
        async with contextlib.aclosing(self._admitted(job, draws=False)) as events:
            async for event in events:
                yield event

    async def pull(self, reference: Reference) -> AsyncGenerator[PullingEvent, None]:
        """Fetch an AImage; those who ask for one that is under way join. Raises as ``pull``.

        Closing the iterator gives it up, where nobody else waits for it; what came is kept.
        """
        async with contextlib.aclosing(fetch(self._transfers, reference)) as events:
            async for event in events:
                yield event

    async def _admitted(self, job: Job, *, draws: bool) -> AsyncGenerator[Event, None]:
        if self.is_draining:
            raise ending()
        self._check_room("waiting", self.limits.queue + self._free())
        ticket = QueuedRequest(self._next(), self.limits.deadline, draws=draws)
        self._tickets.add(ticket)
        self._count()
        try:
            events = ticket.watch(self._served(job, ticket))
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._tickets.discard(ticket)
            self._fleet.leave(ticket, job.keep_alive)
            self._count()
            self._left.set()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _check_room(self, stage: str, most: int) -> None:
        """Raise BusyError where ``most`` requests are at a stage already. Those that wait for a
        download are counted apart: they take nothing from those whose model is here."""
        is_pulling = stage == "pulling"
        there = [one for one in self._tickets if not one.is_begun]
        count = sum((one.stage == "pulling") == is_pulling for one in there)
        if count >= most:
            self.metrics.refused.inc()
            raise BusyError(count, max(1, min(300, round(self._took * (count + 1)))))

    def _free(self) -> int:
        """Requests that would not wait at all."""
        busy = sum(ticket.is_begun for ticket in self._tickets)
        return max(0, self.limits.models - busy)

    def _count(self) -> None:
        self.metrics.queue.set(self.waiting)

    async def _served(self, job: Job, ticket: QueuedRequest) -> AsyncGenerator[Event, None]:
        stored = await self._here(job)
        if stored is None:
            self._check_room("pulling", self.limits.queue + self.limits.models)
            ticket.stage = "pulling"
            yield QueuedEvent(self._fleet.ahead(ticket))
            async with contextlib.aclosing(fetch(self._transfers, job.reference)) as moved:
                async for event in moved:
                    yield event
            ticket.stage, ticket.number = "waiting", self._next()
            stored = await asyncio.to_thread(find, self.store, job.reference)
        wishes = job.wishes(stored.aimage) if callable(job.wishes) else job.wishes
        model = self._fleet.enter(ticket, job.reference, stored)
        yield QueuedEvent(self._fleet.ahead(ticket))
        await ticket.moved.wait()
        if not ticket.is_begun:
            yield LoadingEvent()
            await ticket.turn.wait()
        self._count()
        if ticket.draws:
            async with contextlib.aclosing(self._drawn(model, ticket, job, wishes)) as events:
                async for made in events:
                    yield made

    async def _here(self, job: Job) -> StoredAImage | None:
        """The AImage, if it is here as a whole; None where it is to be fetched."""
        may_pull = job.pull != NEVER and job.reference.registry is not None
        if may_pull and job.pull == ALWAYS:
            return None
        try:
            return await asyncio.to_thread(find, self.store, job.reference)
        except NotFoundError:
            if not may_pull:
                raise
            return None

    async def _drawn(
        self, model: ModelSlot, ticket: QueuedRequest, job: Job, wishes: Any
    ) -> AsyncGenerator[Event, None]:
        assert ticket.runner is not None  # noqa: S101 - its turn has come
        outcome, begun = "cancelled", self._clock()
        last = begun
        events = ticket.runner.generate(
            _pinned(job.reference, model.digest),
            job.prompt,
            {**wishes, "previews": job.previews},
            job.encoding,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    now = self._clock()
                    if isinstance(event, StepEvent):
                        self.metrics.steps.observe(now - last)
                    last = now
                    yield event
            outcome = "done"
        except AImageError as error:
            outcome = "refused" if isinstance(error, UsageError) else "failed"
            raise
        finally:
            took = self._clock() - begun
            if outcome == "cancelled" and ticket.is_over:
                outcome = "failed"
            self._note(model, outcome, took)
            facts = {"outcome": outcome, "seconds": round(took, 3)}
            await self._news.tell("generate", model=str(model.reference), **facts)

    def _note(self, model: ModelSlot, outcome: str, took: float) -> None:
        if outcome == "done":
            self._took = 0.7 * self._took + 0.3 * took
        if outcome == "cancelled":
            self.metrics.cancelled.inc()
        label = self.metrics.model(model.reference.repository)
        self.metrics.generations.labels(label, outcome).observe(took)

    # -- ending

    async def stop(self, reference: Reference) -> bool:
        """Have the models that ``reference`` means go, now; says whether there were any."""
        try:
            wanted = {(await asyncio.to_thread(self.store.resolve, reference)).digest}
        except NotFoundError:
            wanted = set()
        models = self._fleet.models
        found = [one for one in models if one.digest in wanted or one.reference == reference]
        for ticket in self._tickets:
            if ticket.model in found:
                ticket.interrupt(StoppedError(f"{reference} was stopped"))
        await asyncio.gather(*(self._fleet.stop(model) for model in found))
        return bool(found)

    async def expire(self) -> None:
        """Let idle models go whose time is over; to be called every now and then."""
        await self._fleet.expire()

    async def close(self, grace: float) -> None:
        """Take nothing more, send away who waits, let what runs end within ``grace`` seconds, then
        end everything."""
        self.is_draining = True
        self._interrupt(lambda ticket: not ticket.is_begun)
        self._transfers.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any(ticket.is_begun for ticket in self._tickets):
                    self._left.clear()
                    await self._left.wait()
        self._interrupt(lambda _: True)
        await self._fleet.end()

    def _interrupt(self, which: Callable[[QueuedRequest], bool]) -> None:
        for ticket in filter(which, self._tickets):
            ticket.interrupt(ending())


def _pinned(reference: Reference, digest: Digest) -> str:
    """The name with the digest that it meant when the model was loaded."""
    return f"{str(reference).partition('@')[0]}@{digest}"
