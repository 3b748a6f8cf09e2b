"""Requests whose pictures are computed at once: which ones, in what order, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.engine import scheduler
from clowder_aimage.engine.admission import GUILTY, INNOCENT, SUSPECT, DiedError
from clowder_aimage.engine.event import Event, ImageEvent, StartedEvent
from clowder_aimage.engine.queued_request import BatchKey
from clowder_aimage.errors import AImageError, NoMemoryError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.picture import read_picture
from clowder_aimage.model.pipeline import Step
from tests.wait import until_async
from tests.worker.engine_runs import Client, FakeRunner, job, played, sample, served, stocked

SMALL: dict[str, Any] = {"parameters": {"width": 32, "height": 32}}
LARGE: dict[str, Any] = {"parameters": {"width": 64, "height": 64}}


class BatchRunner(FakeRunner):
    """A model that computes four passes at once, of pictures of up to 32 x 32.

    ``begun`` are the seeds of requests by the order of their beginning, ``open`` those that are
    being computed, and ``most`` the largest number of them.
    """

    batches = BatchTable({32 * 32: 4})
    parallel = 4
    begun: ClassVar[list[int]] = []
    open: ClassVar[set[int]] = set()
    most: ClassVar[list[int]] = []
    errors: ClassVar[dict[int, list[AImageError]]] = {}

    async def generate(
        self,
        name: str,
        manifest: object,
        request: GenerateRequest,
        encoding: object,
        on_event: Callable[[Event], None],
    ) -> None:
        seed = request.sampling.seed
        self.begun.append(seed)
        self.open.add(seed)
        self.most.append(len(self.open))
        try:
            if faults := self.errors.get(seed):
                on_event(StartedEvent())
                raise faults.pop(0)
            await super().generate(name, manifest, request, encoding, on_event)
        finally:
            self.open.discard(seed)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("batches") / "store")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[BatchRunner]:
    monkeypatch.setattr(scheduler, "Runner", BatchRunner)
    for name in ("begun", "most"):
        monkeypatch.setattr(BatchRunner, name, [])
    monkeypatch.setattr(BatchRunner, "open", set())
    monkeypatch.setattr(BatchRunner, "errors", {})
    return BatchRunner


def begin(store: LayeredStore, play: Callable[[Any, Any], Any]) -> Any:
    """Run ``play(engine, ask)`` with a model whose pictures pause; ``ask(seed, ...)`` begins."""

    async def run(engine: Any) -> Any:
        await served(engine, job(seed=100))
        (model,) = engine.list_loaded()
        BatchRunner.begun.clear()
        model.runner.is_running.clear()

        async def ask(seed: int, **options: Any) -> Client:
            client = Client(engine, job(seed=seed, **options))
            await until_async(lambda: any(request.number for request in engine._requests))
            await asyncio.sleep(0)
            await until_async(
                lambda: seed in BatchRunner.begun or len(engine._scheduler._queue) >= 1
            )
            return client

        return await play(engine, ask)

    return played(store, run)


async def finish(engine: Any, clients: list[Client]) -> None:
    (model,) = engine.list_loaded()
    model.runner.is_running.set()
    for client in clients:
        assert isinstance((await client.result())[-1], ImageEvent)


def test_requests_of_one_size_and_steps_are_served_at_once_up_to_the_limit(
    store: LayeredStore, runner: type[BatchRunner]
) -> None:
    async def play(engine: Any, ask: Any) -> None:
        clients = [await ask(seed, **SMALL) for seed in range(5)]
        assert runner.begun == [0, 1, 2, 3] and engine.waiting == 1
        await finish(engine, clients)

    begin(store, play)
    assert max(runner.most) == 4 and runner.begun[-1] == 4


@pytest.mark.parametrize(
    "other", [LARGE, {**SMALL, "steps": 3}, {"parameters": {**SMALL["parameters"], "n": 4}}]
)
def test_a_request_that_fits_not_is_next_and_is_not_overtaken(
    store: LayeredStore, runner: type[BatchRunner], other: Any
) -> None:
    """Of another size, of other steps, or of too many pictures."""

    async def play(engine: Any, ask: Any) -> None:
        clients = [await ask(0, **SMALL)]
        clients += [await ask(1, **other)]
        clients += [await ask(seed, **SMALL) for seed in (2, 3)]
        assert runner.begun == [0]
        await finish(engine, clients)

    begin(store, play)
    assert runner.begun[:2] == [0, 1] and sorted(runner.begun[2:]) == [2, 3]
    assert max(runner.most) == 2


def test_large_pictures_are_served_one_after_another(
    store: LayeredStore, runner: type[BatchRunner]
) -> None:
    async def play(engine: Any, ask: Any) -> None:
        clients = [await ask(seed, **LARGE) for seed in range(3)]
        assert runner.begun == [0]
        await finish(engine, clients)

    begin(store, play)
    assert runner.begun == [0, 1, 2] and set(runner.most) == {1}


def test_a_client_that_leaves_ends_its_request_alone(
    store: LayeredStore, runner: type[BatchRunner]
) -> None:
    async def play(engine: Any, ask: Any) -> None:
        clients = [await ask(seed, **SMALL) for seed in range(3)]
        await clients[1].leave()
        assert runner.open == {0, 2}
        clients[1] = await ask(3, **SMALL)
        assert runner.open == {0, 2, 3}
        await finish(engine, clients)

    begin(store, play)


def test_the_estimated_wait_counts_those_that_will_be_computed_at_once(
    store: LayeredStore, runner: type[BatchRunner]
) -> None:
    async def play(engine: Any) -> None:
        await served(engine, job(seed=100, **SMALL))
        (model,) = engine.list_loaded()
        model.runner.is_running.clear()
        for pace in engine._paces.values():
            pace.seconds = 10.0
        engine._times.estimate = lambda *_: 10.0
        clients = [Client(engine, job(seed=seed, **SMALL)) for seed in range(12)]
        await until_async(lambda: len(engine._scheduler._queue) == 8)
        # Four are served, and two batches of four wait
        assert engine.estimate_wait() == 30.0
        await finish(engine, clients)

    played(store, play, queue=20, clock=lambda: 0.0)


def test_a_step_of_pictures_that_are_computed_at_once_is_counted_once(
    store: LayeredStore, runner: type[BatchRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, decoded = [0.0], list[float]()

    async def generate(*arguments: Any) -> None:
        on_event = arguments[-1]
        on_event(StartedEvent())
        for index in (1, 2, 3):
            for picture in range(4):
                on_event(Step(index, 3, picture))
        for picture in range(4):
            now[0] += 1
            on_event(ImageEvent(b"", 1, picture, 32, 32))

    def record(name: str, seconds: float) -> None:
        if name == "decode":
            decoded.append(seconds)

    monkeypatch.setattr("clowder_aimage.engine.engine.record", record)
    monkeypatch.setattr(runner, "generate", generate)

    async def play(engine: Any) -> float | None:
        await served(engine, job(steps=3, parameters={"n": 4, **SMALL["parameters"]}))
        return sample(engine, "aimage_generation_step_seconds_count")

    assert played(store, play, clock=lambda: now[0]) == 3
    assert decoded == [1.0] * 4


def test_a_lack_of_memory_ends_the_process_only_if_it_serves_no_others(
    store: LayeredStore, runner: type[BatchRunner]
) -> None:
    def lack(seed: int) -> None:
        runner.errors[seed] = [NoMemoryError("the memory of the GPU is insufficient")]

    async def play(engine: Any, ask: Any) -> None:
        loaded = engine.list_loaded()
        clients = [await ask(1, **SMALL)]
        lack(2)
        with pytest.raises(NoMemoryError):
            await (await ask(2, **SMALL)).result()
        assert engine.list_loaded() == loaded
        await finish(engine, clients)
        loaded[0].runner.is_encoding = True
        lack(3)
        with pytest.raises(NoMemoryError):
            await served(engine, job(seed=3, **SMALL))
        assert engine.list_loaded() == loaded
        loaded[0].runner.is_encoding = False
        lack(4)
        with pytest.raises(NoMemoryError):
            await served(engine, job(seed=4, **SMALL))
        assert not engine.list_loaded()

    begin(store, play)


@pytest.mark.parametrize("part", [GUILTY, SUSPECT, INNOCENT])
def test_a_request_of_a_process_that_died_is_served_again_alone(
    store: LayeredStore, runner: type[BatchRunner], part: str
) -> None:
    """Unless its process died of it."""
    error = DiedError("the model process exited")
    error.part = part
    runner.errors[1] = [error]

    async def play(engine: Any) -> list[Any]:
        return await served(engine, job(seed=1, **SMALL))

    if part == GUILTY:
        with pytest.raises(DiedError):
            played(store, play)
    else:
        assert isinstance(played(store, play)[-1], ImageEvent)
        assert runner.begun == [1, 1]


def test_the_key_of_a_batch_is_that_of_the_parameters() -> None:
    request = GenerateRequest.of("a fox", width=32, height=64, steps=3, n=2)
    key = BatchKey.of(request)
    assert key is not None and key.passes == 2
    guided = BatchKey.of(request.change(guidance=3.0, seed=5, prompt="another"))
    assert guided == key and guided is not None and guided.passes == 4
    assert BatchKey.of(request.change(width=64)) != key != BatchKey.of(request.change(steps=4))
    assert BatchKey.of(request.change(cache_threshold=0.1)) is None


# -- with the process


@pytest.fixture
def torch_limits() -> dict[str, Any]:
    pytest.importorskip("torch")
    return {"backend": "torch", "device": "cpu", "batch": 4, "dtype": "float32"}


@pytest.mark.integration
def test_a_process_computes_requests_at_once_and_ends_each_alone(
    store: LayeredStore, torch_limits: dict[str, Any]
) -> None:
    """One joins two, of which one is cancelled; pictures are those made alone."""

    async def play(engine: Any) -> Any:
        alone = await served(engine, job(steps=3, seed=1, **SMALL))
        before = sample(engine, "aimage_generation_batch_passes_count")
        first = Client(engine, job(steps=1000, seed=1, **SMALL))
        await first.hears(Step)
        second = Client(engine, job(steps=1000, seed=2, **SMALL))
        await second.hears(Step)
        (model,) = engine.list_loaded()
        assert len(model.served) == 2 and model.runner.parallel == 4
        await first.leave()
        other = Client(engine, job(steps=3, seed=5, **SMALL))
        # It has other steps, and is not computed at once
        heard = len(second.heard)
        await until_async(lambda: len(second.heard) > heard + 3)
        assert not any(isinstance(event, StartedEvent) for event in other.heard)
        await second.leave()
        await other.result()
        clients = [Client(engine, job(steps=3, seed=seed, **SMALL)) for seed in (1, 2, 3)]
        events = [await client.result() for client in clients]
        after = sample(engine, "aimage_generation_batch_passes_count")
        assert before is not None and after == before + 4
        return alone, events

    alone, events = played(store, play, **torch_limits)
    pictures = [each[-1] for each in events]
    assert max(picture.facts["batch"] for picture in pictures) > 1
    assert all(picture.facts["forward"] == "eager" for picture in pictures)
    exact, found = (
        read_picture(picture.data, "it").pixels.astype(int) for picture in (alone[-1], pictures[0])
    )
    assert np.abs(found - exact).max() <= 1
