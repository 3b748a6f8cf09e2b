"""The models in memory: who is served next, which model is loaded, and which one goes for it.

Whoever waits stands in one line, in the order of coming. A turn is given as soon as the model is
in memory and free; where somebody waits for room, who came later gets no turn on a model that
would have to make it. All of it runs on one event loop; ``arrange`` is called after each change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clowder_aimage.engine.available_memory import available
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.job import EngineLimits
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.model_slot import ModelSlot
from clowder_aimage.engine.queued_request import QueuedRequest
from clowder_aimage.engine.runner import KeepAlive, NoMemoryError, Runner
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Digest, Reference

_log = logging.getLogger("aimage.worker")


class ModelScheduler:
    """The models of one worker, each in a process of its own. ``free`` says how many bytes of
    memory there are for another one; None stands for enough."""

    def __init__(
        self,
        roots: Sequence[Path],
        limits: EngineLimits,
        metrics: Metrics,
        news: EventLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int | None] = available,
    ) -> None:
        self._roots, self._limits, self._metrics, self._news = roots, limits, metrics, news
        self._clock, self._free = clock, free
        self._models: dict[Digest, ModelSlot] = {}
        self._line: list[QueuedRequest] = []
        self._loads: set[asyncio.Task[Runner]] = set()  # and those that are being called off
        self._leaving: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> list[ModelSlot]:
        """All that are loaded, or that somebody waits for."""
        return list(self._models.values())

    def loaded(self) -> list[ModelSlot]:
        """The models in memory, the last used first."""
        return sorted((one for one in self.models if one.is_ready), key=lambda one: -one.used)

    # -- who waits

    def enter(self, ticket: QueuedRequest, reference: Reference, stored: StoredAImage) -> ModelSlot:
        """Take a place in line, by the ticket's number."""
        digest = stored.descriptor.digest
        model = self._models.get(digest)
        if model is None:
            size = sum(blob.size for blob in stored.manifest.children)
            model = self._models[digest] = ModelSlot(
                reference,
                stored.descriptor,
                size=size,
                keep_alive=self._limits.keep_alive,
                clock=self._clock,
            )
        ticket.model = model
        model.users += 1
        if model.load is not None:
            ticket.stage = "loading"
            ticket.moved.set()
        self._line.append(ticket)
        self._line.sort(key=lambda one: one.number)
        self.arrange()
        return model

    def ahead(self, ticket: QueuedRequest) -> int:
        """How many stand in line before it."""
        return sum(one.number < ticket.number for one in self._line)

    def leave(self, ticket: QueuedRequest, keep_alive: float | None) -> None:
        """A request has ended, or its place in line is given up."""
        model, ticket.model = ticket.model, None
        if model is None:
            return
        if ticket in self._line:
            self._line.remove(ticket)
        if model.at_work is ticket:
            model.at_work = None
        model.users -= 1
        model.used = self._clock()
        if keep_alive is not None:
            model.keep_alive = keep_alive
        if model.runner is not None and model.runner.ending is not None:
            model.runner.ending.add_done_callback(lambda _: self.arrange())
        if not model.users and (model.load is not None or model.keep_alive <= 0):
            self.unload(model, "idle")
        self._drop(model)
        self.arrange()

    def arrange(self) -> None:
        """Give turns, and begin the load that is due."""
        is_full = False  # somebody waits for room
        for ticket in list(self._line):
            model = ticket.model
            if model is None or ticket.error is not None:
                continue
            if model.is_ready and not ticket.draws:
                self._turn(ticket, model)
            elif model.is_ready:
                if model.is_free and not is_full:
                    model.at_work = ticket
                    self._turn(ticket, model)
            elif model.load is None and not is_full:
                is_full = not self._begin(model)
        self._metrics.show_models(one.reference.repository for one in self.loaded())

    def _turn(self, ticket: QueuedRequest, model: ModelSlot) -> None:
        self._line.remove(ticket)
        ticket.runner = model.runner
        ticket.stage = "drawing"
        ticket.turn.set()
        ticket.moved.set()

    # -- what is loaded

    def _begin(self, model: ModelSlot) -> bool:
        """Load a model where there is room, or have another one make it; False where all of them
        are at work."""
        if self._loads:
            return True  # one at a time; this one is next
        taken = len(self.loaded()) + len(self._leaving)
        if taken < self._limits.models:
            self._load(model)
        elif taken - len(self._leaving) >= self._limits.models:
            idle = self._idle()
            if idle is None:
                return False
            self.unload(idle, "room")
        return True

    def _idle(self) -> ModelSlot | None:
        """The model that was idle for longest."""
        idle = [one for one in self.loaded() if one.at_work is None]
        return idle[-1] if idle else None

    def _load(self, model: ModelSlot) -> None:
        model.load = load = asyncio.create_task(self._started(model))
        self._loads.add(load)
        load.add_done_callback(partial(self._ended, model, self._clock()))
        for ticket in self._of(model):
            ticket.stage = "loading"
            ticket.moved.set()

    async def _started(self, model: ModelSlot) -> Runner:
        """The model's process. Idle ones go first while the memory does not do for all."""
        while self._lacks(model.size) and (idle := self._idle()) is not None:
            await self._gone([self.unload(idle, "memory")])
        limits = self._limits
        start = partial(
            Runner.start,
            self._roots,
            model.pinned,
            model.manifest,
            dtype=limits.dtype,
            keep=KeepAlive(limits.text_encoder, limits.memory, limits.models),
            stall=limits.stall,
            patience=limits.patience,
        )
        try:
            return await start()
        except NoMemoryError:
            if (idle := self._idle()) is None:
                raise
            while idle is not None:
                await self._gone([self.unload(idle, "memory")])
                idle = self._idle()
            return await start()

    def _lacks(self, size: int) -> bool:
        """Whether there is too little memory for a model whose blobs are that large."""
        sizes = [one.runner.size for one in self.loaded() if one.runner is not None]
        of_all, free = self._limits.memory, self._free()
        return (free is not None and free < size) or (
            of_all is not None and of_all < size + sum(sizes)
        )

    def _ended(self, model: ModelSlot, begun: float, load: asyncio.Task[Runner]) -> None:
        """A load has ended, in whatever way."""
        self._loads.discard(load)
        model.load = None
        if load.cancelled():
            pass
        elif (error := load.exception()) is not None:
            if not isinstance(error, AImageError):
                _log.error("a model could not be loaded", exc_info=error)
                error = ModelError(f"the model could not be loaded: {type(error).__name__}")
            for ticket in self._of(model):
                ticket.interrupt(error)
        else:
            self._there(model, load.result(), self._clock() - begun)
        self._drop(model)
        self.arrange()

    def _there(self, model: ModelSlot, runner: Runner, seconds: float) -> None:
        model.runner, model.used = runner, self._clock()
        runner.ended.add_done_callback(lambda _: self._died(model, runner))
        self._metrics.loads.observe(seconds)
        self._tell("load", model, seconds=round(seconds, 3))
        if model.is_stopped:
            model.leaving = self.unload(model, "stopped")

    def _died(self, model: ModelSlot, runner: Runner) -> None:
        if model.runner is not runner:
            return  # it was let go
        model.runner = model.at_work = None
        self._metrics.evictions.labels("died").inc()
        self._tell("evict", model, reason="died")
        self._drop(model)
        self.arrange()

    def unload(self, model: ModelSlot, reason: str) -> asyncio.Task[Any] | None:
        """Let a model go, or call its load off; what is done when all of its memory is free."""
        load, runner = model.load, model.runner
        if load is not None and not load.cancelling():  # twice, it would not wait for the process
            load.cancel()
        model.runner = model.at_work = None
        self._drop(model)
        if runner is None:
            return load
        self._metrics.evictions.labels(reason).inc()
        self._tell("evict", model, reason=reason)
        task = asyncio.create_task(runner.stop())
        self._leaving.add(task)
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self.arrange()

    async def stop(self, model: ModelSlot) -> None:
        """End what a model is at, and the model; nobody is served by it any more."""
        model.is_stopped = True
        if self._models.get(model.digest) is model:
            del self._models[model.digest]  # who comes now has it loaded again
        await self._gone([self.unload(model, "stopped")])
        await self._gone([model.leaving])  # its load had just ended

    async def expire(self) -> None:
        """Let idle models go whose time is over."""
        idle = [one for one in self.loaded() if not one.users and not one.left]
        await self._gone([self.unload(one, "idle") for one in idle])

    async def end(self) -> None:
        """Let all models go, and wait until they are gone."""
        for model in self.models:
            self.unload(model, "end")
        while tasks := [*self._loads, *self._leaving, *self._telling]:
            await self._gone(tasks)

    async def _gone(self, tasks: Iterable[asyncio.Task[Any] | None]) -> None:
        """Wait for all of them, whatever becomes of them; who stops waiting stops none."""
        if waited := [task for task in tasks if task is not None]:
            await asyncio.wait(waited)

    def _drop(self, model: ModelSlot) -> None:
        """Forget a model that is not in memory and that nobody waits for."""
        is_needed = model.users or model.load is not None or model.runner is not None
        if not is_needed and self._models.get(model.digest) is model:
            del self._models[model.digest]

    def _of(self, model: ModelSlot) -> list[QueuedRequest]:
        return [ticket for ticket in self._line if ticket.model is model]

    def _tell(self, kind: str, model: ModelSlot, **facts: Any) -> None:
        told: Coroutine[Any, Any, None] = self._news.tell(kind, model=str(model.reference), **facts)
        task = asyncio.create_task(told)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
