"""Attempts at jobs, and their marks, as workers write them."""

from __future__ import annotations

from clowder_aimage.fleet.frame import BEGIN, Attempt, Frame
from clowder_aimage.fleet.job.log import JobLog
from clowder_aimage.fleet.job.mark import JobTicket, MarkChain
from clowder_aimage.fleet.link import FleetLink


async def begin(link: FleetLink, job: str, worker: str, ticket: JobTicket) -> JobLog:
    """Begin the next attempt at a job, as a worker does that gets its message."""
    marks = await link.read_marks(job)
    chain = MarkChain(job, {ticket.public}).add_all(frame for _, frame in marks)
    log = JobLog(link, job, worker, Attempt.following(chain.last), ticket)
    await log.begin()
    return log


def build_begin(
    job: str, worker: str, ticket: JobTicket, attempt: int = 1, past: tuple[str, ...] = ()
) -> Frame:
    """Return the mark that begins an attempt."""
    frame = Frame(BEGIN, attempt, 0, b"id", worker, past)
    proof = ticket.sign_begin(job, frame)
    return Frame(BEGIN, attempt, 0, b"id", worker, past, proof)


async def read_kinds(link: FleetLink, job: str) -> list[str]:
    """Return the kinds of the marks of a job."""
    return [frame.kind for _, frame in await link.read_marks(job)]
