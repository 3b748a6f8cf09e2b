"""A gateway passes on only valid responses of workers, whatever a worker sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.frame import DATA, DEAD, END, ENDS, FAILED, HEAD, Frame
from clowder_aimage.fleet.gateway.worker_response import read_answer_head, read_head, read_job_end
from clowder_aimage.fleet.job import reader as job_reader
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.job.reader import FrameOrder
from clowder_aimage.fleet.job.request import ANSWER, PART, STATUS
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import WORKER, FleetNames
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import WorkerStatus, read_workers
from tests.fleet.attempt import build_begin
from tests.fleet.fleet_run import FleetRun, ScriptedRole, prompt_as_picture
from tests.fleet.hostile_message import HTML, VALUES, list_hostile_messages
from tests.fleet.test_job_log import on_queue
from tests.wait import PATIENCE

Play = Callable[..., None]
JSON = [["Content-Type", "application/json"]]
OK = {"status": 200, "headers": JSON}
EVIL = [
    ["Set-Cookie", "a=b"],
    ["Location", "https://evil.example"],
    ["WWW-Authenticate", "Basic"],
    ["Access-Control-Allow-Origin", "*"],
    ["Content-Security-Policy", "default-src *"],
    ["Content-Length", "99999"],
    ["Content-Encoding", "gzip"],
    ["Transfer-Encoding", "chunked"],
    ["X-Accel-Redirect", "/secret"],
    ["Cache-Control", "public, max-age=99999"],
    ["Connection", "close"],
]


@dataclass(frozen=True)
class Case:
    """The frames of a worker, and the status that its client gets."""

    name: str
    frames: tuple[tuple[str, Any], ...]
    status: int = 502
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


def respond(head: Any, *data: bytes) -> tuple[tuple[str, Any], ...]:
    return (HEAD, head), *((DATA, part) for part in data or (b'{"x":1}',)), (END, b"")


def with_type(text: str) -> dict[str, Any]:
    return {"status": 200, "headers": [["Content-Type", text]]}


CASES = (
    Case("valid", respond(OK), 200),
    Case("evil headers", respond({"status": 200, "headers": JSON + EVIL}), 200),
    Case("a later field", respond({**OK, "later": 1}), 200),
    Case("a status without a body", respond({"status": 204, "headers": []}), 204),
    Case("no type", respond({"status": 200, "headers": []}), 200),
    Case("status 100", respond({"status": 100, "headers": []})),
    Case("status 99", respond({"status": 99, "headers": []})),
    Case("status 600", respond({"status": 600, "headers": []})),
    Case("status 1e9", respond({"status": 10**9, "headers": []})),
    Case("a text as status", respond({"status": "200", "headers": []})),
    Case("true as status", respond({"status": True, "headers": []})),
    Case("no status", respond({"headers": []})),
    Case("no headers", respond({"status": 200})),
    Case("headers are an object", respond({"status": 200, "headers": {"a": "b"}})),
    Case("three texts of a header", respond({"status": 200, "headers": [["a", "b", "c"]]})),
    Case("a line end", respond({"status": 200, "headers": [["X-A", "b\r\nSet-Cookie: a=b"]]})),
    Case("a line end in a name", respond({"status": 200, "headers": [["X\r\nA", "b"]]})),
    Case("1,000 headers", respond({"status": 200, "headers": [["X-Aimage-A", "b"]] * 1000})),
    Case("HTML", respond(with_type("text/html"))),
    Case("SVG", respond(with_type("image/svg+xml"))),
    Case("a type with a parameter", respond(with_type("application/json; charset=utf-7"))),
    Case("two types", respond({"status": 200, "headers": [*JSON, ["content-type", "text/html"]]})),
    Case("a list as head", respond([])),
    Case("no head", ((DATA, b"x"), (END, b""))),
    Case("two heads", ((HEAD, OK), *respond(OK))),
    Case("data before the head", ((DATA, b"x"), *respond(OK))),
    Case("only an end", ((END, b""),)),
    Case("a gap", respond(OK), numbers=(1, 3, 4)),
    Case("large numbers", respond(OK), numbers=(1, 10**8, 10**8 + 1)),
    Case("numbers of ten digits", respond(OK), numbers=(1, 10**9, 10**9 + 1)),
    Case("another kind", (("xyz", b""), (END, b""))),
    Case("data after the failure", ((FAILED, b""), *respond(OK))),
    Case("a dead job", ((DEAD, {"status": 504, "code": "late", "message": "m"}),), 504),
    Case("a dead job with status 200", ((DEAD, {"status": 200, "code": "c", "message": "m"}),)),
    Case("a dead job without facts", ((DEAD, {}),)),
    Case("a dead job as a list", ((DEAD, []),)),
    Case("a dead job with garbage", ((DEAD, b"\xff"),)),
    Case("a large body", respond(OK, *[b"x" * 60_000] * 5)),
)


async def write(link: FleetLink, ticket: JobTicket, case: Case) -> None:
    """Write the frames of a job as its worker, which then removes it from the queue."""
    names, begin, job = link.names, build_begin("rogue", ticket), ticket.job
    await link.store(names.build_mark_subject("rogue", job), begin.data, begin.headers)
    kinds = [*case.frames]
    numbers = case.numbers or range(1, len(kinds) + 1)
    for number, (kind, data) in zip(numbers, kinds, strict=True):
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        frame = Frame(kind, 1, number, raw, "rogue")
        build = names.build_mark_subject if kind in ENDS else names.build_log_subject
        frame = ticket.prove(frame)
        await link.store(build("rogue", job), raw, frame.headers)
    async for number, _ in link.read_messages(f"{names.fleet}.job.>", 0, names.jobs):
        # The gateway may have removed it.
        with contextlib.suppress(JetStreamError):
            await link.streams.delete_msg(names.jobs, number)


@pytest.mark.integration
def test_a_client_gets_a_valid_response_or_502(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_reader, "SILENCE", 0.02)
    monkeypatch.setattr(job_reader, "MAX_RESPONSE", 200_000)

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with (
            fleet.gateway() as url,
            fleet.worker("w", role) as worker,
            contextlib.AsyncExitStack() as stack,
        ):
            worker.takes_jobs = False
            await fleet.know(url, 1)
            gateway = await stack.enter_async_context(fleet.opened_gateway_link())
            for case in CASES:
                body = {"model": "tiny", "prompt": "x"}
                asking = fleet.session.post(f"{url}/v1/images/generations", json=body)
                asked = asyncio.create_task(asking.__aenter__())
                await write(gateway, await on_queue(fleet), case)
                answer = await asked
                text = await answer.text()
                assert answer.status == case.status, (case.name, text)
                assert not {name.lower() for name, _ in EVIL[:5]} & {
                    name.lower() for name in answer.headers if name != "Content-Security-Policy"
                }, case.name
                assert "Content-Encoding" not in answer.headers
                assert answer.headers["Cache-Control"] == "no-store"
                if case.status == 502:
                    message = json.loads(text)["error"]["message"]
                    assert message.startswith("the response of a worker is not valid: "), case.name
                    assert HTML not in message and len(message) < 500
            async with fleet.session.get(f"{url}/metrics") as metrics:
                refused = [case for case in CASES if case.status == 502]
                line = f'aimage_fleet_rejected_total{{kind="response"}} {float(len(refused))}'
                assert line in await metrics.text()
            assert not role.served

    play(scene)


VALUES_OF_LISTS: tuple[Any, ...] = (
    5,
    "x",
    None,
    {},
    [5],
    [{}],
    [{"id": {}}],
    [{"id": HTML, "name": 5}],
)
ANSWERS: tuple[tuple[str, str, bytes], ...] = (
    ("HTML", "text/html", HTML.encode()),
    ("not JSON", "application/json", b"{"),
    ("deep JSON", "application/json", b"[" * 5000 + b"]" * 5000),
    ("a list", "application/json", b"[]"),
    ("another type", "text/plain", b"x"),
    *(
        (f"entries: {value}", "application/json", json.dumps(body).encode())
        for value in VALUES_OF_LISTS
        for body in [{"object": "list", "data": value, "models": value, "content": value}]
    ),
)
LISTS = ("/v1/models", "/api/tags", "/api/ps", "/v1/adapters", "/content/")
QUESTIONS = ("/v1/models/x", "/v1/referrers?model=tiny", "/v1/files/pictures/x.png")


@contextlib.asynccontextmanager
async def rogue(
    fleet: FleetRun, answer: Callable[[FleetLink, Msg], Awaitable[None]]
) -> AsyncIterator[None]:
    """Run a worker that answers requests by a function, and never takes jobs."""
    link = FleetLink(fleet.access_of(WORKER), WORKER, "rogue")

    async def take(message: Msg) -> None:
        await answer(link, message)

    link.listen(link.names.build_call_subject("rogue"), take)
    async with link.open():
        await link.wait_until_ready(PATIENCE)
        bucket = await link.streams.key_value(link.names.workers)
        await bucket.put("rogue", WorkerStatus("rogue").encode())
        yield
        await bucket.delete("rogue")


@pytest.mark.integration
def test_an_answer_of_a_worker_that_is_not_valid_is_left_out(play: Play) -> None:
    current = [ANSWERS[0]]

    async def answer(link: FleetLink, message: Msg) -> None:
        _, kind, body = current[0]
        head = {"status": 200, "headers": [["Content-Type", kind], *EVIL], "size": len(body)}
        await link.publish(message.reply, b"not a status", {PART: STATUS})
        await link.publish(message.reply, body, {ANSWER: json.dumps(head)})

    async def scene(fleet: FleetRun) -> None:
        async with fleet.gateway() as url, rogue(fleet, answer):
            await fleet.know(url, 1)
            for current[0] in ANSWERS:
                for path in LISTS + QUESTIONS[:2]:
                    async with fleet.session.get(url + path) as got:
                        text = await got.text()
                        assert got.status == 502, (current, path, text)
                        assert "the response of a worker is not valid" in text
                        assert got.content_type == "application/json" and HTML not in text

    play(scene)


@pytest.mark.integration
def test_a_worker_with_a_long_name_ends_no_connection(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = fleet.operator()
        async with link.open():
            await link.wait_until_ready(PATIENCE)
            for key in ("a", "a" * 3900, "é"):
                raw = json.dumps({"id": key}).encode()
                await link.streams.publish(f"$KV.{link.names.workers}.{key}", raw)
            workers = await read_workers(link)
            assert [status.id for status in workers.list_statuses()] == ["a"]
            assert len(workers.list_rejected()) == 2
            assert link.is_ready

    play(scene)


@pytest.mark.integration
def test_an_entry_of_a_list_whose_name_controls_a_terminal_is_left_out(play: Play) -> None:
    names = ("tiny", "\u202eevil", "a\x1b[2J", "two\nlines", "é" * 1025)

    async def answer(link: FleetLink, message: Msg) -> None:
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in names]
        body = json.dumps({"object": "list", "data": entries}).encode()
        await link.publish(message.reply, body, {ANSWER: json.dumps({**OK, "size": len(body)})})

    async def scene(fleet: FleetRun) -> None:
        async with fleet.gateway() as url, rogue(fleet, answer):
            await fleet.know(url, 1)
            async with fleet.session.get(f"{url}/v1/models") as got:
                assert [entry["id"] for entry in (await got.json())["data"]] == ["tiny"]

    play(scene)


@pytest.mark.integration
def test_no_head_of_an_answer_makes_an_internal_error(play: Play) -> None:
    valid = {"status": 200, "headers": JSON, "size": 2}
    heads = [raw.decode(errors="replace") for _, raw in list_hostile_messages(valid)]
    current = [""]

    async def answer(link: FleetLink, message: Msg) -> None:
        await link.publish(message.reply, b"{}", {ANSWER: current[0]})

    async def scene(fleet: FleetRun) -> None:
        async with fleet.gateway() as url, rogue(fleet, answer):
            await fleet.know(url, 1)
            for current[0] in heads:
                if len(current[0]) > 100_000 or not current[0].isprintable():
                    continue
                for path in QUESTIONS[2:]:
                    async with fleet.session.get(url + path) as got:
                        assert got.status in (200, 502, 504), (current, await got.text())

    play(scene)


@pytest.mark.parametrize(
    ("read", "valid"),
    [
        (read_head, OK),
        (read_answer_head, {**OK, "size": 5}),
        (read_job_end, {"status": 500, "code": "job_given_up", "message": "m"}),
    ],
    ids=["head", "answer", "end"],
)
def test_a_head_is_valid_or_refused(read: Callable[[bytes], Any], valid: dict[str, Any]) -> None:
    assert read(json.dumps(valid).encode())
    for _, raw in list_hostile_messages(valid):
        with contextlib.suppress(FormatError):
            read(raw)


SUBJECT = FleetNames().build_log_subject("w", "1")


def test_a_frame_is_valid_or_refused() -> None:
    valid = Frame(DATA, 1, 1, b"x", "w", ("v",)).headers
    for field in valid:
        for value in map(str, VALUES):
            with contextlib.suppress(FormatError):
                frame = Frame.parse(SUBJECT, {**valid, field: value}, None)
                assert Frame.parse(SUBJECT, frame.headers, None) == frame
    for headers in (
        None,
        {},
        {**valid, "Aimage-Place": "1 1_0"},
        {**valid, "Aimage-Place": "１ 1"},
    ):
        with pytest.raises(FormatError):
            Frame.parse(SUBJECT, headers, b"x")
    for subject in ("", "aimage.log.w", "aimage.log..1", "aimage.log.a b.1", "aimage.log.w.1.2"):
        with pytest.raises(FormatError):
            Frame.parse(subject, valid, b"x")


def test_the_frames_of_a_job_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that arrive too early, and those of earlier attempts, count."""
    monkeypatch.setattr(job_reader, "MAX_RESPONSE", 2000)
    ticket = JobTicket.generate("j")
    for frames in (
        (Frame(DATA, 1, number, worker="w") for number in range(100, 110)),
        (build_begin("w", ticket, attempt) for attempt in range(2, 12)),
    ):
        order = FrameOrder(MarkChain(ticket))
        order.add_mark(build_begin("w", ticket))
        with pytest.raises(FormatError, match="bytes"):
            for frame in frames:
                _ = order.add(frame) if frame.kind == DATA else order.add_mark(frame)
