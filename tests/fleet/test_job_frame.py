"""Names, jobs and frames of a fleet, as they are written and read."""

from __future__ import annotations

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import (
    DATA,
    END,
    HEAD,
    RELEASED,
    Attempt,
    Frame,
)
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.job.reader import FrameOrder
from clowder_aimage.fleet.name import BATCH, FleetNames
from clowder_aimage.fleet.ticket import JobTicket
from tests.fleet.attempt import build_begin
from tests.fleet.worker_status import A


def test_names_of_a_fleet_are_read_from_subjects() -> None:
    names = FleetNames("team")
    digest = "ab" * 32
    assert names.parse_job_subject(names.build_job_subject(BATCH, digest, "me")) == (BATCH, digest)
    for other in (
        f"team.job.batch.{digest}",
        f"other.job.batch.{digest}.me",
        f"team.job.urgent.{digest}.me",
        "team.job.batch.ab.me",
        f"team.job.batch.{digest[1:]}é.me",
    ):
        assert names.parse_job_subject(other) is None
    for wrong in ("", "a.b", "a b", "a*", "x" * 33):
        with pytest.raises(ValueError, match="letters"):
            FleetNames(wrong)


def test_a_job_is_read_as_it_was_written() -> None:
    fields = {"prompt": "a cat", "image": [b"\x89PNG\0", "data:image/png;base64,AA=="], "n": "1"}
    job = FleetJob("1", "/v1/images/edits", "infer", "me", "", "m", A, fields=fields, is_form=True)
    assert FleetJob.decode(job.encode()) == job
    plain = FleetJob("1", "/v1/x", "infer", "me", "", "m", A, fields={"options": {"seed": 1}})
    assert FleetJob.decode(plain.encode()) == plain
    assert plain.with_model("m@" + A).fields == {"options": {"seed": 1}, "model": "m@" + A}
    for wrong in (b"[]", b"{}", b'{"id": 1, "x": 2}', b"{", b'{"id":"1","id":"2"}'):
        with pytest.raises(FormatError):
            FleetJob.decode(wrong)


def test_frames_are_read_as_they_were_written() -> None:
    frame = Frame(DATA, 2, 7, b"x", "w2", ("w1",))
    subject = FleetNames().build_log_subject("w2", "j")
    assert Frame.parse(subject, frame.headers, b"x") == frame


def test_an_attempt_counts_the_workers_that_failed() -> None:
    assert Attempt.following(None) == Attempt(1, ())
    assert Attempt.following(Frame(DATA, 1, 3, worker="w1")) == Attempt(2, ("w1",))
    assert Attempt.following(Frame(RELEASED, 2, 9, worker="w2", past=("w1",))) == Attempt(
        3, ("w1",)
    )


def test_frames_are_ordered_once_and_by_attempt() -> None:
    ticket = JobTicket.generate("j")
    order = FrameOrder(MarkChain(ticket))
    begins = {number: build_begin(f"w{number}", ticket, number) for number in (1, 2)}

    def add(attempt: int, number: int) -> list[tuple[int, int]]:
        kind = HEAD if number == 1 else DATA
        frame = Frame(kind, attempt, number, worker=f"w{attempt}")
        found = order.add(frame) if number else order.add_mark(begins[attempt])
        return [(each.attempt, each.number) for each in found]

    assert add(1, 1) == []
    assert add(1, 0) == [(1, 0)]
    assert (add(1, 2), order.has_gap) == ([], True)
    assert (add(1, 1), order.has_gap) == ([(1, 1), (1, 2)], False)
    assert add(1, 1) == []  # read again from the stream
    assert add(2, 0) == [(2, 0)]
    assert add(2, 1) == [(2, 1)]
    assert add(1, 3) == []  # of a worker that came back too late
    assert add(2, 0) == []


def test_frames_are_those_of_the_attempt_that_counts_in_the_stream() -> None:
    ticket = JobTicket.generate("j")
    order = FrameOrder(MarkChain(ticket))
    first, second = (build_begin(worker, ticket) for worker in ("w1", "w2"))
    # They arrived here in the other order.
    for frame in second, first:
        assert order.add_mark(frame) == [frame]
    chain = MarkChain(ticket).add_all([first, second])
    assert order.follow(chain) == [second] and order.follow(chain) == []
    end = ticket.prove(Frame(END, 1, 2, worker="w2"))
    chain.add(end)
    assert order.follow(chain) == [] and order.has_gap
    data = Frame(HEAD, 1, 1, worker="w2")
    assert order.add(data) == [data, end]
