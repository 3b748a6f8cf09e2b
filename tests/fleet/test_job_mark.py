"""The marks of a job, and its ticket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import (
    ADMITTED,
    DATA,
    END,
    FAILED,
    HEAD,
    Frame,
)
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.key import SIGNER, FleetKey, decode_public_key
from clowder_aimage.fleet.ticket import Admission, JobTicket
from tests.fleet.attempt import build_begin

MARKS = {
    # marks after the BEGIN of w1: whether each counts
    "the worker's end": [(END, "w1", 1, True)],
    "the end of another worker": [(END, "w2", 1, False), (END, "w1", 1, True)],
    "the end of another attempt": [(END, "w1", 2, False)],
    "two ends": [(END, "w1", 1, True), (END, "w1", 1, False)],
    "a gateway's end": [(END, "gateway", 1, False)],
    "an admission by a worker": [(ADMITTED, "w2", 0, False)],
    "an end after a failure": [(FAILED, "w1", 1, True), (END, "w1", 1, False)],
    "data as a mark": [(DATA, "w1", 1, False), (HEAD, "w1", 1, False)],
    "an unknown kind": [("urgent", "w1", 1, False)],
}


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_counts_only_if_it_is_of_the_attempt_that_counts(name: str) -> None:
    ticket = JobTicket.generate("j")
    chain = MarkChain(ticket)
    assert chain.add(build_begin("w1", ticket))
    for kind, worker, attempt, counts in MARKS[name]:
        assert chain.add(ticket.prove(Frame(kind, attempt, 1, b"x", worker))) is counts


def test_a_mark_counts_only_with_the_ticket_of_the_job() -> None:
    ticket, other = JobTicket.generate("j"), JobTicket.generate("j")
    chain = MarkChain(ticket)
    good = build_begin("w1", ticket)
    for wrong in (
        build_begin("w1", other),
        build_begin("w1", JobTicket("k", ticket.secret)),
        replace(good, worker="w2"),  # copied by another worker
        replace(good, attempt=2),
        replace(good, data=b"other"),
        replace(good, proof=""),
        replace(good, proof="é"),
        replace(good, kind=END),
        replace(good, number=1),
        replace(good, past=("w2",)),
    ):
        assert not chain.add(wrong)
    assert chain.add(good) and not chain.add(good)
    end = Frame(END, 1, 1, worker="w1")
    # The server stored it in the subject of the worker for another one.
    assert not chain.add(end) and not chain.add(other.prove(end))
    assert chain.add(ticket.prove(end)) and chain.is_over


def test_a_ticket_is_read_by_the_gateways_for_which_it_was_sealed() -> None:
    ticket = JobTicket.generate("j")
    one, two, late = (FleetKey.generate(SIGNER) for _ in range(3))
    keys = [decode_public_key(key.public, SIGNER) for key in (one, two)]
    raw = Admission.build("request", ticket, keys).encode()
    admission = Admission.decode(raw)
    assert admission.request == "request" and ticket.encode().encode() not in raw
    assert admission.open("j", one) == admission.open("j", two) == ticket
    assert admission.open("j", late) is None
    assert JobTicket.parse("j", ticket.encode()) == ticket
    for wrong in ("", "é", "AAAA", ticket.encode() + "AAAA"):
        with pytest.raises(FormatError):
            JobTicket.parse("j", wrong)
    for data in (b"request x", b"request \xff", b"request AAAA  AAAA"):
        with pytest.raises(FormatError):
            Admission.decode(data)
