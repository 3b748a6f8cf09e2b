"""The parts of a fleet that need no server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.errors import NotFoundError as NoMessageError

from clowder_aimage.engine.admission import NEVER, BusyError, CallerBusyError
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.fleet import link as fleet_link
from clowder_aimage.fleet.frame import (
    ADMITTED,
    DATA,
    END,
    FAILED,
    HEAD,
    RELEASED,
    Attempt,
    Frame,
)
from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE, Continuation, is_stream
from clowder_aimage.fleet.gateway.fair_queue import FairQueue
from clowder_aimage.fleet.gateway.gateway import MIN_WINDOW, JobGateway
from clowder_aimage.fleet.gateway.status import FleetStatus
from clowder_aimage.fleet.gateway.worker_call import TransferLine, TransferProgress
from clowder_aimage.fleet.job.choice import (
    ELSEWHERE,
    FOLLOW,
    LEFT,
    MOST,
    ON_DISK,
    JobChoice,
    claim_delay_loaded,
    claim_delay_stored,
)
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.job.reader import FrameOrder
from clowder_aimage.fleet.job.run import CANCELLED, DONE, JobRun
from clowder_aimage.fleet.key import SIGNER, FleetKey, decode_public_key
from clowder_aimage.fleet.link import FleetAccess, FleetLink
from clowder_aimage.fleet.name import BATCH, GATEWAY, INTERACTIVE, FleetNames
from clowder_aimage.fleet.placement import DemandStats, Placement, SlotCounter
from clowder_aimage.fleet.recent_rate import RecentRate
from clowder_aimage.fleet.stream import FleetShape
from clowder_aimage.fleet.ticket import Admission, JobTicket
from clowder_aimage.fleet.worker_registry import WorkerRegistry, WorkerStatus, WorkerWatch
from clowder_aimage.http import background
from clowder_aimage.http.api_error import ApiError
from tests.fleet.attempt import build_begin
from tests.wait import PATIENCE

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


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


# -- workers


def status_of(name: str, **facts: object) -> WorkerStatus:
    models = facts.pop("models", {"m:latest": A})
    return WorkerStatus(name, models=models, kinds={A: "image", B: "text"}, **facts)  # type: ignore[arg-type]


def test_a_status_is_read_as_it_was_written() -> None:
    one = status_of("w1", loaded=(A,), default_for=("gpt-*",))
    assert WorkerStatus.decode(one.encode(), "w1") == one
    later = json.loads(one.encode()) | {"of_a_later_version": 1}
    assert WorkerStatus.decode(json.dumps(later).encode(), "w1") == one


def test_the_digest_of_a_name_is_that_of_most_workers() -> None:
    workers = WorkerRegistry()
    workers.put(status_of("w1"))
    workers.put(status_of("w2", models={"m:latest": B}))
    workers.put(status_of("w3", models={"m:latest": B}, aliases={"mm": "m"}, default_model="m"))
    found = workers.find("m")
    assert found is not None and (found.name, found.digest, found.kind) == ("m:latest", B, "text")
    for alias in ("mm", "mm:latest", None):
        assert (other := workers.find(alias)) is not None and other.digest == B
    assert workers.find("unknown") is None
    assert workers.find(f"x@{A}") is not None
    with pytest.raises(NotFoundError):
        workers.find("NOT A NAME")
    assert workers.list_names("text") == ["m:latest"]


def test_a_worker_that_does_not_report_is_gone() -> None:
    now = 0.0
    workers = WorkerRegistry(lambda: now)
    workers.put(status_of("w1", loaded=(A,)))
    now = 14.0
    workers.put(status_of("w2", is_draining=True, loaded=(B,)))
    assert [each.id for each in workers.list_others("w9")] == ["w1"]  # the other one drains
    assert workers.on_disk_elsewhere(A, "w9") and not workers.on_disk_elsewhere(A, "w1")
    now = 16.0
    assert [each.id for each in workers.list_statuses()] == ["w2"]
    with pytest.raises(UsageError, match="default"):
        workers.find(None)


def test_a_status_that_arrives_while_the_bucket_is_read_is_the_newer_one() -> None:
    link: Any = SimpleNamespace(names=FleetNames("f"), is_ready=True)
    listeners: dict[str, Any] = {}
    link.listen = listeners.setdefault
    watch = WorkerWatch(link)
    (subject,), (take,) = listeners.keys(), listeners.values()
    (older, newer), other = (status_of("w1", done=done) for done in (1, 2)), status_of("w2")
    subjects = {subject.replace("*", each.id): each for each in (older, other)}

    async def read_info(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(state=SimpleNamespace(subjects=subjects))

    async def read_message(_: str, subject: str, **__: Any) -> Any:
        if subject.endswith("w1"):
            await take(SimpleNamespace(headers=None, subject=subject, data=newer.encode()))
        return SimpleNamespace(headers=None, data=subjects[subject].encode())

    link.streams = SimpleNamespace(stream_info=read_info, get_msg=read_message)
    asyncio.run(watch.run())
    assert watch.workers.list_statuses() == [newer, other]


def test_room_is_shared_by_texts_of_one_model() -> None:
    room = SlotCounter(slots=2, parallel=3)
    for _ in range(3):
        assert room.has(A, is_text=True)
        room.take(A)
    assert not room.has(A, is_text=True)
    room.take(B)
    assert room.has(B, is_text=False)  # one may follow
    assert not room.has("sha256:c", is_text=False)
    room.leave(B)
    assert room.has("sha256:c", is_text=False) and room.running == 3


def test_jobs_of_loaded_models_come_first_and_batches_last() -> None:
    waits = {"hot": 0.0, "cold": 1.0, "none": None}
    choice = JobChoice(lambda digest: waits[digest])
    for key in ((BATCH, "hot"), (INTERACTIVE, "cold"), (INTERACTIVE, "none")):
        choice.record(key, 0.0)
    assert choice.select_next(0.5) == ((BATCH, "hot"), 0.0)
    assert choice.select_next(1.5) == (
        (INTERACTIVE, "cold"),
        0.0,
    )  # it has waited, and is interactive
    choice.forget((BATCH, "hot"))
    assert choice.select_next(0.5) == (None, 0.5)
    choice.forget((INTERACTIVE, "cold"))
    assert choice.select_next(9.0) == (None, None)
    assert choice.select_next(700.0) == (None, None)


def test_no_job_follows_another_while_an_earlier_one_lacks_room() -> None:
    waits: dict[str, float | None] = {"here": FOLLOW, "there": None}
    choice = JobChoice(waits.__getitem__, lambda digest: digest == "there")
    here, there = (INTERACTIVE, "here"), (INTERACTIVE, "there")
    choice.record(here, 1.0, 1)
    choice.record(there, 2.0, 2)
    assert choice.select_next(5.0)[0] == here  # it came first
    choice.record_delivery(here, 1)
    choice.record(here, 3.0, 3)
    assert choice.select_next(5.0)[0] is None
    choice.forget(there)
    assert choice.select_next(5.0)[0] == here
    choice.record((BATCH, "here"), 1.0, 4)
    choice.record_delivery(here, 3)
    choice.record(there, 4.0, 5)
    assert choice.select_next(5.0)[0] is None  # a batch waits for others
    choice.forget(there, 3.0)
    assert choice.select_next(5.0)[0] is None  # it was announced after the queue was empty


def test_a_job_that_was_given_back_is_left_to_others() -> None:
    """It is found on the queue again; jobs that are announced are served meanwhile."""
    choice, key = JobChoice(lambda _: 0.0), (INTERACTIVE, "m")
    choice.record(key, 1.0)
    choice.leave(key, 1.0)
    choice.record(key, 2.0)
    assert choice.select_next(2.0) == (None, None)
    choice.record(key, 2.0, 7)
    assert choice.select_next(2.0)[0] == key
    choice.leave(key, 2.0)
    assert choice.select_next(2.0)[0] == key
    choice.record_delivery(key, 7)
    choice.record(key, 2.1 + LEFT)
    assert choice.select_next(2.1 + LEFT)[0] == key


def test_what_is_remembered_of_queues_that_nobody_serves_is_bounded() -> None:
    choice, key = JobChoice(lambda _: None), (INTERACTIVE, "m")
    for number in range(1, 2 * MOST):
        choice.record(key, float(number), number)
        choice.record((BATCH, str(number)), 0.0)
    assert len(choice._announced[key]) == MOST and len(choice._announced) == MOST
    assert choice._get_oldest_time(key) == 1.0
    choice.record_delivery(key, 2 * MOST - 2)
    assert choice.is_wanted("m")  # the last one is there
    choice.record_delivery(key, 2 * MOST - 1)
    assert not choice.is_wanted("m")


def test_a_worker_that_would_load_a_model_waits_for_a_job_that_is_old_enough() -> None:
    """A job that came just now is for the workers that have its model."""
    choice, key = JobChoice(lambda _: ELSEWHERE), (INTERACTIVE, "m")
    choice.record(key, 0.0, 7)
    choice.record(key, 0.9, 8)
    choice.record(key, 0.1)  # a look at the queue, which has jobs that are being served too
    assert choice.is_due(key, 1.0) and choice.is_wanted("m") and not choice.is_wanted("n")
    choice.record_delivery(key, 7)
    assert not choice.is_due(key, 1.8) and choice.is_due(key, 1.9)
    choice.record_delivery(key, 8)
    assert not choice.is_wanted("m") and choice.is_due(key, 1.1)  # perhaps one is delivered again
    choice.forget(key)
    assert not choice.is_due(key, 9.0)


def test_workers_wait_in_the_order_of_their_ranks() -> None:
    copies = [claim_delay_loaded(rank) for rank in range(4)]
    loads = [claim_delay_stored(rank, evicts_last_copy=True) for rank in range(4)]
    assert copies == sorted(copies) and copies[0] == 0.0 and copies[1] < ON_DISK == loads[0]
    assert all(later - one >= 0.02 for one, later in pairwise(loads))  # more than messages differ
    waits = [
        claim_delay_stored(0, is_elsewhere=True, evicts_last_copy=evicts_last_copy)
        for evicts_last_copy in (False, True)
    ]
    assert loads[-1] < ELSEWHERE == waits[0] < waits[1]
    assert claim_delay_stored(99, evicts_last_copy=True) < ELSEWHERE


def test_a_model_with_fewer_jobs_costs_less_to_evict_and_a_copy_too_many_nothing() -> None:
    now = 0.0
    demand = DemandStats(lambda: now)
    for _ in range(90):
        now += 0.1
        demand.record(A)
    demand.record(B)
    demand.record_end(A, now - 0.05)  # half of a copy is at work
    assert demand.count_needed(A) == 1 and demand.count_needed("sha256:c") == 1
    assert (
        demand.estimate_eviction_cost(A, 1)
        > demand.estimate_eviction_cost(B, 1)
        > 0.0
        == demand.estimate_eviction_cost(A, 2)
    )
    demand.record_end(A, now - 0.35)  # which followed the other closely, and took no longer
    assert demand.count_needed(A) == 1
    now += 10.0
    for _ in range(9):
        demand.record_end(A, now - 9.0)
        now += 1.0
    assert demand.count_needed(A) > 2 and demand.estimate_eviction_cost(
        A, 2
    ) > demand.estimate_eviction_cost(B, 1)
    copies = Counter({A: 1, B: 1})
    estimate = partial(demand.estimate_unload_cost, slots=2, copies=copies)
    for has_room in (False, True):
        assert estimate((A, B), (A, B), has_room=has_room) is None  # all are at work
        assert estimate((), (), has_room=has_room) == 0.0
    assert estimate((A, B, C), (A,), has_room=True) == 0.0
    assert estimate((A,), (), has_room=False) == demand.estimate_eviction_cost(A, 1)
    assert estimate((A, B), (B,), has_room=False) == demand.estimate_eviction_cost(A, 1)
    assert estimate((A, B), (), has_room=False) == demand.estimate_eviction_cost(B, 1)


def placed(worker: str, loaded: tuple[str, ...], *statuses: WorkerStatus) -> Placement:
    """Return the placement of a worker with two slots, which has the models A and B."""
    models = [SimpleNamespace(variants={digest: None}, is_ready=True) for digest in loaded]
    # Each model takes one of two bytes
    engine = SimpleNamespace(list_loaded=lambda: models, room=2 - len(models))
    service: Any = SimpleNamespace(engine=engine, settings=SimpleNamespace(pull=NEVER))
    digests = (A, B, C)
    view: Any = SimpleNamespace(
        kinds=dict.fromkeys(digests, "image"), needs=dict.fromkeys(digests, 1)
    )
    workers = WorkerRegistry()
    for each in statuses:
        workers.put(each)
    return Placement(service, view, SlotCounter(2, 1), workers, worker)


def test_a_worker_waits_by_what_the_others_have() -> None:
    models = {"a": A, "b": B, "c": C}
    busy = status_of("w1", slots=2, loaded=(A,), at_work=(A,), models=models)
    a = A.partition(":")[2]
    assert placed("w2", (A,), busy).wait(a) == claim_delay_loaded(1)
    assert placed("w0", (A,), busy).wait(a) == claim_delay_loaded(0)
    assert placed("w2", (), busy).wait(a) == ELSEWHERE
    assert placed("w2", (B, C), busy).wait(a) == claim_delay_stored(
        0, is_elsewhere=True, evicts_last_copy=True
    )
    loading = status_of("w1", slots=2, at_work=(A,), models=models)
    assert placed("w2", (), loading).wait(a) == ELSEWHERE  # soon it has it
    free = status_of("w1", slots=2, models=models)
    assert placed("w2", (), free).wait(a) == claim_delay_stored(1, evicts_last_copy=False)
    assert placed("w0", (), free).wait(a) == claim_delay_stored(0, evicts_last_copy=False)
    assert placed("w0", (B, C), free).wait(a) == claim_delay_stored(1, evicts_last_copy=True)
    assert placed("w2", (), free).wait("unknown") is None
    # Memory for another model counts, not the number of loaded ones
    other = f"sha256:{'d' * 64}"
    roomy = status_of("w1", slots=1, loaded=(other,), room=1, models=models)
    assert placed("w0", (B, C), roomy).wait(a) == claim_delay_stored(1)
    full = status_of("w1", slots=9, loaded=(other,), room=0, models=models)
    assert placed("w2", (B,), full).wait(a) == claim_delay_stored(0)
    here = placed("w2", (A,), busy)
    here._slots.take(A)
    assert here.wait(a) == FOLLOW
    here._slots.take(A)
    assert here.wait(a) is None
    assert (
        here.estimate_eviction_cost(B) == 1.0
        and here.estimate_eviction_cost(A, is_wanted=True)
        > 1e6
        > here.estimate_eviction_cost(A)
        == 0.0
    )


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


# -- transfers of all workers


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


# -- fairness


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


async def _stay(line: FairQueue) -> None:
    async with line.turn("a", INTERACTIVE, A):
        await asyncio.Event().wait()


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


# -- streams over several attempts


def sse(*events: object) -> bytes:
    return b"".join(
        f": {one}\n\n".encode() if isinstance(one, str) else b"data: " + _text(one) + b"\n\n"
        for one in events
    )


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def picture(kind: str, text: str) -> dict[str, str]:
    return {"type": f"image_generation.{kind}", "b64_json": text}


def test_progress_of_a_second_attempt_begins_where_the_first_one_ended() -> None:
    stream = Continuation(SSE)
    first = sse("queued behind 0", "step 1 of 4", "step 2 of 4", picture("partial_image", "p1"))
    assert stream.deduplicate(first[:50]) + stream.deduplicate(first[50:]) == first
    assert stream.deduplicate(b"data: {half of an ev") == b""
    stream.begin()
    again = sse("queued behind 2", "loading", "step 1 of 4", "step 2 of 4")
    assert stream.deduplicate(again + sse(picture("partial_image", "p1"))) == b""
    rest = sse("step 3 of 4", picture("partial_image", "p2"), picture("completed", "x" * 99_999))
    assert stream.deduplicate(rest) == rest


def test_a_finished_picture_is_not_sent_twice() -> None:
    stream = Continuation(SSE)
    large = sse(picture("completed", "x" * 99_999), {"step": 1, "total": 2})
    assert stream.deduplicate(large) == large
    stream.begin()
    assert stream.deduplicate(large) == b""
    assert stream.deduplicate(sse(picture("completed", "y"))) == sse(picture("completed", "y"))


def chunk(text: str, name: str, **more: object) -> dict[str, object]:
    return {"id": name, "choices": [{"index": 0, "delta": {"content": text}, **more}]}


def test_a_text_goes_on_after_its_last_character() -> None:
    stream = Continuation(SSE)
    stream.deduplicate(sse(chunk("The c", "a"), chunk("at s", "a")))
    stream.begin()
    assert stream.deduplicate(sse(chunk("The", "b"), chunk(" cat ", "b"))) == b""
    found = stream.deduplicate(sse(chunk("sat", "b"), chunk("", "b", finish_reason="stop")))
    assert found == sse(chunk("at", "a"), chunk("", "a", finish_reason="stop"))
    assert stream.deduplicate(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_lines_of_ollama_go_on_too() -> None:
    def lines(*values: object) -> bytes:
        return b"".join(_text(one) + b"\n" for one in values)

    stream = Continuation(NDJSON)
    stream.deduplicate(lines({"completed": 1, "done": False}, {"completed": 2, "done": False}))
    stream.begin()
    assert stream.deduplicate(lines({"completed": 1, "done": False})) == b""
    rest = lines({"completed": 3, "done": False}, {"image": "x", "done": True})
    assert stream.deduplicate(rest) == rest
    stream = Continuation(NDJSON)
    stream.deduplicate(lines({"message": {"role": "assistant", "content": "Hel"}, "done": False}))
    stream.begin()
    found = stream.deduplicate(
        lines({"message": {"role": "assistant", "content": "Hello"}, "done": False})
    )
    assert found == lines({"message": {"role": "assistant", "content": "lo"}, "done": False})


def test_errors_have_the_form_of_the_stream() -> None:
    assert (
        Continuation(SSE).encode_error(500, {"error": {}}, None).startswith(b"event: error\ndata: ")
    )
    assert json.loads(Continuation(NDJSON).encode_error(500, {"error": "no"}, "x")) == {
        "error": "no",
        "status": 500,
        "code": "x",
    }
    assert is_stream("text/event-stream; charset=utf-8") and not is_stream("application/json")


def test_a_server_that_cannot_serve_a_fleet_is_named() -> None:
    """It is too old, or its messages are too short for a piece of a response."""

    async def check() -> None:
        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        for minor, most, reason in (
            (8, 1 << 20, r"2\.9 is needed"),
            (10, 1 << 16, r"messages of 65536 bytes; set max_payload .* to 1048576 or more"),
        ):
            version = SimpleNamespace(major=2, minor=minor)
            link._client = SimpleNamespace(  # type: ignore[assignment]
                is_connected=True, connected_server_version=version, max_payload=most
            )
            await link._verify()
            with pytest.raises(ApiError, match=reason) as caught:
                link.check()
            assert caught.value.status == 503 and caught.value.headers["Retry-After"]
            with pytest.raises(UsageError, match=reason):
                await link.make(FleetShape(), 1)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("stream", "stored", "is_refused"),
    [
        ("aimage-jobs", 800, False),
        ("aimage-jobs", 900, True),
        ("aimage-logs", 950, True),
        ("aimage-bodies", 950, True),
        ("aimage-marks", 950, True),
        # Their own routes refuse what is stored there
        ("aimage-files", 1000, False),
        ("aimage-dead", 1000, False),
    ],
)
def test_new_work_leaves_a_reserve_of_each_stream(
    stream: str, stored: int, is_refused: bool
) -> None:
    async def check() -> None:
        names = FleetNames()
        configs = {config.name: config for config in FleetShape().build_streams(names)}

        async def describe(name: str) -> Any:
            state = SimpleNamespace(bytes=stored if name == stream else 0)
            bucket = SimpleNamespace(name=name, max_bytes=-1, max_age=1, allow_direct=True)
            config: Any = configs.get(name) or bucket
            config.max_bytes = 1000 if name in configs else -1
            return SimpleNamespace(config=config, state=state)

        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        link._js = SimpleNamespace(stream_info=describe)  # type: ignore[assignment]
        link._space = await fleet_link.check_streams(link._js, names)
        assert link.is_almost_full(stream) is (stored >= 900)
        if is_refused:
            with pytest.raises(ApiError, match=stream) as caught:
                link.check_space()
            assert caught.value.status == 503 and caught.value.headers["Retry-After"]
            return
        link.check_space()
        # Bodies count until their jobs end, and no longer
        with link.hold_space(90):
            with pytest.raises(ApiError, match="aimage-bodies"), link.hold_space(900):
                pass
            link.check_space()
        for _ in range(20):
            with pytest.raises(KeyError), link.hold_space(90):
                raise KeyError

    asyncio.run(check())


def test_streams_that_are_there_are_looked_at_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def find_all(*_: object, **options: object) -> dict[str, int]:
        assert options == {"is_worker": False}
        return {}

    async def do_nothing(*_: object) -> None:
        pass

    async def check() -> float:
        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        version = SimpleNamespace(major=2, minor=10)
        link._client = SimpleNamespace(  # type: ignore[assignment]
            is_connected=True, connected_server_version=version, max_payload=1 << 20
        )
        begun = asyncio.get_running_loop().time()
        await link._verify()
        link.check()
        return link._due - begun

    monkeypatch.setattr(fleet_link, "check_streams", find_all)
    for name in "_read_clock", "_read_key_set":
        monkeypatch.setattr(FleetLink, name, do_nothing)
    monkeypatch.setattr(FleetLink, "_take_key_set", lambda *_: None)
    assert asyncio.run(check()) >= fleet_link.CHECK
