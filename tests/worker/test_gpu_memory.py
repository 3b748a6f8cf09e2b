"""A GPU with memory of its own: what counts for it, and models that sleep instead of ending."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.create import create
from clowder_aimage.engine import machine, scheduler
from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.engine.event import ImageEvent, StartedEvent
from clowder_aimage.engine.process import ModelProcess
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.importer import Provenance
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model import library_choice
from clowder_aimage.oci import Reference
from tests.adapter.vectors import TINY
from tests.store import copy_store
from tests.wait import until_async
from tests.worker.engine_runs import Client, FakeRunner, job, played, served, stocked

_MIB = 1 << 20


class GpuRunner(FakeRunner):
    """A model on a GPU of 20 MiB; ``log`` has what its process was told."""

    is_discrete = is_on_gpu = True
    total, size = 20 * _MIB, 6 * _MIB
    log: ClassVar[list[str]] = []
    can_sleep = can_wake = True

    @classmethod
    async def start(cls, *arguments: Any, **options: Any) -> GpuRunner:
        cls.log.append("start")
        runner = await super().start(*arguments, **options)
        assert isinstance(runner, GpuRunner)
        return runner

    async def sleep(self, room: int) -> bool:
        self.log.append(f"sleep {room // _MIB}")
        return self.can_sleep

    async def wake_up(self, *_: object) -> None:
        self.log.append("wake")
        if not self.can_wake:
            self.ended.set_result(None)
            raise ModelError("the GPU is gone")

    async def stop(self) -> None:
        self.log.append("stop")
        await super().stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = stocked(tmp_path_factory.mktemp("gpu") / "store")
    return store.roots[0]


@pytest.fixture
def gpu(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a store of two models, each of 12 MiB of a GPU of 20."""
    monkeypatch.setattr(scheduler, "Runner", GpuRunner)
    monkeypatch.setattr(scheduler, "estimate_need", lambda *_: 12 * _MIB)
    monkeypatch.setattr(GpuRunner, "log", [])
    return LayeredStore([copy_store(models, tmp_path / "store")])


def log(gpu: Any, names: list[str], **options: Any) -> list[str]:
    """Return what the processes were told while models made a picture one after another."""

    async def play(engine: Any) -> list[str]:
        for name in names:
            events = await served(engine, job(name))
            assert isinstance(events[-1], ImageEvent)
        told = [*GpuRunner.log]
        GpuRunner.log.clear()
        return told

    options.setdefault("free", lambda: 8 * _MIB)
    found: list[str] = played(gpu, play, **options)
    return found


def test_an_evicted_model_sleeps_and_is_woken(gpu: Any) -> None:
    """The host's free memory is the room for copies: it does not count for the load."""
    told = log(gpu, ["tiny", "other", "tiny", "other"])
    assert told == ["start", "sleep 4", "start", "sleep 4", "wake", "sleep 4", "wake"]
    # All end with the worker
    assert GpuRunner.log.count("stop") == 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("can_sleep", ["start", "sleep 4", "stop", "start", "sleep 4", "stop", "start"]),
        ("can_wake", ["start", "sleep 4", "start", "sleep 4", "wake", "start"]),
    ],
)
def test_a_process_that_cannot_sleep_or_wake_is_replaced(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, fault: str, told: list[str]
) -> None:
    monkeypatch.setattr(GpuRunner, fault, False)
    assert log(gpu, ["tiny", "other", "tiny"]) == told


def test_few_models_sleep(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_ASLEEP", 0)
    told = log(gpu, ["tiny", "other"])
    assert told == ["start", "sleep 4", "stop", "start"]


def test_a_sleeping_model_expires_and_can_be_stopped(gpu: Any) -> None:
    timestamp = 0.0

    async def play(engine: Any) -> None:
        nonlocal timestamp
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        assert len(engine.list_loaded()) == 1
        assert await engine.stop(job("tiny")["reference"])
        assert GpuRunner.log[-1] == "stop"
        await served(engine, job("tiny"))
        assert GpuRunner.log[-2:] == ["sleep 4", "start"]
        timestamp += 1000
        await engine.expire()
        assert GpuRunner.log[-2:] == ["stop", "stop"]
        assert not engine._scheduler.models

    played(gpu, play, clock=lambda: timestamp, free=lambda: 8 * _MIB)


def test_a_request_is_served_after_a_sleeping_model_ended(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that came while the process of a sleeping model ended."""
    timestamp, may_end = 0.0, asyncio.Event()
    stop = GpuRunner.stop

    async def stop_later(self: GpuRunner) -> None:
        await may_end.wait()
        await stop(self)

    monkeypatch.setattr(GpuRunner, "stop", stop_later)

    async def play(engine: Any) -> None:
        nonlocal timestamp
        await served(engine, job("tiny"))
        timestamp += 200
        await served(engine, job("other"))
        # Of the sleeping model the keep-alive is over, and not of the other one
        timestamp += 150
        expiring = asyncio.create_task(engine.expire())
        await until_async(lambda: bool(engine._scheduler._unloads))
        client = Client(engine, job("tiny"))
        await until_async(lambda: bool(engine._scheduler._queue))
        may_end.set()
        async with asyncio.timeout(5):
            assert isinstance((await client.result())[-1], ImageEvent)
        await expiring

    played(gpu, play, clock=lambda: timestamp, free=lambda: 8 * _MIB)


def test_models_that_sleep_leave_the_machines_memory_to_a_language_model(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 12 MiB, of which 8 are free beside the copies."""
    elsewhere = Provenance(source="a third place")
    create(gpu, Reference.parse("third"), TINY, provenance=elsewhere)
    monkeypatch.setattr(machine, "read_memory_limit", lambda: 16 * _MIB)
    find_memory = scheduler.ModelScheduler._find_memory

    def find(self: Any, model: Any) -> int | None:
        # As if it were a language model on the CPU
        return None if model.reference.repository == "third" else find_memory(self, model)

    monkeypatch.setattr(scheduler.ModelScheduler, "_find_memory", find)

    async def play(engine: Any) -> None:
        for name in ("tiny", "other"):
            await served(engine, job(name))
        GpuRunner.log.clear()
        async with asyncio.timeout(5):
            assert isinstance((await served(engine, job("third")))[-1], ImageEvent)
        assert GpuRunner.log == ["stop", "start"]

    played(gpu, play, free=lambda: (16 if "stop" in GpuRunner.log else 8) * _MIB)


def test_models_of_the_machine_and_of_the_gpu_do_not_share_memory(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model takes 12 of 16 MiB of the machine, and a picture model 12 of 20."""
    monkeypatch.setattr(machine, "read_memory_limit", lambda: 16 * _MIB)

    async def play(engine: Any) -> tuple[int | None, int | None, int]:
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        (model,) = engine.list_loaded()
        # As if it were a language model on the CPU
        model.runner.is_discrete = False
        await served(engine, job("tiny"))
        return engine.budget, engine.room, len(engine.list_loaded())

    budget, room, count = played(gpu, play, free=lambda: 16 * _MIB)
    assert (budget, room, count) == (20 * _MIB, 8 * _MIB, 2)


def test_a_load_of_a_gpu_that_fails_leaves_no_sleeper(gpu: Any) -> None:
    """A request that is cancelled while its model wakes up."""
    is_waking, may_wake = asyncio.Event(), asyncio.Event()

    async def wake_up(self: GpuRunner, *_: object) -> None:
        is_waking.set()
        try:
            await may_wake.wait()
        except BaseException:
            self.ended.set_result(None)
            raise

    async def play(engine: Any) -> None:
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GpuRunner, "wake_up", wake_up)
            client = Client(engine, job("tiny"))
            await is_waking.wait()
            await engine.stop(job("tiny")["reference"])
            with pytest.raises(Exception, match="was stopped"):
                await client.task
        await until_async(lambda: not engine._scheduler._loads)
        events = await served(engine, job("tiny"))
        assert isinstance(events[-1], ImageEvent) and GpuRunner.log[-1] == "start"

    played(gpu, play, free=lambda: 8 * _MIB)


@pytest.mark.parametrize(
    ("total", "device", "is_on_gpu"),
    [
        (8, "torch 2.13.0 cuda (NVIDIA H100 80GB HBM3)", True),
        (0, "torch 2.13.0 cpu", False),
        (0, "gpu, mlx-lm", True),
        (0, "cpu (openblas)", False),
    ],
)
def test_a_model_is_on_a_gpu_if_its_process_says_so(
    total: int, device: str, is_on_gpu: bool
) -> None:
    runner = Runner.__new__(Runner)
    runner.total, runner.device = total, device
    assert runner.is_on_gpu == is_on_gpu


def test_the_process_counts_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    process, memory = ModelProcess.__new__(ModelProcess), SimpleNamespace()
    memory.is_discrete, memory.occupied = True, 7
    process._memory, process._model = 100, SimpleNamespace(memory=memory)
    assert process._measure_memory() == 7
    memory.is_discrete = False
    assert process._measure_memory() > 7


# -- several GPUs


@pytest.fixture
def two(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the store, for a worker with two GPUs; ``GpuRunner.log`` has the devices of loads."""

    async def start(*content: Any, **_: Any) -> GpuRunner:
        limits = content[3]
        GpuRunner.log.append(f"start {limits.device}")
        await asyncio.sleep(0)
        return GpuRunner()

    monkeypatch.setattr(EngineLimits, "places", (None, "cuda:1"))
    monkeypatch.setattr(GpuRunner, "start", start)
    return gpu


def test_requests_for_a_model_are_served_by_all_gpus(two: Any) -> None:
    """It is loaded on the second one while requests wait, and not for one after another."""

    async def play(engine: Any) -> None:
        for _ in range(3):
            await served(engine, job())
        assert GpuRunner.log == ["start None"]
        (first,) = engine.list_loaded()
        first.runner.is_running.clear()
        clients = [Client(engine, job(seed=seed)) for seed in range(4)]
        # While the first GPU is busy, the second one serves all others
        await until_async(lambda: sum(client.task.done() for client in clients) == 3)
        assert GpuRunner.log == ["start None", "start cuda:1"]
        assert {model.key.place for model in engine.list_loaded()} == {0, 1}
        first.runner.is_running.set()
        for client in clients:
            assert isinstance((await client.result())[-1], ImageEvent)
        assert engine.budget == 40 * _MIB and engine.room == 8 * _MIB
        assert not any(model.users or model.served for model in engine.list_loaded())
        assert await engine.stop(job()["reference"])
        assert not engine.list_loaded()

    played(two, play, free=lambda: 8 * _MIB)


def test_two_models_are_on_two_gpus(two: Any) -> None:
    async def play(engine: Any) -> None:
        await served(engine, job("tiny"))
        (first,) = engine.list_loaded()
        first.runner.is_running.clear()
        client = Client(engine, job("tiny"))
        await client.hears(StartedEvent)
        await served(engine, job("other"))
        assert GpuRunner.log == ["start None", "start cuda:1"]
        first.runner.is_running.set()
        await client.result()

    played(two, play, free=lambda: 8 * _MIB)


def test_a_gpu_that_fails_is_used_no_more(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are served by the first one, which says why if it fails too."""
    start = GpuRunner.start

    async def fail(*content: Any, **_: Any) -> GpuRunner:
        if content[3].device == "cuda:1":
            GpuRunner.log.append("fail")
            raise ModelError("the GPU is gone")
        return await start(*content)

    monkeypatch.setattr(GpuRunner, "start", fail)

    async def play(engine: Any) -> None:
        await served(engine, job())
        (first,) = engine.list_loaded()
        first.runner.is_running.clear()
        clients = [Client(engine, job(seed=seed)) for seed in range(3)]
        await until_async(lambda: "fail" in GpuRunner.log)
        first.runner.is_running.set()
        for client in clients:
            assert isinstance((await client.result())[-1], ImageEvent)
        assert GpuRunner.log == ["start None", "fail"]

    played(two, play, free=lambda: 8 * _MIB)


@pytest.mark.parametrize(
    ("backend", "visible", "files", "places"),
    [
        ("torch", None, 3, (None, "cuda:1", "cuda:2")),
        ("torch", "0,2", 3, (None, "cuda:1")),
        ("torch", "", 3, (None,)),
        ("torch", None, 0, (None,)),
        ("mlx", None, 3, (None,)),
        ("auto", None, 3, (None,)),
    ],
)
def test_the_gpus_of_a_machine_are_counted_without_a_library(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    visible: str | None,
    files: int,
    places: tuple[str | None, ...],
) -> None:
    for number in range(files):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(library_choice, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(library_choice, "_is_installed", lambda _: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert library_choice.list_places.__wrapped__(backend) == places
    assert EngineLimits(device="cuda:5").places == ("cuda:5",)


# -- on request


def test_a_model_sleeps_on_request_and_the_next_request_wakes_it(gpu: Any) -> None:
    """One that serves a request stays; one that is not loaded does too."""

    async def play(engine: Any) -> list[str]:
        reference = job("tiny")["reference"]
        assert not await engine.sleep(reference, None)
        await served(engine, job("tiny"))
        (model,) = engine.list_loaded()
        model.runner.is_running.clear()
        client = Client(engine, job("tiny"))
        await client.hears(StartedEvent)
        with pytest.raises(UsageError, match="serves 1 requests"):
            await engine.sleep(reference, None)
        model.runner.is_running.set()
        await client.result()
        assert await engine.sleep(reference, None) and not engine.list_loaded()
        assert [each.sleeper for each in engine._scheduler.models] == [model.sleeper]
        await served(engine, job("tiny"))
        return [*GpuRunner.log]

    told = played(gpu, play, free=lambda: 8 * _MIB)
    assert told == ["start", "sleep 4", "wake"]


def test_a_model_without_a_gpu_sleeps_on_request(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuRunner, "is_discrete", False)

    async def play(engine: Any) -> list[str]:
        await served(engine, job("tiny"))
        assert await engine.sleep(job("tiny")["reference"], None)
        await served(engine, job("tiny"))
        return [*GpuRunner.log]

    # Copies would take the memory that its files have
    assert played(gpu, play, free=lambda: 64 * _MIB) == ["start", "sleep 0", "wake"]
