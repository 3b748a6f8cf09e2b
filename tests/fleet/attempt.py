"""Attempts at jobs, and their marks, as workers write them."""

from __future__ import annotations

from clowder_aimage.fleet.frame import BEGIN, Attempt, Frame
from clowder_aimage.fleet.job.log import JobLog
from clowder_aimage.fleet.job.mark import read_chain
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.ticket import JobTicket


async def begin(link: FleetLink, worker: str, ticket: JobTicket) -> JobLog:
    """Begin the next attempt at a job, as a worker does that gets its message."""
    chain = await read_chain(link, ticket)
    log = JobLog(link, worker, Attempt.following(chain.last), ticket)
    await log.begin()
    return log


def build_begin(
    worker: str, ticket: JobTicket, attempt: int = 1, past: tuple[str, ...] = ()
) -> Frame:
    """Return the mark that begins an attempt."""
    return ticket.prove(Frame(BEGIN, attempt, 0, b"id", worker, past))


async def read_kinds(link: FleetLink, job: str) -> list[str]:
    """Return the kinds of the marks of a job."""
    return [frame.kind for _, frame in await link.read_marks(job)]
