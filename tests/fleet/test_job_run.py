"""A job at a worker, without a server."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.fleet.frame import (
    END,
    Frame,
)
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.run import CANCELLED, DONE, JobRun
from clowder_aimage.fleet.name import FleetNames
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from clowder_aimage.http import background
from tests.fleet.attempt import build_begin
from tests.fleet.worker_status import A
from tests.wait import PATIENCE


def test_a_job_whose_response_is_stored_is_only_acknowledged() -> None:
    """NATS was killed before it had stored the first acknowledgement."""
    acknowledged = list[bool]()

    ticket = JobTicket.generate("1")

    async def read_marks(_: str) -> list[tuple[int, Frame]]:
        end = ticket.prove(Frame(END, 1, 5, b"", "w1"))
        return [(8, build_begin("w1", ticket)), (9, end)]

    async def ack() -> None:
        acknowledged.append(True)

    async def serve() -> str:
        link: Any = SimpleNamespace(names=FleetNames(), read_marks=read_marks)
        message: Any = SimpleNamespace(ack=ack)
        job = FleetJob("1", "/v1/x", "infer", "me", "", "m", A)
        nothing: Any = None  # which a second attempt would need
        run = JobRun(link, nothing, nothing, "w2", WorkerRegistry(), message, job, ticket)
        return await run.serve()

    assert asyncio.run(serve()) == DONE and acknowledged == [True]


def test_a_job_is_cancelled_again_if_its_cancellation_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``wait_for`` of Python 3.11 loses one that comes with the answer of NATS."""
    monkeypatch.setattr(background, "AGAIN", 0.01)
    is_asked, has_ended = asyncio.Event(), list[bool]()

    async def read_marks(_: str) -> list[tuple[int, Frame]]:
        is_asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()
        return []

    async def term() -> None:
        has_ended.append(True)

    async def serve() -> str:
        link: Any = SimpleNamespace(names=FleetNames(), read_marks=read_marks)
        message: Any = SimpleNamespace(term=term)
        job = FleetJob("1", "/v1/x", "infer", "me", "", "m", A)
        nothing: Any = None
        ticket = JobTicket.generate("1")
        run = JobRun(link, nothing, nothing, "w1", WorkerRegistry(), message, job, ticket)
        serving = asyncio.create_task(run.serve())
        await is_asked.wait()
        async with asyncio.timeout(PATIENCE):
            await run.cancel()
            return await serving

    assert asyncio.run(serve()) == CANCELLED and has_ended == [True]
