"""The models that stay in memory: sizes, a budget and a request, and what is unloaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.engine import scheduler
from clowder_aimage.engine.event import QueuedEvent, StartedEvent
from clowder_aimage.engine.measurement import Measurement
from clowder_aimage.engine.memory_plan import LoadedModel, MemoryRoom, estimate_need, plan_load
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Digest
from tests.store import copy_store
from tests.worker.engine_runs import Client, FakeRunner, job, played, served, stocked

_MIB = 1 << 20


def model(name: str, need: int) -> LoadedModel:
    """Return a model: ``a!`` is busy, ``e`` does not count for the largest number."""
    digest = Digest.of(name.removesuffix("!").encode())
    return LoadedModel(digest, need, not name.endswith("!"), name != "e")


@pytest.mark.parametrize(
    ("loaded", "need", "room", "reserve", "evicted", "reserved"),
    [
        # No other model
        ({}, 6, MemoryRoom(20), 0, "", 0),
        ({}, 30, MemoryRoom(20), 0, "", 0),
        ({}, 6, MemoryRoom(None), 0, "", 0),
        # Beside others
        ({"a": 6}, 6, MemoryRoom(20), 0, "", 6),
        ({"a": 6, "b": 8}, 6, MemoryRoom(20), 0, "", 14),
        ({"a!": 14}, 6, MemoryRoom(20), 0, "", 14),
        ({"a": 600}, 600, MemoryRoom(None), 0, "", 600),
        # The least recently used are unloaded until it fits
        ({"a": 6, "b": 8}, 7, MemoryRoom(20), 0, "a", 8),
        ({"a": 6, "b": 8, "c": 6}, 13, MemoryRoom(20), 0, "ab", 6),
        ({"a!": 6, "b": 8}, 7, MemoryRoom(20), 0, "b", 6),
        # It fits alone, or not even alone
        ({"a": 6, "b": 8}, 20, MemoryRoom(20), 0, "ab", 0),
        ({"a": 6, "b": 8}, 30, MemoryRoom(20), 0, "ab", 0),
        # Busy models end first
        ({"a!": 15}, 6, MemoryRoom(20), 0, None, 0),
        ({"a!": 15, "b": 5}, 6, MemoryRoom(20), 0, None, 0),
        ({"a!": 1}, 30, MemoryRoom(20), 0, None, 0),
        # The memory that other programs leave
        ({"a": 6}, 6, MemoryRoom(20, free=6), 0, "", 6),
        ({"a": 6}, 6, MemoryRoom(20, free=5), 0, "a", 0),
        ({"a": 2, "b": 6}, 6, MemoryRoom(20, free=4), 0, "a", 6),
        ({"a!": 6}, 6, MemoryRoom(20, free=5), 0, None, 0),
        ({}, 6, MemoryRoom(20, free=0), 0, "", 0),
        # A largest number in addition
        ({"a": 6}, 6, MemoryRoom(20, models=1), 0, "a", 0),
        ({"a": 6, "b": 6}, 6, MemoryRoom(20, models=2), 0, "a", 6),
        ({"a": 15, "b": 5}, 6, MemoryRoom(20, models=2), 0, "a", 5),
        ({"a!": 6}, 6, MemoryRoom(20, models=1), 0, None, 0),
        # The enhancer: it does not count, and its memory is reserved
        ({"a": 6, "e": 4}, 6, MemoryRoom(20, models=1), 0, "a", 4),
        ({"e": 15}, 6, MemoryRoom(20, models=1), 0, "e", 0),
        ({}, 6, MemoryRoom(20), 4, "", 4),
        ({"a": 11}, 6, MemoryRoom(20), 4, "a", 4),
        ({"a": 10}, 6, MemoryRoom(20), 4, "", 14),
        ({"a": 3}, 17, MemoryRoom(20), 4, "", 3),
    ],
)
def test_models_are_unloaded_until_the_next_one_fits(
    loaded: dict[str, int],
    need: int,
    room: MemoryRoom,
    reserve: int,
    evicted: str | None,
    reserved: int,
) -> None:
    models = [model(name, size) for name, size in loaded.items()]
    plan = plan_load(model("next", need), models, room, reserve)
    if evicted is None:
        assert plan is None
    else:
        assert plan is not None
        assert [each.key for each in plan.evicted] == [model(name, 0).key for name in evicted]
        assert plan.reserved == reserved


@pytest.mark.parametrize(
    ("dtype", "size"), [(None, 800 + 50 + 30), ("float32", 1600 + 50 + 30), ("bf16", 800 + 50 + 30)]
)
def test_the_need_of_a_model_is_that_of_its_weights_by_dtype(dtype: str | None, size: int) -> None:
    def layer(nbytes: int, dtype: str | None = None, shape: Any = None) -> Any:
        descriptor = SimpleNamespace(size=nbytes)
        return SimpleNamespace(descriptor=descriptor, content=None, dtype=dtype, shape=shape)

    layers = [layer(800, "BF16", (20, 20)), layer(50, "int4", (20, 20)), layer(30)]
    stored: Any = SimpleNamespace(aimage=SimpleNamespace(layers=layers))
    assert estimate_need(stored, dtype) == 128 * _MIB + size * 5 // 4


@dataclass
class _Run:
    """Requests for models in turn: the loaded ones, and the bytes that each leaves to others."""

    store: LayeredStore

    def __call__(self, *names: str, **limits: Any) -> tuple[list[str], list[int]]:
        async def play(engine: Any) -> tuple[list[str], list[int]]:
            for name in names:
                await served(engine, job(name))
            loaded = engine.list_loaded()
            names_loaded = [each.reference.repository for each in loaded]
            return names_loaded, [getattr(each.runner, "reserved", -1) for each in loaded]

        result: tuple[list[str], list[int]] = played(self.store, play, free=lambda: None, **limits)
        return result


@pytest.fixture(scope="module")
def stored_models(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("plan") / "store")


@pytest.fixture
def run(stored_models: LayeredStore, monkeypatch: pytest.MonkeyPatch) -> _Run:
    monkeypatch.setattr(scheduler, "Runner", FakeRunner)
    monkeypatch.setattr(scheduler, "estimate_need", lambda *_: 6 * _MIB)
    return _Run(stored_models)


def test_a_worker_keeps_the_models_that_its_memory_has_room_for(run: _Run) -> None:
    # The first model leaves its memory to the second one, which had the rest from its load
    assert run("tiny", "other", memory=12 * _MIB) == (["other", "tiny"], [-1, 6 * _MIB])
    assert run("tiny", "other", memory=11 * _MIB) == (["other"], [-1])
    assert run("tiny", "other", memory=3 * _MIB) == (["other"], [-1])
    assert run("tiny", "other", "tiny", memory=11 * _MIB) == (["tiny"], [-1])
    assert run("tiny", "other", memory=12 * _MIB, models=1) == (["other"], [-1])


@pytest.mark.parametrize(("memory", "counts"), [(12, [2, 2]), (11, [1, 1])])
def test_a_model_waits_for_a_busy_one_that_leaves_no_memory(
    run: _Run, memory: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runners: list[FakeRunner] = []
    start = FakeRunner.start

    async def pause_first(*_: object) -> FakeRunner:
        runners.append(runner := await start())
        if len(runners) == 1:
            runner.is_running.clear()
        return runner

    monkeypatch.setattr(FakeRunner, "start", pause_first)

    async def play(engine: Any) -> list[int]:
        first = Client(engine, job("tiny"))
        await first.hears(StartedEvent)
        second = Client(engine, job("other"))
        await second.hears(QueuedEvent)
        if memory == 12:
            await second.result()
        during = len(engine.list_loaded())
        runners[0].is_running.set()
        await asyncio.gather(first.result(), second.result())
        return [during, len(engine.list_loaded())]

    assert played(run.store, play, memory=memory * _MIB, free=lambda: None) == counts


@pytest.mark.parametrize(
    ("has_gpu", "limits", "dtype"),
    [
        (False, {}, "float32"),
        (True, {}, "bfloat16"),
        (True, {"device": "cpu"}, "float32"),
        (False, {"dtype": "bf16"}, "bfloat16"),
    ],
)
def test_the_first_model_is_planned_in_the_type_of_its_device(
    run: _Run,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    limits: dict[str, Any],
    dtype: str,
) -> None:
    types: list[str | None] = []

    def estimate(_: object, dtype: str | None) -> int:
        types.append(dtype)
        return _MIB

    monkeypatch.setattr(scheduler, "may_have_gpu", lambda: has_gpu)
    monkeypatch.setattr(scheduler, "estimate_need", estimate)
    run("tiny", **limits)
    assert types[0] == dtype


def test_a_worker_plans_with_the_sizes_that_an_earlier_one_measured(
    run: _Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LayeredStore([copy_store(run.store.root, tmp_path / "store")])
    measure = _Run(store)
    assert measure("tiny", "other", memory=12 * _MIB)[0] == ["other", "tiny"]
    monkeypatch.setattr(FakeRunner, "size", 7 * _MIB)
    measure("tiny", memory=12 * _MIB)
    monkeypatch.setattr(FakeRunner, "size", 1000)
    assert measure("tiny", "other", memory=12 * _MIB)[0] == ["other"]
    assert measure("tiny", "other", memory=13 * _MIB)[0] == ["other", "tiny"]
    # That of another backend was not measured
    assert measure("tiny", "other", memory=12 * _MIB, backend="torch")[0] == ["other", "tiny"]
    fp8 = measure("tiny", "other", memory=12 * _MIB, compute="fp8")
    assert fp8[0] == ["other", "tiny"]
    # Nor was that of another version of the program
    monkeypatch.setattr("clowder_aimage.layout.description.__version__", "9.9.9")
    assert measure("tiny", "other", memory=12 * _MIB)[0] == ["other", "tiny"]


def test_the_memory_of_an_unloaded_model_is_left_to_the_others(run: _Run) -> None:
    async def play(engine: Any) -> int:
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        other, tiny = engine.list_loaded()
        assert tiny.runner.reserved == 6 * _MIB
        await engine.stop(other.reference)
        return int(tiny.runner.reserved)

    assert played(run.store, play, memory=12 * _MIB, free=lambda: None) == 0


def test_idle_models_are_unloaded_when_a_process_takes_more_than_estimated(run: _Run) -> None:
    async def play(engine: Any) -> list[list[str]]:
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        names = []
        for size in (6, 7):
            engine.list_loaded()[0].runner.size = size * _MIB
            await served(engine, job("other"))
            names.append([each.reference.repository for each in engine.list_loaded()])
        return names

    found = played(run.store, play, memory=12 * _MIB, free=lambda: None)
    assert found == [["other", "tiny"], ["other"]]


def test_the_memory_of_the_enhancer_is_reserved(run: _Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[object] = []
    start = FakeRunner.start

    async def record(*arguments: object, **_: object) -> FakeRunner:
        shares.append(arguments[-1])
        return await start()

    monkeypatch.setattr(FakeRunner, "start", record)
    assert run("tiny", memory=20 * _MIB, enhancer="other:latest")[0] == ["tiny"]
    # Without room for both, the image model has all
    run("tiny", memory=11 * _MIB, enhancer="other:latest")
    run("tiny", memory=20 * _MIB, enhancer="absent:latest")
    assert shares == [6 * _MIB, 0, 0]


@pytest.mark.parametrize(
    "value",
    [None, 7, [], {"size": "7"}, {"size": -7}, {"size": True}, {"load": nan}, {"request": [1]}],
)
def test_a_measurement_that_another_program_wrote_is_ignored(value: object) -> None:
    assert Measurement.parse(value) == Measurement()
    assert Measurement.parse({"size": 7, "load": 2, "new": 1}) == Measurement(7, 2.0)


@pytest.mark.parametrize(
    ("new", "is_recorded"),
    [
        (Measurement(100, 2.0, 5.0), False),
        (Measurement(105, 2.9, 3.4), False),
        (Measurement(106, 2.0, 5.0), True),
        (Measurement(100, 3.1, 5.0), True),
        (Measurement(100, 2.0, 3.3), True),
        # Unknown here
        (Measurement(50), False),
    ],
)
def test_a_measurement_is_recorded_if_it_differs(new: Measurement, is_recorded: bool) -> None:
    previous = Measurement(100, 2.0, 5.0)
    assert new.differs(previous) is is_recorded
    assert new.add(previous).size == max(new.size, 100)
