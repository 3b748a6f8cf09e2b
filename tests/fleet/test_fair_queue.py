"""The turns of callers at a gateway."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.engine.admission import BusyError, CallerBusyError
from clowder_aimage.fleet.gateway.fair_queue import FairQueue
from clowder_aimage.fleet.gateway.gateway import MIN_WINDOW, JobGateway
from clowder_aimage.fleet.name import BATCH, INTERACTIVE
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from tests.fleet.worker_status import A, B, C, status_of


def test_callers_have_their_turns_one_after_another() -> None:
    asyncio.run(_take_turns())


async def _take_turns() -> None:
    line, order = FairQueue(lambda _: 1, max_waiting=10), list[str]()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(line.turn("first", INTERACTIVE, A))

        async def job(caller: str, priority: str = INTERACTIVE) -> None:
            async with line.turn(caller, priority, A):
                order.append(caller)

        jobs = [asyncio.create_task(job("batch", BATCH))]
        jobs += [asyncio.create_task(job("many")) for _ in range(3)]
        jobs += [asyncio.create_task(job("few"))]
        leaving = asyncio.create_task(job("leaving"))
        await asyncio.sleep(0)
        assert line.waiting == 6
        leaving.cancel()
        await asyncio.wait([leaving])
        assert line.waiting == 5
    await asyncio.gather(*jobs)
    assert order == ["many", "few", "many", "many", "batch"]
    assert not line.queued and not line.waiting and not line._waiting


def test_jobs_that_no_worker_takes_hold_up_no_other_model() -> None:
    async def run() -> None:
        line, order = FairQueue({A: 2, B: 1}.__getitem__, max_waiting=9), list[str]()

        async def job(caller: str) -> None:
            async with line.turn(caller, INTERACTIVE, B):
                order.append(caller)

        stuck = [asyncio.create_task(_stay(line)) for _ in range(5)]
        await asyncio.sleep(0)
        assert (line.queued[A], line.waiting) == (2, 3)
        async with line.turn("many", INTERACTIVE, B):  # at once
            jobs = [asyncio.create_task(job(caller)) for caller in ("many", "many", "few")]
            await asyncio.sleep(0)
            assert line.waiting == 6
        await asyncio.gather(*jobs)
        assert order == ["many", "few", "many"]
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)
        assert not line.queued and not line._waiting

    asyncio.run(run())


async def _stay(line: FairQueue) -> None:
    async with line.turn("a", INTERACTIVE, A):
        await asyncio.Event().wait()


def test_a_window_is_that_of_the_workers_that_may_have_the_model() -> None:
    watch: Any = SimpleNamespace(workers=WorkerRegistry())
    nothing: Any = None
    gateway = JobGateway(nothing, watch, nothing, resolve=nothing)
    assert gateway.compute_window(A) == gateway.compute_window() == MIN_WINDOW
    watch.workers.put(status_of("w1", slots=9))
    assert (gateway.compute_window(A), gateway.compute_window(C)) == (18, MIN_WINDOW)
    watch.workers.put(status_of("w2", slots=10, may_pull=True))
    assert (gateway.compute_window(A), gateway.compute_window(C), gateway.compute_window()) == (
        38,
        20,
        38,
    )


def test_a_full_line_refuses_and_a_job_that_has_begun_makes_room() -> None:
    async def run() -> None:
        line = FairQueue(lambda _: 1, max_waiting=1)
        async with line.turn("a", INTERACTIVE, A) as begun:
            waiting = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await _pass(line)
            begun()
            await waiting

    asyncio.run(run())


@pytest.mark.parametrize(
    ("max_wait", "pause", "accepted", "wait"),
    [
        # Jobs begin every two seconds: the fifth that waits would wait for ten
        (10.0, 0.0, 4, 10.0),
        (0.0, 0.0, 1, 4.0),
        # No job has begun for six seconds
        (10.0, 6.0, 1, 12.0),
    ],
)
def test_further_jobs_wait_while_the_estimated_wait_is_short(
    max_wait: float, pause: float, accepted: int, wait: float
) -> None:
    async def run() -> None:
        now = 100.0
        line = FairQueue(lambda _: 1, max_waiting=1, clock=lambda: now, max_wait=max_wait)
        for _ in range(2):
            async with line.turn("a", INTERACTIVE, A) as begun:
                now += 2.0
                begun()
        async with line.turn("a", INTERACTIVE, A):
            now += pause
            tasks = [asyncio.create_task(_pass(line, f"b{number}")) for number in range(accepted)]
            await asyncio.sleep(0)
            with pytest.raises(BusyError) as caught:
                await _pass(line, "c")
            assert (line.waiting, caught.value.wait) == (accepted, wait)
            assert caught.value.retry_after == max(1, wait - max_wait)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_a_caller_leaves_places_for_others() -> None:
    async def run() -> None:
        line = FairQueue(lambda _: 0, max_waiting=8)

        async def wait(caller: str) -> None:
            async with line.turn(caller, INTERACTIVE, A):
                raise AssertionError

        many = [asyncio.create_task(wait("many")) for _ in range(9)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(wait("few")) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [task.exception() for task in (*many, *few) if task.done()]
        kinds = [type(error) for error in refused]
        assert kinds == [CallerBusyError] * 3 + [BusyError] and line.waiting == 8
        for task in (*many, *few):
            task.cancel()
        await asyncio.gather(*many, *few, return_exceptions=True)
        assert not line._waiting

    asyncio.run(run())


async def _pass(line: FairQueue, caller: str = "b") -> None:
    async with line.turn(caller, INTERACTIVE, A):
        pass


def test_the_age_of_the_oldest_job_is_that_of_jobs_that_no_worker_has_begun() -> None:
    async def run() -> None:
        now = 0.0
        line = FairQueue(lambda _: 1, max_waiting=9, clock=lambda: now)
        assert line.compute_age(INTERACTIVE) == 0.0
        async with line.turn("a", INTERACTIVE, A) as begun:
            waiting = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            now = 5.0
            leaving = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            now = 8.0
            assert (line.compute_age(INTERACTIVE), line.compute_age(BATCH)) == (8.0, 0.0)
            leaving.cancel()
            await asyncio.wait([leaving])
            begun()
            await waiting
            assert line.compute_age(INTERACTIVE) == 0.0

    asyncio.run(run())
