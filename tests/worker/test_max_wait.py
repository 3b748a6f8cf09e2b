"""Bursts wait while the estimated wait is short, beyond the number of requests that may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.engine import scheduler
from clowder_aimage.engine.admission import CALLER, BusyError, CallerBusyError
from clowder_aimage.engine.event import Event, QueuedEvent, StartedEvent
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.pipeline import Step
from tests.store import copy_store
from tests.wait import until_async
from tests.worker.engine_runs import Client, FakeRunner, job, played, stocked


class Clock:
    """A clock that stands until a step of a picture takes a second."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class TimedRunner(FakeRunner):
    """A model whose steps take a second each."""

    clock: Clock
    runners: list[TimedRunner]

    def __init__(self) -> None:
        super().__init__()
        self.runners.append(self)

    async def generate(
        self, _: str, manifest: object, request: Any, encoding: object, on_event: Any
    ) -> None:
        def pass_time(event: Event) -> None:
            if isinstance(event, Step):
                self.clock.seconds += 1.0
            on_event(event)

        await super().generate(_, manifest, request, encoding, pass_time)


@pytest.fixture(scope="module")
def unmeasured_models(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    """Return a store without measurements. Copy it before a model is run."""
    return stocked(tmp_path_factory.mktemp("wait") / "store")


@pytest.fixture
def stored_models(unmeasured_models: LayeredStore, tmp_path: Path) -> LayeredStore:
    return LayeredStore([copy_store(unmeasured_models.root, tmp_path / "store")])


Burst = Callable[..., list[Any]]


@pytest.fixture
def burst(stored_models: LayeredStore, monkeypatch: pytest.MonkeyPatch) -> Burst:
    """Return a function from the steps of requests at once to what became of each.

    A model is loaded, and has made a picture if ``is_measured``. Steps take a second.
    """
    monkeypatch.setattr(scheduler, "Runner", TimedRunner)
    monkeypatch.setattr(TimedRunner, "clock", Clock(), raising=False)
    monkeypatch.setattr(TimedRunner, "runners", [], raising=False)

    def run(
        steps: list[int], callers: str = "", *, is_measured: bool = True, **limits: Any
    ) -> list[Any]:
        async def play(engine: Any) -> list[Any]:
            first = Client(engine, job(steps=2), loads=not is_measured)
            await first.result()
            runner = TimedRunner.runners[-1]
            runner.is_running.clear()
            clients = list[Client]()
            for index, count in enumerate(steps):
                CALLER.set(callers[index] if callers else "")
                clients.append(client := Client(engine, job(steps=count)))
                # The first is being served; the others wait, or are refused
                await until_async(partial(is_settled, client, is_first=not index))
            runner.is_running.set()
            tasks = [client.task for client in clients]
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = played(stored_models, play, clock=TimedRunner.clock, **limits)
        return [each if isinstance(each, BaseException) else "served" for each in outcomes]

    return run


def is_settled(client: Client, *, is_first: bool) -> bool:
    kind = StartedEvent if is_first else QueuedEvent
    return client.task.done() or any(isinstance(event, kind) for event in client.heard)


def test_a_burst_waits_while_the_estimated_wait_is_short(burst: Burst) -> None:
    outcomes = burst([2] * 16, queue=2, max_wait=40)
    assert outcomes == ["served"] * 16


def test_requests_are_refused_once_the_wait_is_too_long(burst: Burst) -> None:
    """With the picture being made, five of two seconds take ten."""
    outcomes = burst([2] * 7, queue=2, max_wait=10)
    assert outcomes[:5] == ["served"] * 5
    for refused in outcomes[5:]:
        assert isinstance(refused, BusyError)
        assert (refused.wait, refused.retry_after) == (10.0, 1)
        assert "4 requests are waiting, which takes about 10 seconds" in refused.message


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        # The number alone
        ({"queue": 2, "max_wait": 0}, 3),
        # Long requests of which so many may wait
        ({"queue": 4, "max_wait": 1}, 5),
        ({"queue": 0, "max_wait": 5}, 3),
        ({"queue": 0, "max_wait": 0}, 1),
        # Nothing was measured
        ({"queue": 2, "max_wait": 1000, "is_measured": False}, 3),
    ],
)
def test_a_number_of_requests_may_wait_however_long_it_takes(
    burst: Burst, limits: dict[str, Any], count: int
) -> None:
    assert burst([2] * 8, **limits).count("served") == count


def test_a_worker_that_has_just_started_waits_by_what_an_earlier_one_measured(
    burst: Burst,
) -> None:
    limits: dict[str, Any] = {"queue": 2, "is_measured": False}
    assert burst([2] * 8, max_wait=1000, **limits).count("served") == 3
    # The mean of these pictures, of two seconds each, and a load that took no time
    outcomes = burst([2] * 8, max_wait=10, **limits)
    assert outcomes[:5] == ["served"] * 5
    assert [each.wait for each in outcomes[5:]] == [10.0] * 3


def test_long_requests_count_by_their_steps(burst: Burst) -> None:
    # 2 + 6 are less than 10, 2 + 6 + 6 are not
    outcomes = burst([2, 6, 6, 2], queue=0, max_wait=10)
    assert outcomes[:3] == ["served"] * 3
    assert isinstance(outcomes[3], BusyError)
    assert (outcomes[3].wait, outcomes[3].retry_after) == (14.0, 4)


def test_one_caller_leaves_a_part_of_the_wait_to_others(burst: Burst) -> None:
    outcomes = burst([2] * 7, "mmmmmff", queue=1, max_wait=10)
    # Of the bound of 10 s, one caller fills 7.5 s
    assert outcomes[:4] == ["served"] * 4
    assert isinstance(outcomes[4], CallerBusyError)
    assert outcomes[5] == "served"
    assert isinstance(outcomes[6], BusyError)
