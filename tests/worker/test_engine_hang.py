"""The engine with model processes that hang, die or are slow: other requests are unaffected.

SIGSTOP simulates a process that is blocked by the kernel, a driver or a disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout.layered_store import LayeredStore

pytest.importorskip("mlx")
pytest.importorskip("prometheus_client")

from clowder_aimage.engine.admission import (
    FOR_EVER,
    DeadlineError,
    DiedError,
    EngineLimits,
    StoppedError,
)
from clowder_aimage.engine.event import (
    ImageEvent,
    LoadingEvent,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError
from clowder_aimage.model.pipeline import Step
from tests.wait import until_async
from tests.worker.engine_runs import (
    NAME,
    Client,
    children,
    is_gone,
    job,
    played,
    sample,
    served,
    stocked,
)

pytestmark = [
    pytest.mark.integration,  # each loads models in processes
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc"),
]


@pytest.fixture(scope="module")
def stocked_store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("hang") / "store")


async def at_work(engine: Any, name: str = "tiny", **options: Any) -> tuple[Client, Any]:
    """Return a client whose request runs, and the process id of its model."""
    client = Client(engine, job(name, steps=1000, **options))
    await client.hears(Step)
    (model,) = (one for one in engine.list_loaded() if str(one.reference) == f"{name}:latest")
    return client, model.runner.pid


async def queued(engine: Any, *names: str) -> list[Client]:
    """Return clients whose requests are queued in this order."""
    clients = []
    for name in names:
        clients.append(Client(engine, job(name)))
        await clients[-1].hears(QueuedEvent)
    return clients


async def loading(engine: Any, name: str = "tiny") -> tuple[Client, int]:
    """Return a client whose model is being loaded, and the id of the stopped loading process."""
    before = children()
    client = Client(engine, job(name))
    await until_async(lambda: children() - before)
    (pid,) = children() - before
    os.kill(pid, signal.SIGSTOP)
    await client.hears(LoadingEvent)
    return client, pid


def patient(engine: Any, deadline: float) -> None:
    engine.limits = dataclasses.replace(engine.limits, deadline=deadline)


# -- a process that dies


def test_a_process_that_dies_after_a_cancel_does_not_block_the_queue(
    stocked_store: LayeredStore,
) -> None:
    async def play(engine: Any) -> tuple[Any, Any]:
        first, pid = await at_work(engine)
        same, other = await queued(engine, "tiny", "other")
        os.kill(pid, signal.SIGSTOP)
        first.task.cancel()
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(same.result(), other.result())

    assert all(isinstance(heard[-1], ImageEvent) for heard in played(stocked_store, play))


def test_a_model_whose_process_dies_is_unloaded(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[Any, float | None]:
        await served(engine, job())
        (model,) = engine.list_loaded()
        shown = {"model": "tiny"}
        assert sample(engine, "aimage_model_loaded", **shown) == 1
        os.kill(model.runner.pid, signal.SIGKILL)
        await until_async(lambda: not model.is_ready)
        loaded = engine.list_loaded()
        await until_async(lambda: sample(engine, "aimage_model_loaded", **shown) == 0)
        return loaded, sample(engine, "aimage_model_evictions_total", reason="died")

    assert played(stocked_store, play) == ([], 1)


# -- a process that hangs


def test_the_deadline_applies_to_a_hung_process(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[str | None, Any, bool]:
        await served(engine, job())
        patient(engine, 0.5)
        client, pid = await at_work(engine)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="exceeded the deadline") as caught:
            await client.result()
        patient(engine, FOR_EVER)
        again = await served(engine, job())
        return caught.value.hint, again, is_gone(pid)

    hint, again, gone = played(stocked_store, play, cancel_timeout=0.1)
    assert "fewer steps" in hint
    assert isinstance(again[-1], ImageEvent)
    assert gone  # it did not react to the cancel


def test_the_deadline_counts_from_the_request(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[str | None, str | None]:
        client, pid = await loading(engine)
        patient(engine, 0.2)
        with pytest.raises(DeadlineError) as loads:
            await served(engine, job())
        patient(engine, FOR_EVER)
        os.kill(pid, signal.SIGCONT)
        await client.result()
        holds, pid = await at_work(engine)
        os.kill(pid, signal.SIGSTOP)
        patient(engine, 0.2)
        with pytest.raises(DeadlineError) as waits:
            await served(engine, job())
        os.kill(pid, signal.SIGCONT)
        await holds.leave()
        return loads.value.hint, waits.value.hint

    loads, waits = played(stocked_store, play)
    assert "being loaded" in loads
    assert "queued" in waits


def test_a_cancelled_long_step_finishes_before_the_next_request(
    stocked_store: LayeredStore,
) -> None:
    """Return at once to the cancelled client; the next one waits, and the model stays loaded."""

    async def play(engine: Any) -> tuple[Any, Any]:
        client, pid = await at_work(engine)
        os.kill(pid, signal.SIGSTOP)
        await client.leave()
        (after,) = await queued(engine, "tiny")
        assert not any(isinstance(event, StartedEvent) for event in after.heard)
        os.kill(pid, signal.SIGCONT)
        await after.result()
        return pid, engine.list_loaded()[0].runner.pid

    before, after = played(stocked_store, play)
    assert before == after


def test_repeated_cancellation_does_not_affect_later_requests(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[list[Any], list[Any]]:
        wanted = [(await served(engine, job(seed=seed)))[-1].data for seed in (5, 6)]
        client, pid = await at_work(engine)
        os.kill(pid, signal.SIGSTOP)
        for _ in range(3):  # the route and the server may both cancel it
            client.task.cancel()
            await asyncio.sleep(0)
        next_two = [Client(engine, job(seed=seed)) for seed in (5, 6)]
        for each in next_two:
            await each.hears(QueuedEvent)
        os.kill(pid, signal.SIGCONT)
        return wanted, [(await each.result())[-1].data for each in next_two]

    wanted, found = played(stocked_store, play)
    assert wanted == found


def test_stop_ends_a_process_that_hangs(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> Any:
        client, pid = await at_work(engine)
        (waits,) = await queued(engine, "tiny")
        os.kill(pid, signal.SIGSTOP)
        assert await engine.stop(NAME)
        assert is_gone(pid)
        for each in (client, waits):
            with pytest.raises(StoppedError, match="was stopped"):
                await each.result()
        return await served(engine, job())

    assert isinstance(played(stocked_store, play)[-1], ImageEvent)


# -- loads


def test_stop_ends_a_load(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> Any:
        client, pid = await loading(engine)
        assert await engine.stop(NAME)
        assert is_gone(pid)
        with pytest.raises(StoppedError, match="was stopped"):
            await client.result()
        return await served(engine, job("other"))

    assert isinstance(played(stocked_store, play)[-1], ImageEvent)


def test_stop_waits_for_a_process_that_is_slow_to_exit(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with many gigabytes takes long to exit."""
    kill, send = asyncio.subprocess.Process.kill, Runner.send
    killed, sent = [], []

    def slowly(process: Process) -> None:
        killed.append(process)
        asyncio.get_running_loop().call_later(0.3, kill, process)

    def recorded(runner: Runner, message: dict[str, Any]) -> None:
        sent.append(message["do"])
        send(runner, message)

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", slowly)
    monkeypatch.setattr(Runner, "send", recorded)

    async def play(engine: Any) -> bool:
        client, pid = await loading(engine)
        await until_async(lambda: sent == ["load"])
        await client.leave()
        await until_async(lambda: killed)
        assert await engine.stop(NAME)
        return is_gone(pid)

    assert played(stocked_store, play)


def test_stop_ends_a_model_that_has_just_been_loaded(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, stopping = Runner.start, []

    async def play(engine: Any) -> tuple[bool, Any]:
        async def started(*args: Any, **options: Any) -> Runner:
            runner = await start(*args, **options)
            (model,) = engine._scheduler.models
            stopping.append((asyncio.create_task(engine._scheduler.stop(model)), runner.pid))
            return runner

        monkeypatch.setattr(Runner, "start", started)
        client = Client(engine, job())
        await until_async(lambda: stopping)
        ((task, pid),) = stopping
        await task
        gone = is_gone(pid)
        await client.leave()
        return gone, engine.list_loaded()

    assert played(stocked_store, play) == (True, [])


def test_a_load_without_waiting_clients_is_cancelled(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[bool, Any, list[str]]:
        client, pid = await loading(engine)
        (other,) = await queued(engine, "other")
        await client.leave()
        heard = await other.result()
        return is_gone(pid), heard, [str(one.reference) for one in engine.list_loaded()]

    gone, heard, names = played(stocked_store, play)
    assert gone and isinstance(heard[-1], ImageEvent)
    assert names == ["other:latest"]


def test_a_load_without_progress_times_out(stocked_store: LayeredStore) -> None:
    async def play() -> bool:
        before = children()
        start = asyncio.create_task(
            Runner.start(
                stocked_store.roots,
                "tiny",
                stocked_store.resolve(NAME),
                EngineLimits(load_timeout=1.0),
            )
        )
        await until_async(lambda: children() - before)
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ModelError, match="no progress for 1 seconds"):
            await start
        return is_gone(pid)

    assert asyncio.run(asyncio.wait_for(play(), 60))


def test_a_failed_load_fails_all_waiting_requests(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> Any:
        first, pid = await loading(engine)
        (second,) = await queued(engine, "tiny")
        os.kill(pid, signal.SIGKILL)
        for each in (first, second):
            with pytest.raises(ModelError, match="killed by signal 9") as caught:
                await each.result()
            # Another worker of a fleet may load it
            assert not isinstance(caught.value, DiedError)
        return await served(engine, job())

    assert isinstance(played(stocked_store, play)[-1], ImageEvent)


def test_idle_models_are_evicted_when_a_load_runs_out_of_memory(
    stocked_store: LayeredStore,
) -> None:
    """The kernel reports lack of memory to a process only by killing it."""

    async def play(engine: Any) -> tuple[Any, bool, float | None]:
        await served(engine, job("other"))
        idle = engine.list_loaded()[0].runner.pid
        client, pid = await loading(engine)
        os.kill(pid, signal.SIGKILL)
        heard = await client.result()
        return heard, is_gone(idle), sample(engine, "aimage_model_evictions_total", reason="memory")

    heard, gone, evicted = played(stocked_store, play, models=2)
    assert isinstance(heard[-1], ImageEvent)
    assert gone and evicted == 1


def test_idle_models_are_evicted_when_free_memory_is_too_small(stocked_store: LayeredStore) -> None:
    limit = 1 << 30

    async def play(engine: Any) -> list[Any]:
        await served(engine, job("other"))
        engine.list_loaded()[0].runner.size = limit
        await served(engine, job("tiny"))
        return [str(one.reference) for one in engine.list_loaded()]

    assert played(stocked_store, play, models=2, free=lambda: 1000) == ["tiny:latest"]
    assert played(stocked_store, play, models=2, free=lambda: None) == [
        "tiny:latest",
        "other:latest",
    ]
    assert played(stocked_store, play, models=2, memory=limit, free=lambda: None) == ["tiny:latest"]


# -- the end


def test_closing_without_grace_stops_requests_cleanly(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> bool:
        client, pid = await at_work(engine)
        os.kill(pid, signal.SIGSTOP)
        await engine.close(0)
        with pytest.raises(StoppedError, match="shutting down"):
            await client.result()
        return is_gone(pid)

    assert played(stocked_store, play)


def test_a_closing_engine_loads_no_model(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[Any, list[Any], float | None]:
        client = Client(engine, job(steps=30))
        await client.hears(Step)
        os.kill(pid := engine.list_loaded()[0].runner.pid, signal.SIGSTOP)
        (other,) = await queued(engine, "other")
        closing = asyncio.create_task(engine.close(60))
        with pytest.raises(StoppedError, match="shutting down"):
            await other.result()
        os.kill(pid, signal.SIGCONT)
        await closing
        return (
            await client.result(),
            other.heard,
            sample(engine, "aimage_model_load_duration_seconds_count"),
        )

    heard, others, loads = played(stocked_store, play, models=1)
    assert isinstance(heard[-1], ImageEvent)
    assert [type(event) for event in others] == [QueuedEvent]
    assert loads == 1


def test_an_enhancer_is_loaded_beside_the_only_model(
    stocked_store: LayeredStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(engine: Any) -> set[str]:
        for name in ("other", "tiny", "other"):
            await served(engine, job(name))
        return {str(model.reference) for model in engine.list_loaded()}

    caplog.set_level(logging.WARNING, "aimage.worker")
    both = {"tiny:latest", "other:latest"}
    assert played(stocked_store, play, models=1, free=lambda: None) == {"other:latest"}
    found = played(stocked_store, play, models=1, enhancer="other:latest", free=lambda: None)
    assert found == both
    assert "room for the enhancer" not in caplog.text
    # Each load needs the memory of the other one, which is said once
    found = played(stocked_store, play, models=1, enhancer="other:latest", free=lambda: 1000)
    assert found == {"other:latest"}
    assert caplog.text.count("room for the enhancer") == 1
