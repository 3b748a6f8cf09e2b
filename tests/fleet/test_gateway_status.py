"""Counts and rates of jobs, and the progress of transfers, that a gateway reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.errors import NotFoundError as NoMessageError

from clowder_aimage.fleet.gateway.status import FleetStatus
from clowder_aimage.fleet.gateway.worker_call import TransferLine, TransferProgress
from clowder_aimage.fleet.name import BATCH, FleetNames
from clowder_aimage.fleet.recent_rate import RecentRate
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from tests.fleet.worker_status import B


def test_a_message_that_nats_counts_and_does_not_have_is_no_job() -> None:
    names = FleetNames()
    there, gone = (
        names.build_job_subject(BATCH, "a" * 64, "me"),
        names.build_job_subject(BATCH, "b" * 64, "me"),
    )

    async def get_msg(stream: str, *, subject: str, **_: object) -> None:
        if subject == gone:
            raise NoMessageError

    async def count(subjects: dict[str, int]) -> int:
        link: Any = SimpleNamespace(names=names, streams=SimpleNamespace(get_msg=get_msg))
        info: Any = SimpleNamespace(state=SimpleNamespace(subjects=subjects))
        return (await FleetStatus(link, WorkerRegistry())._count_jobs(info)).total()

    assert asyncio.run(count({there: 2, gone: 1, "other": 1})) == 2
    assert asyncio.run(count({gone: 1})) == 0


@pytest.mark.parametrize(
    ("ends", "time", "rate"),
    [
        ([], 500.0, 0.0),
        # Less than a minute after the start
        ([101.0, 101.5], 102.0, 2.0),
        ([110.0] * 4, 220.0, 2.0),
        # The last five minutes of many hours
        ([110.0] * 100 + [9900.0] * 10, 10_000.0, 2.0),
        ([9699.0, 9701.0], 10_000.0, 0.2),
        ([9699.0], 10_000.0, 0.0),
    ],
)
def test_the_rate_of_jobs_is_that_of_the_last_minutes(
    ends: list[float], time: float, rate: float
) -> None:
    now = 100.0
    jobs = RecentRate(lambda: now)
    for now in ends:  # noqa: B007 - the clock
        jobs.record()
    now = time
    assert jobs.compute_per_minute() == pytest.approx(rate)


def test_the_progress_of_workers_is_joined() -> None:
    progress = TransferProgress()

    def blob(completed: int) -> TransferLine:
        return TransferLine("pulling b", B, 10, completed, 30)

    for worker in ("w1", "w2"):
        progress.take(worker, TransferLine("pulling manifest"))
        progress.take(worker, blob(4))
    assert progress.drain_lines() == [
        {"status": "pulling manifest"},
        {"status": "pulling b", "digest": B, "total": 20, "completed": 8, "size": 60},
    ]
    assert progress.drain_lines() == []
    progress.take("w2", blob(10))
    progress.take("w2", TransferLine("success"))  # the other one is not ready
    assert [line["completed"] for line in progress.drain_lines()] == [14]
