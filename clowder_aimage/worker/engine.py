"""Which models are loaded, who is served next, and when a model goes.

One request at a time is served by a model, first come, first served; one model at a time is
loaded. All of it runs on one event loop; what takes long is in other threads and processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from clowder_aimage import errors
from clowder_aimage.content.event import Event as Moved
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.aimage import Stored, read_aimage
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.pull import pull
from clowder_aimage.registry import Connection
from clowder_aimage.worker.event import Event, Loading, Progress, Pulling, Queued
from clowder_aimage.worker.metric import Metrics
from clowder_aimage.worker.news import News
from clowder_aimage.worker.runner import Runner

FOR_EVER = math.inf
NEVER, IF_MISSING, ALWAYS = "never", "if-missing", "always"
PULLS = 4  # at once
_EVERY = 0.2  # seconds between two words on a download


class BusyError(AImageError):
    """Too many requests wait already; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests wait already", hint=f"try again in {retry_after} seconds"
        )
        self.retry_after = retry_after


class DeadlineError(AImageError):
    """A request took longer than the worker allows."""


class StoppedError(AImageError):
    """The model was stopped, or the worker is about to end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``queue``: requests that may wait. ``models``: that are loaded at once. ``keep_alive``: how
    long an idle model stays, in seconds; FOR_EVER, or 0. ``deadline``: for a request, in seconds,
    once its turn has come."""

    queue: int = 8
    models: int = 1
    keep_alive: float = 300.0
    deadline: float = FOR_EVER
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made: by which AImage, of which words, with which ``wishes`` (fields of
    model.pipeline.Request; None or left out: as the AImage says). ``encoding``: ``kind`` (png,
    jpeg, webp), ``quality`` (0 to 100), for the pictures and for up to ``previews`` of each.
    ``pull`` says whether the AImage may be fetched."""

    reference: Reference
    prompt: str
    wishes: Mapping[str, Any] = field(default_factory=dict)
    encoding: Mapping[str, Any] = field(default_factory=dict)
    previews: int = 0
    keep_alive: float | None = None
    pull: str = IF_MISSING


class Loaded:
    """A model that is loaded, or about to be."""

    def __init__(self, reference: Reference, digest: Digest) -> None:
        self.reference, self.digest = reference, digest
        self.turn = asyncio.Lock()
        self.runner: Runner | None = None
        self.users = 0
        self.is_stopped = False
        self.keep_alive = 0.0
        self.used = time.monotonic()

    @property
    def until(self) -> datetime | None:
        """When it goes if nobody asks for it; None for never."""
        if self.keep_alive == FOR_EVER:
            return None
        left = self.used + self.keep_alive - time.monotonic() if not self.users else self.keep_alive
        return datetime.now(UTC) + timedelta(seconds=max(0.0, left))


class Engine:
    """Serves jobs with the models of one store."""

    def __init__(
        self,
        store: ImageLayout,
        connection: Connection,
        limits: Limits,
        metrics: Metrics,
        *,
        news: News | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.limits, self.metrics = store, limits, metrics
        self._news = news or News()
        self._connection = connection
        self._clock = clock
        self._loaded: dict[Digest, Loaded] = {}
        self._loading = asyncio.Lock()
        self._pulls: dict[str, tuple[asyncio.Future[Any], _Moved]] = {}
        # of their own: a few long pulls must not hold up what other threads do in no time
        self._pullers = ThreadPoolExecutor(PULLS, thread_name_prefix="pull")
        self._waiting = 0
        self._took = 10.0  # seconds of a request, about
        self._changed = asyncio.Event()
        self.is_draining = False

    # -- what is there

    def loaded(self) -> list[Loaded]:
        """The models in memory, the last used first."""
        there = [one for one in self._loaded.values() if one.runner is not None]
        return sorted(there, key=lambda one: -one.used)

    @property
    def waiting(self) -> int:
        return self._waiting

    # -- serving

    async def generate(self, job: Job) -> AsyncGenerator[Event, None]:
        """Events as they come. Closing the iterator gives up: what is under way ends within a step.

        Raises:
            BusyError: too many wait.
            NotFoundError: the AImage is not here, and may not or cannot be fetched.
            UsageError: the model cannot make this.
            DeadlineError, StoppedError; ModelError: the model failed, or its process died.
            AImageError: whatever a pull or loading raises.
        """
        if self.is_draining:
            raise StoppedError("the worker is about to end", hint="ask another one")
        if self._waiting >= self.limits.queue + self._free():
            self.metrics.refused.inc()
            raise BusyError(self._waiting, self._retry_after())
        self._waiting += 1
        self.metrics.queue.set(self._waiting)
        is_waiting = True

        def begin() -> None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                self._waiting -= 1
                self.metrics.queue.set(self._waiting)

        try:
            async with contextlib.aclosing(self._served(job, begin)) as events:
                async for event in events:
                    yield event
        finally:
            begin()

    def _free(self) -> int:
        """Requests that would not wait at all."""
        busy = sum(one.turn.locked() for one in self._loaded.values())
        return max(0, self.limits.models - busy)

    def _retry_after(self) -> int:
        return max(1, min(300, round(self._took * (self._waiting + 1))))

    async def _served(self, job: Job, begin: Callable[[], None]) -> AsyncGenerator[Event, None]:
        yield Queued(self._waiting - 1)
        async with contextlib.aclosing(self._present(job)) as moved:
            async for event in moved:
                yield event
        stored = await asyncio.to_thread(read_aimage, self.store, job.reference)
        model = self._model(job, stored)
        model.users += 1
        try:
            async with model.turn:
                self._check_open(model)
                begun = self._clock()
                if model.runner is None or not model.runner.is_alive:
                    yield Loading()
                    await self._load(model)
                begin()
                async with contextlib.aclosing(self._run(model, job, begun)) as events:
                    async for event in events:
                        yield event
        finally:
            model.users -= 1
            model.used = self._clock()
            if job.keep_alive is not None:
                model.keep_alive = job.keep_alive
            await self._tidy(model)

    def _check_open(self, model: Loaded) -> None:
        if model.is_stopped:
            raise StoppedError(f"{model.reference} was stopped")
        if self.is_draining:
            raise StoppedError("the worker is about to end", hint="ask another one")

    def _model(self, job: Job, stored: Stored) -> Loaded:
        digest = stored.descriptor.digest
        model = self._loaded.get(digest)
        if model is None or model.is_stopped:
            model = self._loaded[digest] = Loaded(job.reference, digest)
            model.keep_alive = self.limits.keep_alive
        return model

    async def _run(self, model: Loaded, job: Job, begun: float) -> AsyncGenerator[Event, None]:
        runner = model.runner
        assert runner is not None  # noqa: S101 - it was loaded
        outcome, last = "cancelled", self._clock()
        events = runner.generate(
            _pinned(job.reference, model.digest),
            job.prompt,
            {**job.wishes, "previews": job.previews},
            job.encoding,
        )
        try:
            async with contextlib.aclosing(_within(events, self.limits.deadline)) as timed:
                async for event in timed:
                    now = self._clock()
                    if isinstance(event, Progress):
                        self.metrics.steps.observe(now - last)
                    last = now
                    yield event
                    if model.is_stopped:
                        raise StoppedError(f"{job.reference} was stopped")
            outcome = "done"
        except AImageError as error:
            outcome = "refused" if isinstance(error, errors.UsageError) else "failed"
            if not runner.is_alive:
                model.runner = None
                self.metrics.evictions.labels("died").inc()
            raise
        finally:
            took = self._clock() - begun
            self._took = 0.7 * self._took + 0.3 * took if outcome == "done" else self._took
            self.metrics.generations.labels(self._label(model), outcome).observe(took)
            if outcome == "cancelled":
                self.metrics.cancelled.inc()
            facts = {"outcome": outcome, "seconds": round(took, 3)}
            await self._news.tell("generate", model=str(model.reference), **facts)

    # -- models

    async def _load(self, model: Loaded) -> None:
        """Make room, and start the model's process."""
        async with self._loading:
            await self._make_room(model)
            begun = self._clock()
            reference = _pinned(model.reference, model.digest)
            runner = await Runner.start(self.store.roots, reference, dtype=self.limits.dtype)
            model.runner = runner
            took = self._clock() - begun
            self.metrics.loads.observe(took)
            await self._news.tell("load", model=str(model.reference), seconds=round(took, 3))
            self.metrics.models.labels(self._label(model)).set(1)
            self._changed.set()

    async def _make_room(self, model: Loaded) -> None:
        """Let the models go that were idle for longest; wait while all are at work."""
        while True:
            others = [one for one in self._loaded.values() if one is not model and one.runner]
            if len(others) < self.limits.models:
                return
            idle = [one for one in others if not one.users]
            if idle:
                await self._unload(min(idle, key=lambda one: one.used), "room")
                continue
            self._check_open(model)
            self._changed.clear()
            await self._changed.wait()

    async def _tidy(self, model: Loaded) -> None:
        """What a model becomes when a request has ended."""
        self._changed.set()
        if not model.users and (model.keep_alive <= 0 or model.is_stopped):
            await self._unload(model, "idle")

    async def _unload(self, model: Loaded, reason: str) -> None:
        runner, model.runner = model.runner, None
        if self._loaded.get(model.digest) is model:
            del self._loaded[model.digest]
        self._changed.set()
        if runner is not None:
            self.metrics.evictions.labels(reason).inc()
            self.metrics.models.labels(self._label(model)).set(0)
            await runner.stop()
            await self._news.tell("evict", model=str(model.reference), reason=reason)

    async def stop(self, reference: Reference) -> bool:
        """Have the models that ``reference`` means go, now; says whether there were any."""
        try:
            wanted = {(await asyncio.to_thread(self.store.resolve, reference)).digest}
        except NotFoundError:
            wanted = set()
        found = [
            one
            for one in self._loaded.values()
            if one.digest in wanted or one.reference == reference
        ]
        for model in found:
            model.is_stopped = True
            if not model.users:
                await self._unload(model, "stopped")
        return bool(found)

    async def expire(self) -> None:
        """Let idle models go whose time is over; to be called every now and then."""
        now = self._clock()
        for model in list(self._loaded.values()):
            if not model.users and now - model.used >= model.keep_alive:
                await self._unload(model, "idle")

    async def close(self, grace: float) -> None:
        """Take nothing more, let what runs end within ``grace`` seconds, then end everything."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any(one.users for one in self._loaded.values()):
                    self._changed.clear()
                    await self._changed.wait()
        for model in list(self._loaded.values()):
            await self._unload(model, "end")
        self._pullers.shutdown(wait=False, cancel_futures=True)

    def _label(self, model: Loaded) -> str:
        """A label for metrics: the name without tag and digest; there are not many of them."""
        return model.reference.repository

    # -- presence

    async def _present(self, job: Job) -> AsyncGenerator[Event, None]:
        """See that the AImage is in the store, and say how far its download is."""
        if job.pull != ALWAYS and await asyncio.to_thread(self._is_here, job.reference):
            return
        if job.pull == NEVER or job.reference.registry is None:
            if await asyncio.to_thread(self._is_here, job.reference):
                return
            raise NotFoundError(
                f"there is no model {job.reference} here",
                hint="pull it first" if job.reference.registry else "create it, or name a registry",
            )
        async with contextlib.aclosing(self.pull(job.reference)) as events:
            async for event in events:
                yield event

    def _is_here(self, reference: Reference) -> bool:
        try:
            stored = read_aimage(self.store, reference)
        except NotFoundError:
            return False
        return all(self.store.exists(blob) for blob in stored.manifest.children)

    async def pull(self, reference: Reference) -> AsyncGenerator[Pulling, None]:
        """Fetch an AImage; those who ask for one that is under way join. Raises as ``pull``."""
        name = str(reference)
        under_way = self._pulls.get(name)
        if under_way is None:
            moved = _Moved()
            call = partial(pull, reference, self.store, self._connection, on_event=moved.hear)
            task = asyncio.get_running_loop().run_in_executor(self._pullers, call)
            under_way = self._pulls[name] = (task, moved)
            task.add_done_callback(lambda done: self._pulled(name, done))
        task, moved = under_way
        while not task.done():
            yield Pulling(moved.done, moved.total)
            await asyncio.wait([task], timeout=_EVERY)
        task.result()
        yield Pulling(moved.total, moved.total)

    def _pulled(self, name: str, done: asyncio.Future[Any]) -> None:
        """A thread cannot be ended: a pull goes on when nobody waits, and what it got is kept."""
        del self._pulls[name]
        self.metrics.pulls.labels(
            "failed" if done.cancelled() or done.exception() else "done"
        ).inc()


class _Moved:
    """How far a copy is, heard from other threads."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def hear(self, event: Moved) -> None:
        if event.kind == "plan":
            self.total = event.count
        elif event.kind in ("progress", "skip"):
            self.done += event.count


def _pinned(reference: Reference, digest: Digest) -> str:
    """The name with the digest that it meant when the model was loaded."""
    text = str(reference).partition("@")[0]
    return f"{text}@{digest}"


async def _within(
    events: AsyncGenerator[Event, None], seconds: float
) -> AsyncGenerator[Event, None]:
    """The events, as long as they do not take longer. Raises DeadlineError."""
    end = None if seconds == FOR_EVER else time.monotonic() + seconds
    async with contextlib.aclosing(events):
        while True:
            try:
                left = None if end is None else max(0.0, end - time.monotonic())
                async with asyncio.timeout(left):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineError(
                    f"the request took longer than {seconds:g} seconds",
                    hint="ask for fewer steps or a smaller picture",
                ) from None
            yield event
