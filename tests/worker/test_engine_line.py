"""The scheduler and the queue of an engine, with simulated models."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.real_registry import RealRegistry

pytest.importorskip("prometheus_client")

from clowder_aimage.engine.admission import (
    CALLER,
    BusyError,
    CallerBusyError,
    DeadlineError,
    StoppedError,
    compute_retry,
)
from clowder_aimage.engine.event import (
    ImageEvent,
    LoadingEvent,
    PullingEvent,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.engine.machine import read_available_memory
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.model_fetch import fetch
from clowder_aimage.engine.queued_request import ModelKey, ModelSlot, QueuedRequest
from clowder_aimage.errors import ModelError, NotFoundError, UnrunnableError, UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.pipeline import Step
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.wait import until_async
from tests.worker.engine_runs import (
    NAME,
    Client,
    FakeRunner,
    job,
    played,
    sample,
    served,
    stocked,
)


@pytest.fixture(scope="module")
def stocked_store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("line") / "store")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.engine.scheduler.Runner", FakeRunner)


@contextmanager
def silence() -> Iterator[str]:
    """Run a registry that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


# -- the queue and the models in memory


def test_requests_beyond_the_queue_are_refused_at_once(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[list[Any], int | str, Any]:
        async def one(seed: int) -> int | str:
            try:
                await served(engine, job(seed=seed))
            except BusyError as error:
                return error.retry_after
            return "served"

        found = await asyncio.gather(*(one(seed) for seed in range(20)))
        after = await one(99)
        return found, after, engine.waiting

    found, after, waiting = played(stocked_store, play, queue=4)
    assert found.count("served") == 5  # one running and four queued
    assert all(retry >= 1 for retry in found if retry != "served")
    assert (after, waiting) == ("served", 0)


def test_one_caller_does_not_take_all_places_of_the_queue(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> list[Any]:
        async def one(seed: int, caller: str) -> object:
            CALLER.set(caller)
            try:
                await served(engine, job(seed=seed))
            except BusyError as error:
                return type(error)
            return "served"

        callers = [*("many",) * 20, "few"]
        tasks = [asyncio.create_task(one(*each)) for each in enumerate(callers)]
        return await asyncio.gather(*tasks)

    *many, few = played(stocked_store, play, queue=4)
    assert few == "served" and set(many) == {"served", CallerBusyError}


def test_a_cancelled_request_leaves_the_queue(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> Any:
        running = engine.generate(**job(steps=300))
        await anext(running)
        while not isinstance(await anext(running), Step):
            pass
        waiting = asyncio.create_task(served(engine, job()))
        await until_async(lambda: engine.waiting)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        left = engine.waiting
        await running.aclose()
        return left

    assert played(stocked_store, play, queue=1) == 0


def test_an_idle_model_is_unloaded_after_keep_alive(stocked_store: LayeredStore) -> None:
    now = [0.0]

    async def play(engine: Any) -> list[int]:
        await served(engine, job(keep_alive=0))
        found = [len(engine.list_loaded())]
        await served(engine, job(keep_alive=60))
        for now[0] in (59.0, 61.0):
            await engine.expire()
            found.append(len(engine.list_loaded()))
        return found

    assert played(stocked_store, play, clock=lambda: now[0]) == [0, 1, 0]


def test_an_infinite_keep_alive_never_expires(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> Any:
        await served(engine, job(keep_alive=float("inf")))
        await engine.expire()
        (model,) = engine.list_loaded()
        return model.until

    assert played(stocked_store, play, keep_alive=0.0) is None


def test_the_longest_idle_model_is_evicted(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[Any, list[str]]:
        await served(engine, job("tiny"))
        runner = engine.list_loaded()[0].runner
        await served(engine, job("other"))
        return runner.is_alive, [str(model.reference) for model in engine.list_loaded()]

    assert played(stocked_store, play, models=1) == (False, ["other:latest"])


def test_the_model_of_the_least_cost_is_evicted(stocked_store: LayeredStore) -> None:
    """A fleet knows which model is missed least; of equal cost is the one idle for longest."""

    async def play(engine: Any) -> list[str]:
        await served(engine, job("tiny"))
        await served(engine, job("other"))
        names = []
        for costs in ({}, {"other:latest": 1.0}, {"tiny:latest": 1.0}):
            digests = {str(one.digest): str(one.reference) for one in engine.list_loaded()}
            engine.set_eviction_cost(lambda digest, w=costs, d=digests: w.get(d[str(digest)], 0.0))
            names.append(str(engine._scheduler._select_idle().reference))
        return names

    assert played(stocked_store, play, models=2) == ["tiny:latest", "tiny:latest", "other:latest"]


def test_a_model_that_cannot_be_run_is_not_loaded_again(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []

    async def refuse(*content: object, **_: object) -> FakeRunner:
        loads.append(content[1])
        raise errors[len(loads) - 1]

    errors = [ModelError("it ended"), UnrunnableError("no such network", hint="try GGUF")]
    monkeypatch.setattr(FakeRunner, "start", refuse)

    async def play(engine: Any) -> list[Any]:
        return [
            await asyncio.gather(served(engine, job()), return_exceptions=True) for _ in range(4)
        ]

    found = [error for (error,) in played(stocked_store, play)]
    assert [str(error) for error in found] == ["it ended", *["no such network"] * 3]
    assert {error.hint for error in found[1:]} == {"try GGUF"}
    assert len(loads) == 2


def test_two_models_stay_loaded_within_the_limit(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> list[Any]:
        await asyncio.gather(served(engine, job("tiny")), served(engine, job("other")))
        return sorted(str(model.reference) for model in engine.list_loaded())

    assert played(stocked_store, play, models=2) == ["other:latest", "tiny:latest"]


def test_stop_ends_a_running_request(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[int, Any]:
        events = engine.generate(**job(steps=1000))
        async for event in events:
            if isinstance(event, Step):
                break
        assert await engine.stop(NAME)
        with pytest.raises(StoppedError, match="was stopped"):
            async for _ in events:
                pass
        return len(engine.list_loaded()), await engine.stop(NAME)

    assert played(stocked_store, play) == (0, False)


def test_a_request_beyond_its_deadline_fails(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[float | None, float | None, Any]:
        await served(engine, job())
        engine.limits = dataclasses.replace(engine.limits, deadline=1.0)
        with pytest.raises(DeadlineError, match="exceeded the deadline"):
            await served(engine, job(steps=1000, parameters={"width": 512, "height": 512}))
        failed = sample(
            engine, "aimage_generation_duration_seconds_count", model="tiny", outcome="failed"
        )
        given_up = sample(engine, "aimage_generation_cancelled_total")
        engine.limits = dataclasses.replace(engine.limits, deadline=float("inf"))
        return failed, given_up, await served(engine, job(steps=1))

    failed, given_up, heard = played(stocked_store, play)
    assert (failed, given_up) == (1, 0)  # no client cancelled
    assert isinstance(heard[-1], ImageEvent)


@pytest.mark.parametrize("name", ["absent", "localhost:1/absent"])
def test_a_missing_model_is_not_found(stocked_store: LayeredStore, name: str) -> None:
    async def play(engine: Any) -> None:
        with pytest.raises(NotFoundError, match="not found"):
            await served(engine, job(name, pull="never"))

    played(stocked_store, play)


def test_a_missing_model_is_pulled_with_progress_events(
    stocked_store: LayeredStore, registry: RealRegistry, repository: str, tmp_path: Path
) -> None:
    from clowder_aimage.engine.event import PullingEvent
    from clowder_aimage.push import push

    there = Reference.parse(f"{repository}:v1")
    stocked_store.tag(stocked_store.resolve(NAME), there)
    push(stocked_store, there, ClientOptions())
    fresh = LayeredStore([tmp_path / "fresh"])

    async def play(engine: Any) -> Any:
        return await served(engine, job(str(there)))

    events = played(fresh, play)
    pulling = [event for event in events if isinstance(event, PullingEvent)]
    assert pulling[-1].done == pulling[-1].total > 0
    assert isinstance(events[-1], ImageEvent)


def test_a_closing_engine_refuses_requests_and_finishes_running_ones(
    stocked_store: LayeredStore,
) -> None:
    async def play(engine: Any) -> Any:
        running = asyncio.create_task(served(engine, job(steps=50)))
        await until_async(engine.list_loaded)
        closing = asyncio.create_task(engine.close(60))
        await asyncio.sleep(0)
        with pytest.raises(StoppedError):
            await served(engine, job())
        await closing
        return await running

    assert isinstance(played(stocked_store, play)[-1], ImageEvent)


def test_a_cancelled_request_stops_within_one_step(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[int, Any, int]:
        async with contextlib.aclosing(engine.generate(**job(steps=1000))) as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, Step)
                if seen == 3:
                    break
        steps = _count(engine, "aimage_generation_step_seconds_count")
        again = await served(engine, job())
        return steps, again, _count(engine, "aimage_generation_cancelled_total")

    steps, again, cancelled = played(stocked_store, play)
    assert steps == 3
    assert isinstance(again[-1], ImageEvent)
    assert cancelled == 1


def _count(engine: Any, name: str) -> int:
    for line in engine.metrics.format_text().decode().splitlines():
        if line.startswith(name):
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError(name)


# -- order


def test_requests_are_served_in_order_across_models(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[list[Any], list[Any]]:
        first = Client(engine, job(steps=1000))
        await first.hears(Step)
        is_running = engine.list_loaded()[0].runner.is_running
        is_running.clear()
        order, clients = [], []
        for name in ("tiny", "other", "tiny", "tiny"):
            clients.append(client := Client(engine, job(name)))
            await client.hears(QueuedEvent)
            number = len(clients)
            client.task.add_done_callback(partial(lambda each, _: order.append(each), number))
        await first.leave()
        is_running.set()
        for each in clients:
            await each.result()
        return order, [getattr(each.heard[0], "ahead", None) for each in clients]

    order, ahead = played(stocked_store, play, models=1)
    assert order == [1, 2, 3, 4]
    assert ahead == [0, 1, 2, 3]


def test_a_waiting_request_is_told_its_new_place(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.engine.engine.POSITION_INTERVAL", 0.01)

    async def play(engine: Any) -> list[int]:
        first = Client(engine, job(steps=1000))
        await first.hears(Step)
        engine.list_loaded()[0].runner.is_running.clear()
        second = Client(engine, job())
        await second.hears(QueuedEvent)
        third = Client(engine, job())
        await third.hears(QueuedEvent)
        await second.leave()
        await until_async(lambda: len(third.heard) == 2)
        places = [getattr(event, "ahead", -1) for event in third.heard]
        engine.list_loaded()[0].runner.is_running.set()
        await first.leave()
        await third.result()
        return places

    assert played(stocked_store, play) == [1, 0]


def test_a_load_does_not_block_requests_for_loaded_models(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engine: Any) -> tuple[Any, bool]:
        await served(engine, job("tiny"))
        may_load, start = asyncio.Event(), FakeRunner.start

        async def load(*arguments: Any, **options: Any) -> FakeRunner:
            await may_load.wait()
            return await start(*arguments, **options)

        monkeypatch.setattr(FakeRunner, "start", load)
        other = Client(engine, job("other"))
        await other.hears(LoadingEvent)
        before = len(other.heard)
        heard = await served(engine, job("tiny"))
        is_loading = len(other.heard) == before
        may_load.set()
        await other.result()
        return heard, is_loading

    heard, is_loading = played(stocked_store, play, models=2)
    assert isinstance(heard[-1], ImageEvent) and is_loading


def test_a_model_that_arrives_is_loaded_only_while_no_other_is_wanted(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(engine: Any) -> tuple[Any, ...]:
        ended, start = asyncio.Event(), FakeRunner.start

        async def load(*arguments: Any) -> FakeRunner:
            if arguments[-2]:  # it is arriving
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
            return await start()

        monkeypatch.setattr(FakeRunner, "start", load)
        scheduler, stored = engine._scheduler, read_aimage(stocked_store, Reference.parse("other"))
        early = [QueuedRequest(Reference.parse("other")) for _ in range(2)]
        for each in early:
            scheduler.prepare(each, stored, None)
        scheduler.leave(early[0])
        is_kept = not ended.is_set() and len(scheduler.models) == 1
        heard = await served(engine, job("tiny"))
        scheduler.prepare(QueuedRequest(Reference.parse("other")), stored, None)
        loads = len(scheduler.models)
        await served(engine, job("other"))
        scheduler.leave(early[1])
        return is_kept, ended.is_set(), heard[-1], loads

    is_kept, is_ended, last, models = played(stocked_store, play, models=1)
    assert is_kept and is_ended
    assert isinstance(last, ImageEvent)
    assert models == 2  # the one that was given up for tiny waits for its pull


# -- downloads


def test_hung_downloads_do_not_block_requests_for_loaded_models(
    stocked_store: LayeredStore,
) -> None:
    async def play(engine: Any) -> tuple[Any, list[Any]]:
        with silence() as host:
            pulls = [Client(engine, job(f"{host}/team/x{number}")) for number in range(3)]
            for each in pulls:
                await each.hears(PullingEvent)
            with pytest.raises(BusyError, match="3 requests are waiting"):
                await served(engine, job(f"{host}/team/more"))
            waiting = engine.waiting
            heard = [await served(engine, job()) for _ in range(2)]
            for each in pulls:
                await each.leave()
        return waiting, heard

    waiting, heard = played(stocked_store, play, queue=2)
    assert waiting == 3
    assert all(isinstance(one[-1], ImageEvent) for one in heard)


def test_the_deadline_includes_the_download(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> str | None:
        with silence() as host, pytest.raises(DeadlineError) as caught:
            await served(engine, job(f"{host}/team/x"))
        return caught.value.hint

    assert "being pulled" in played(stocked_store, play, deadline=0.3)


def test_closing_the_engine_stops_requests_that_wait_for_a_download(
    stocked_store: LayeredStore,
) -> None:
    async def play(engine: Any) -> None:
        with silence() as host:
            asked = Client(engine, job(f"{host}/team/x"))
            await asked.hears(PullingEvent)
            other = Reference.parse(f"{host}/team/y")
            pull = asyncio.create_task(fetch(engine._transfers, other, lambda _: None))
            await until_async(lambda: engine._transfers.find_pull(other))
            await engine.close(60)
            for each in (asked.task, pull):
                with pytest.raises(StoppedError):
                    await each

    played(stocked_store, play)


# -- requests


def test_a_load_request_generates_nothing_and_skips_the_queue(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> tuple[Any, bool, Any, Any]:
        first = Client(engine, job(keep_alive=0.0), loads=True)
        heard = await first.result()
        gone = not engine.list_loaded()
        working = Client(engine, job(steps=1000))
        await working.hears(Step)
        again = await Client(engine, job(keep_alive=77.0), loads=True).result()
        kept = engine.list_loaded()[0].keep_alive
        await working.leave()
        return heard, gone, again, kept

    heard, gone, again, kept = played(stocked_store, play)
    assert [type(event) for event in heard] == [QueuedEvent, LoadingEvent]
    assert gone  # keep_alive is 0
    assert [type(event) for event in again] == [QueuedEvent]
    assert kept == 77.0


def test_parameters_may_depend_on_the_model(stocked_store: LayeredStore) -> None:
    def make(aimage: Any) -> GenerateRequest:
        return GenerateRequest.draft("a dog", steps=len(aimage.layers) and 3).apply_defaults(aimage)

    def refuse(aimage: Any) -> NoReturn:
        raise UsageError("not by this one")

    async def play(engine: Any) -> Any:
        heard = await served(engine, {"reference": NAME, "make": make})
        with pytest.raises(UsageError, match="not by this one"):
            await served(engine, {"reference": NAME, "make": refuse})
        return heard

    heard = played(stocked_store, play)
    assert sum(isinstance(event, Step) for event in heard) == 3
    assert sum(isinstance(event, StartedEvent) for event in heard) == 1


@pytest.mark.parametrize("part", ["config", "layer", "manifest"])
def test_a_damaged_model_is_reported_as_damaged(tmp_path: Path, part: str) -> None:
    stocked_store = LayeredStore([tmp_path / "store"])
    stocked(tmp_path / "store")
    stored = read_aimage(stocked_store, NAME)
    blob = {
        "config": stored.manifest.config,
        "layer": stored.manifest.layers[-1],
        "manifest": stored.descriptor,
    }[part]
    path = stocked_store.find_path(blob)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])

    async def play(engine: Any) -> str | None:
        with pytest.raises(NotFoundError, match="incomplete or damaged: the store lacks") as caught:
            await served(engine, job())
        return caught.value.hint

    assert "pull or create it again" in played(stocked_store, play)


class ForgetfulRunner(FakeRunner):
    """Simulate a model that reads a part again, which the store may lack."""

    async def generate(
        self, _: str, manifest: object, request: GenerateRequest, *rest: Any
    ) -> None:
        if request.prompt == "new":
            raise NotFoundError("sha256:0 not found in the store")
        await super().generate(_, manifest, request, *rest)


def test_a_model_in_memory_works_without_its_blobs_until_it_reads_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.engine.scheduler.Runner", ForgetfulRunner)
    store = stocked(tmp_path / "store")
    blob = store.find_path(read_aimage(store, NAME).manifest.layers[-1])

    async def play(engine: Any) -> list[str]:
        await served(engine, job())
        messages = []
        for _ in range(2):
            with pytest.raises(NotFoundError) as caught:
                await served(engine, job() | {"make": lambda _: GenerateRequest.of("new")})
            messages.append(caught.value.message)
            blob.unlink(missing_ok=True)
            await served(engine, job())
        assert await engine.read(NAME)
        await engine.stop(NAME)
        with pytest.raises(NotFoundError) as caught:
            await served(engine, job())
        return [*messages, caught.value.message]

    whole, *damaged = played(store, play)
    assert whole == "sha256:0 not found in the store"
    lacks = "model tiny:latest is incomplete or damaged: the store lacks "
    assert [message.startswith(lacks) for message in damaged] == [True, True]


# -- metrics


def test_the_loaded_metric_counts_all_tags_of_a_model(tmp_path: Path) -> None:
    stocked_store = stocked(tmp_path / "store")
    for tag, name in (("a", "tiny"), ("b", "other")):
        stocked_store.tag(
            stocked_store.resolve(Reference.parse(name)), Reference.parse(f"same:{tag}")
        )

    async def play(engine: Any) -> list[float | None]:
        await served(engine, job("same:a"))
        await served(engine, job("same:b"))
        shown = [sample(engine, "aimage_model_loaded", model="same")]
        for tag in ("a", "b"):
            assert await engine.stop(Reference.parse(f"same:{tag}"))
            shown.append(sample(engine, "aimage_model_loaded", model="same"))
        return shown

    assert played(stocked_store, play, models=2) == [1, 1, 0]


def test_the_number_of_model_labels_is_limited() -> None:
    metrics = Metrics()
    labels = {metrics.model(f"team/model-{number}") for number in range(200)}
    assert "other" in labels and len(labels) == 51
    metrics.show_models(["team/model-0", "team/model-199"])
    metrics.show_models(["team/model-199"])
    shown = {
        sample.labels["model"]: sample.value
        for metric in metrics.models.collect()
        for sample in metric.samples
    }
    assert shown == {"team/model-0": 0, "other": 1}


@pytest.mark.parametrize("seconds", [99999999 * 3600.0, 1e300, float("inf")])
def test_a_huge_keep_alive_never_expires(stocked_store: LayeredStore, seconds: float) -> None:
    stored = read_aimage(stocked_store, NAME)
    model = ModelSlot(NAME, stored, ModelKey(stored.descriptor.digest), keep_alive=seconds)
    assert not model.until
    model.keep_alive = 60.0
    until = model.until
    assert until is not None
    assert 0 < (until - datetime.now(UTC)).total_seconds() <= 60


# -- memory


def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    assert read_available_memory(tmp_path) is None
    for name, text in {
        "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    4000 kB\n",
        "proc/self/cgroup": "1:cpu:/x\n0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "3000000\n",
        "sys/fs/cgroup/a/memory.current": "2500000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_available_memory(tmp_path) == 600_000
    (tmp_path / "sys/fs/cgroup/a/memory.max").write_text("max\n")
    assert read_available_memory(tmp_path) == 4000 * 1024


@pytest.mark.parametrize(
    ("wait", "max_wait", "retry"),
    [
        (None, 0.0, 5),
        (None, 30.0, 5),
        (7.2, 0.0, 8),
        (7.2, 7.0, 1),
        (0.1, 0.0, 1),
        (999.0, 1.0, 300),
    ],
)
def test_a_refused_request_is_repeated_when_it_may_be_admitted(
    wait: float | None, max_wait: float, retry: int
) -> None:
    assert compute_retry(wait, max_wait) == retry


@pytest.mark.parametrize(
    ("seconds", "begun_at", "mean", "remaining"),
    [
        (0.0, None, None, None),
        (0.0, None, 6.0, 6.0),
        (4.0, None, 6.0, 4.0),
        (4.0, 97.0, None, 1.0),
        (4.0, 90.0, None, 0.0),
    ],
)
def test_the_remaining_time_of_a_request_follows_from_its_steps_or_from_others(
    seconds: float, begun_at: float | None, mean: float | None, remaining: float | None
) -> None:
    request = QueuedRequest(NAME, job()["make"], seconds=seconds, begun_at=begun_at)
    assert request.estimate_remaining(100.0, mean) == remaining


def test_the_time_of_a_request_is_estimated_from_its_steps() -> None:
    request = QueuedRequest(NAME)
    request.count_step(Step(2, 4, 1), 3.0, 2)
    assert request.seconds == 4.0
