"""Helpers that run an engine with real model processes and record the events of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from clowder_aimage.create import create
from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import Event, EventLog, ImageEvent, StartedEvent
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer import Provenance
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.pipeline import Step
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY
from tests.wait import until_async

NAME = Reference.parse("tiny")


def stocked(root: Path) -> LayeredStore:
    """Return a store with two models of different digests, ``tiny`` and ``other``."""
    store = LayeredStore([root])
    few = ModelForm(whole_files=True)
    create(store, NAME, TINY, form=few)
    other = Provenance(source="elsewhere")
    create(store, Reference.parse("other"), TINY, form=few, provenance=other)
    return store


def job(name: str = "tiny", steps: int = 2, seed: int = 1, **options: Any) -> dict[Any, Any]:
    """Return arguments for ``Engine.generate``."""
    more = options.pop("parameters", {}) | {"steps": steps, "seed": seed}
    make = lambda aimage: GenerateRequest.draft("a dog", **more).apply_defaults(aimage)  # noqa: E731
    return {"reference": Reference.parse(name), "make": make} | options


async def served(engine: Any, one: Any) -> list[Any]:
    async with contextlib.aclosing(engine.generate(**one)) as events:
        return [event async for event in events]


def played(
    store: LayeredStore,
    play: Callable[[Any], Coroutine[Any, Any, Any]],
    *,
    free: Callable[[], int | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **limits: Any,
) -> Any:
    """Run ``play(engine)`` on a new engine, then close the engine."""

    async def run() -> Any:
        metrics = Metrics()
        transfers = TransferQueue(store, ClientOptions(), metrics, EventLog())
        more: dict[str, Any] = {"clock": clock} | ({"free": free} if free else {})
        engine = Engine(store, transfers, EngineLimits(**limits), metrics, **more)
        try:
            async with asyncio.timeout(100):
                return await play(engine)
        finally:
            await engine.close(5)
            assert not engine.list_loaded()

    return asyncio.run(run())


class FakeRunner:
    """Simulate a model without a process. It pauses while ``is_running`` is cleared."""

    pid, size, total, device, dtype, parallel = 0, 1000, 0, "none", "float32", 1
    cancellations: tuple[asyncio.Task[None], ...] = ()
    is_encoding = is_discrete = is_on_gpu = False
    batches = BatchTable()

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_running = asyncio.Event()
        self.is_running.set()

    @classmethod
    async def start(cls, *_: object, **__: object) -> FakeRunner:
        await asyncio.sleep(0.02)
        return cls()

    @property
    def is_alive(self) -> bool:
        return not self.ended.done()

    is_free = is_alive  # no work continues after a cancel

    async def generate(
        self,
        _: str,
        __: object,
        request: GenerateRequest,
        ___: object,
        on_event: Callable[[Event], None],
    ) -> None:
        on_event(StartedEvent())
        for index in range(1, request.sampling.steps + 1):
            await self.is_running.wait()
            await asyncio.sleep(0.001)
            on_event(Step(index, request.sampling.steps, 0))
        on_event(
            ImageEvent(
                b"", request.sampling.seed, 0, request.sampling.width, request.sampling.height
            )
        )

    def reserve(self, size: int) -> None:
        self.reserved = size

    async def stop(self) -> None:
        if self.is_alive:
            self.ended.set_result(None)


class Client:
    """Send a request and record its events; ``result()`` returns them or raises the error."""

    def __init__(self, engine: Engine, one: dict[str, Any], *, loads: bool = False) -> None:
        self.heard: list[Event] = []
        terms = {key: one[key] for key in ("keep_alive", "pull") if key in one}
        self._events = engine.load(one["reference"], **terms) if loads else engine.generate(**one)
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> list[Event]:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                self.heard.append(event)
        return self.heard

    async def hears(self, kind: type) -> None:
        """Wait until an event of that type has been received."""
        await until_async(lambda: any(isinstance(event, kind) for event in self.heard))

    async def leave(self) -> None:
        """Cancel the request, and wait until the cancellation is processed."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def result(self) -> Any:
        return await self.task


def children() -> set[int]:
    """Return the ids of the running child processes."""
    found = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in file.read_text().split()}
    return found


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def sample(engine: Engine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(name, labels)
