"""The parts of a fleet that need no server."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from clowder_aimage.engine.admission import BusyError
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.fleet.continuation import NDJSON, SSE, Continuation, is_stream
from clowder_aimage.fleet.fair_line import FairLine
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.fleet.fleet_link import GATEWAY, FleetAccess, FleetLink
from clowder_aimage.fleet.fleet_name import BATCH, INTERACTIVE, FleetNames
from clowder_aimage.fleet.job_choice import ELSEWHERE, ON_DISK, JobChoice, to_load, to_repeat
from clowder_aimage.fleet.job_frame import BEGIN, DATA, RELEASED, Attempt, Frame
from clowder_aimage.fleet.job_reader import FrameOrder
from clowder_aimage.fleet.room import Room
from clowder_aimage.fleet.worker_card import Roster, WorkerCard
from clowder_aimage.http.api_error import ApiError

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_names_of_a_fleet_are_read_from_subjects() -> None:
    names = FleetNames("team")
    assert names.wanted(names.job(BATCH, "ab", "me")) == (BATCH, "ab")
    for other in ("team.job.batch.ab", "other.job.batch.ab.me", "team.job.urgent.ab.me"):
        assert names.wanted(other) is None
    for wrong in ("", "a.b", "a b", "a*", "x" * 33):
        with pytest.raises(ValueError, match="letters"):
            FleetNames(wrong)


def test_a_job_is_read_as_it_was_written() -> None:
    fields = {"prompt": "a cat", "image": [b"\x89PNG\0", "data:image/png;base64,AA=="], "n": "1"}
    job = FleetJob("1", "/v1/images/edits", "infer", "me", "", "m", A, fields=fields, is_form=True)
    assert FleetJob.decode(job.encode()) == job
    plain = FleetJob("1", "/v1/x", "infer", "me", "", "m", A, fields={"options": {"seed": 1}})
    assert FleetJob.decode(plain.encode()) == plain
    assert plain.named("m@" + A).fields == {"options": {"seed": 1}, "model": "m@" + A}
    for wrong in (b"[]", b"{}", b'{"id": 1, "x": 2}', b"{", b'{"id":"1","id":"2"}'):
        with pytest.raises(FormatError):
            FleetJob.decode(wrong)


def test_frames_are_read_as_they_were_written() -> None:
    frame = Frame(DATA, 2, 7, b"x", "w2", ("w1",))
    assert Frame.parse(frame.headers(), b"x") == frame
    assert Frame.parse({}, b"x") is None
    assert Frame.parse({"Aimage-Frame": "data", "Aimage-Place": "one"}, b"") is None


def test_an_attempt_counts_the_workers_that_failed() -> None:
    assert Attempt.following(None) == Attempt(1, ())
    assert Attempt.following(Frame(DATA, 1, 3, worker="w1")) == Attempt(2, ("w1",))
    assert Attempt.following(Frame(RELEASED, 2, 9, worker="w2", past=("w1",))) == Attempt(
        3, ("w1",)
    )


def test_frames_are_ordered_once_and_by_attempt() -> None:
    order = FrameOrder()

    def add(attempt: int, number: int) -> list[tuple[int, int]]:
        found = order.add(Frame(DATA if number else BEGIN, attempt, number))
        return [(each.attempt, each.number) for each in found]

    assert add(1, 0) == [(1, 0)]
    assert (add(1, 2), order.has_gap) == ([], True)
    assert (add(1, 1), order.has_gap) == ([(1, 1), (1, 2)], False)
    assert add(1, 1) == []  # read again from the stream
    assert add(2, 1) == []
    assert add(2, 0) == [(2, 0), (2, 1)]
    assert add(1, 3) == []  # of a worker that came back too late


# -- workers


def card(name: str, **facts: object) -> WorkerCard:
    models = facts.pop("models", {"m:latest": A})
    return WorkerCard(name, models=models, kinds={A: "image", B: "text"}, **facts)  # type: ignore[arg-type]


def test_a_card_is_read_as_it_was_written() -> None:
    one = card("w1", loaded=(A,), default_for=("gpt-*",))
    assert WorkerCard.decode(one.encode()) == one
    later = json.loads(one.encode()) | {"of_a_later_version": 1}
    assert WorkerCard.decode(json.dumps(later).encode()) == one
    for wrong in (b"[]", b'{"version": "1"}', b"{"):
        with pytest.raises(FormatError):
            WorkerCard.decode(wrong)


def test_the_digest_of_a_name_is_that_of_most_workers() -> None:
    roster = Roster()
    roster.put(card("w1"))
    roster.put(card("w2", models={"m:latest": B}))
    roster.put(card("w3", models={"m:latest": B}, aliases={"mm": "m"}, default_model="m"))
    found = roster.find("m")
    assert found is not None and (found.name, found.digest, found.kind) == ("m:latest", B, "text")
    for alias in ("mm", "mm:latest", None):
        assert (other := roster.find(alias)) is not None and other.digest == B
    assert roster.find("unknown") is None
    assert roster.find(f"x@{A}") is not None
    with pytest.raises(UsageError):
        roster.find("NOT A NAME")
    assert roster.names("text") == ["m:latest"]


def test_a_worker_that_does_not_report_is_gone() -> None:
    now = 0.0
    roster = Roster(lambda: now)
    roster.put(card("w1", loaded=(A,)))
    now = 14.0
    roster.put(card("w2", is_draining=True, loaded=(B,)))
    assert roster.loaded_elsewhere(A, "w9") and not roster.loaded_elsewhere(A, "w1")
    assert not roster.loaded_elsewhere(B, "w9")  # it drains
    now = 16.0
    assert [each.id for each in roster.cards()] == ["w2"]
    with pytest.raises(UsageError, match="default"):
        roster.find(None)


def test_room_is_shared_by_texts_of_one_model() -> None:
    room = Room(slots=2, parallel=3)
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
        choice.hear(key, 0.0)
    assert choice.next(0.5) == ((BATCH, "hot"), 0.0)
    assert choice.next(1.5) == ((INTERACTIVE, "cold"), 0.0)  # it has waited, and is interactive
    choice.forget((BATCH, "hot"))
    assert choice.next(0.5) == (None, 0.5)
    choice.forget((INTERACTIVE, "cold"))
    assert choice.next(9.0) == (None, None)
    assert choice.next(700.0) == (None, None)


def test_the_worker_whose_model_is_missed_least_loads_another() -> None:
    idle_for = (None, 600.0, 30.0, 2.0, 0.0)  # None: there is room for one more
    waits = [to_load(one, is_elsewhere=False) for one in idle_for]
    assert waits == sorted(waits) and waits[0] == ON_DISK < waits[-1] < ELSEWHERE
    assert to_load(None, is_elsewhere=True) == ELSEWHERE


def test_jobs_gather_at_the_copy_that_was_used_last() -> None:
    waits = [to_repeat(idle) for idle in (0.0, 2.0, 9.0, 10.0, 600.0)]
    assert waits == sorted(waits) and waits[0] == 0.0 and waits[-2] == waits[-1] < ON_DISK


# -- fairness


def test_callers_have_their_turns_one_after_another() -> None:
    asyncio.run(_take_turns())


async def _take_turns() -> None:
    line, order = FairLine(lambda: 1, most=10), list[str]()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(line.turn("first", INTERACTIVE))

        async def job(caller: str, priority: str = INTERACTIVE) -> None:
            async with line.turn(caller, priority):
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
    assert line.queued == line.waiting == 0


def test_a_full_line_refuses_and_a_job_that_has_begun_makes_room() -> None:
    async def run() -> None:
        line = FairLine(lambda: 1, most=1)
        async with line.turn("a", INTERACTIVE) as begun:
            waiting = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await _pass(line)
            begun()
            await waiting

    asyncio.run(run())


async def _pass(line: FairLine) -> None:
    async with line.turn("b", INTERACTIVE):
        pass


def test_the_age_of_the_oldest_job_is_that_of_jobs_that_no_worker_has_begun() -> None:
    async def run() -> None:
        now = 0.0
        line = FairLine(lambda: 1, most=9, clock=lambda: now)
        assert line.age(INTERACTIVE) == 0.0
        async with line.turn("a", INTERACTIVE) as begun:
            waiting = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            now = 5.0
            leaving = asyncio.create_task(_pass(line))
            await asyncio.sleep(0)
            now = 8.0
            assert (line.age(INTERACTIVE), line.age(BATCH)) == (8.0, 0.0)
            leaving.cancel()
            await asyncio.wait([leaving])
            begun()
            await waiting
            assert line.age(INTERACTIVE) == 0.0

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
    assert stream.feed(first[:50]) + stream.feed(first[50:]) == first
    assert stream.feed(b"data: {half of an ev") == b""
    stream.begin()
    again = sse("queued behind 2", "loading", "step 1 of 4", "step 2 of 4")
    assert stream.feed(again + sse(picture("partial_image", "p1"))) == b""
    rest = sse("step 3 of 4", picture("partial_image", "p2"), picture("completed", "x" * 99_999))
    assert stream.feed(rest) == rest


def test_a_finished_picture_is_not_sent_twice() -> None:
    stream = Continuation(SSE)
    large = sse(picture("completed", "x" * 99_999), {"step": 1, "total": 2})
    assert stream.feed(large) == large
    stream.begin()
    assert stream.feed(large) == b""
    assert stream.feed(sse(picture("completed", "y"))) == sse(picture("completed", "y"))


def chunk(text: str, name: str, **more: object) -> dict[str, object]:
    return {"id": name, "choices": [{"index": 0, "delta": {"content": text}, **more}]}


def test_a_text_goes_on_after_its_last_character() -> None:
    stream = Continuation(SSE)
    stream.feed(sse(chunk("The c", "a"), chunk("at s", "a")))
    stream.begin()
    assert stream.feed(sse(chunk("The", "b"), chunk(" cat ", "b"))) == b""
    found = stream.feed(sse(chunk("sat", "b"), chunk("", "b", finish_reason="stop")))
    assert found == sse(chunk("at", "a"), chunk("", "a", finish_reason="stop"))
    assert stream.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_lines_of_ollama_go_on_too() -> None:
    def lines(*values: object) -> bytes:
        return b"".join(_text(one) + b"\n" for one in values)

    stream = Continuation(NDJSON)
    stream.feed(lines({"completed": 1, "done": False}, {"completed": 2, "done": False}))
    stream.begin()
    assert stream.feed(lines({"completed": 1, "done": False})) == b""
    rest = lines({"completed": 3, "done": False}, {"image": "x", "done": True})
    assert stream.feed(rest) == rest
    stream = Continuation(NDJSON)
    stream.feed(lines({"message": {"role": "assistant", "content": "Hel"}, "done": False}))
    stream.begin()
    found = stream.feed(
        lines({"message": {"role": "assistant", "content": "Hello"}, "done": False})
    )
    assert found == lines({"message": {"role": "assistant", "content": "lo"}, "done": False})


def test_errors_have_the_form_of_the_stream() -> None:
    assert Continuation(SSE).error(500, {"error": {}}, None).startswith(b"event: error\ndata: ")
    assert json.loads(Continuation(NDJSON).error(500, {"error": "no"}, "x")) == {
        "error": "no",
        "status": 500,
        "code": "x",
    }
    assert is_stream("text/event-stream; charset=utf-8") and not is_stream("application/json")


def test_a_server_of_an_old_version_is_named() -> None:
    async def check() -> None:
        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        version = SimpleNamespace(major=2, minor=8)
        link._client = SimpleNamespace(is_connected=True, connected_server_version=version)  # type: ignore[assignment]
        await link._verify()
        with pytest.raises(ApiError, match=r"2\.9 is needed") as caught:
            link.check()
        assert caught.value.status == 503 and caught.value.headers["Retry-After"]

    asyncio.run(check())
