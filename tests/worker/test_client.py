"""The worker client, against scripted workers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage import errors
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.worker_client import WorkerClient
from tests.scripted_worker import Asked, Says, ScriptedWorker, event, line, says


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("box", "http://box:11434"),
        ("box:80", "http://box:80"),
        ("http://box", "http://box:11434"),
        ("http://box:1/", "http://box:1"),
        ("https://box", "https://box:443"),
        ("[::1]:7", "http://[::1]:7"),
        ("127.0.0.1:11434", "http://127.0.0.1:11434"),
        ("unix:///run/a b%41?c/worker.sock", "unix:///run/a b%41?c/worker.sock"),
    ],
)
def test_an_endpoint_is_parsed_from_an_address(text: str, where: str) -> None:
    assert str(Endpoint.parse(text)) == where


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "ftp://box",
        "box:port",
        "box:70000",
        "box:0",
        "http://box/path",
        "http://box?x",
        "unix://relative",
        "[::1",
        "a b",
        "box\n:1",
        "b\r\nX: y",
        "bücher",
    ],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="invalid worker address"):
        Endpoint.parse(text)


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(errors.UsageError) as caught:
        Endpoint.parse("http://me:secret@box")
    assert "AIMAGE_TOKEN" in str(format_advice(caught.value))
    assert "secret" not in f"{caught.value} {format_advice(caught.value)}"


def test_a_json_request_over_tcp_carries_the_token() -> None:
    with ScriptedWorker(lambda _: says({"models": []})).running() as worker:
        client = WorkerClient(worker.host, "open-sesame")
        assert client.ask("DELETE", "/api/delete", {"model": "ö"}) == {"models": []}
    (asked,) = worker.asked
    assert (asked.method, asked.path, asked.value) == ("DELETE", "/api/delete", {"model": "ö"})
    assert asked.headers["Authorization"] == "Bearer open-sesame"
    assert asked.headers["Host"] == worker.host


def test_no_authorization_header_is_sent_without_a_token() -> None:
    with ScriptedWorker(lambda _: says({})).running() as worker:
        WorkerClient(worker.host).ask("GET", "/")
    assert "Authorization" not in worker.asked[0].headers


def test_a_json_request_is_sent_over_a_unix_socket(tmp_path: Path) -> None:
    with ScriptedWorker(lambda _: says([1]), tmp_path / "w.sock").running() as worker:
        assert WorkerClient(worker.host).ask("GET", "/") == [1]
    assert worker.asked[0].headers["Host"] == "localhost"


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ümlaut", ""])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(errors.UsageError, match="token"):
        WorkerClient("box", token)


def test_a_refused_connection_is_a_network_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in (f"127.0.0.1:{port}", f"unix://{tmp_path}/none.sock", f"unix:///{'x' * 200}"):
        with pytest.raises(errors.NetworkError, match="cannot connect to the worker at") as caught:
            WorkerClient(host).ask("GET", "/")
        assert caught.value.remedy == "no_worker"


def test_an_empty_response_is_none() -> None:
    with ScriptedWorker(lambda _: Says()).running() as worker:
        assert WorkerClient(worker.host).ask("DELETE", "/api/delete") is None


def openai(status: int, code: str | None = None, kind: str = "server_error") -> dict[str, object]:
    return {"error": {"message": f"no: {status}", "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": "no: 400"}, errors.UsageError),
        (401, {"error": "no: 401"}, errors.UnauthorizedError),
        (403, openai(403), errors.UnauthorizedError),
        (404, {"error": "no: 404"}, errors.NotFoundError),
        (413, openai(413), errors.UsageError),
        (500, {"error": "no: 500"}, errors.AccessError),
        (500, openai(500, "verification_failed"), errors.VerificationError),
        (502, openai(502, "registry_unauthorized"), errors.UnauthorizedError),
        (502, {"error": "no: 502", "code": "verification_failed"}, errors.VerificationError),
        (502, {"error": "no: 502", "code": "a word of tomorrow"}, errors.AccessError),
        (503, openai(503), errors.AccessError),
        (507, {"error": "no: 507"}, errors.NoSpaceError),
    ],
)
def test_error_responses_raise_the_matching_error(
    status: int, body: dict[str, Any], kind: type[errors.AImageError]
) -> None:
    with (
        ScriptedWorker(lambda _: says(body, status)).running() as worker,
        pytest.raises(errors.AImageError) as caught,
    ):
        WorkerClient(worker.host).ask("GET", "/")
    assert type(caught.value) is kind
    assert caught.value.message == f"no: {status}"


def test_a_401_response_hints_at_the_token_variable() -> None:
    with (
        ScriptedWorker(lambda _: says({"error": "who?"}, 401)).running() as worker,
        pytest.raises(errors.UnauthorizedError) as caught,
    ):
        WorkerClient(worker.host).ask("GET", "/")
    assert "AIMAGE_TOKEN" in str(format_advice(caught.value))


def test_a_503_response_hints_at_retry_after() -> None:
    with (
        ScriptedWorker(lambda _: says({"error": "busy"}, 503, Retry_After="7")).running() as worker,
        pytest.raises(errors.AccessError) as caught,
    ):
        list(WorkerClient(worker.host).iter_lines("/", {}))
    assert caught.value.hint == "try again in 7 seconds"


@pytest.mark.parametrize(
    "answer",
    [
        Says([b"404 page not found"], 404),
        Says([b"<html>"], 502),
        says([1], 500),
        says({"error": ""}, 500),
        Says([], 302, {"Location": "http://127.0.0.1:1/"}),
        Says([b"[" * 50_000], 500),
        Says([b"x" * (1 << 20)], 500),
    ],
)
def test_an_error_response_of_another_server_is_reported(answer: Says) -> None:
    with (
        ScriptedWorker(lambda _: answer).running() as worker,
        pytest.raises(errors.AccessError, match=f"answered {answer.status}") as caught,
    ):
        WorkerClient(worker.host).ask("GET", "/")
    assert "AIMAGE_HOST" in str(format_advice(caught.value))


def test_a_response_that_is_not_json_is_refused() -> None:
    with (
        ScriptedWorker(lambda _: Says([b"<html>"])).running() as worker,
        pytest.raises(errors.FormatError, match="invalid response from"),
    ):
        WorkerClient(worker.host).ask("GET", "/")


def test_an_endless_response_is_refused() -> None:
    def for_ever() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)

    with ScriptedWorker(lambda _: Says(for_ever())).running() as worker:
        with pytest.raises(errors.FormatError, match="exceeds"):
            WorkerClient(worker.host).ask("GET", "/")
        assert worker.left.wait(30)


def test_a_response_that_is_not_http_is_a_network_error() -> None:
    def speak() -> None:
        taken, _ = listening.accept()
        with taken:
            taken.recv(1)
            taken.sendall(b"SSH-2.0-x\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(errors.NetworkError, match="was lost"):
            WorkerClient(f"127.0.0.1:{listening.getsockname()[1]}").ask("GET", "/")
        thread.join()


def test_a_silent_worker_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.engine.worker_client._SILENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = WorkerClient(f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(errors.NetworkError, match="timed out"):
            list(client.iter_events("/", {}))


def test_lines_are_yielded_before_the_stream_ends() -> None:
    """Send the second line only after the first one was read."""
    said = iter([line(completed=1), line(completed=2)])

    def pieces() -> Iterator[bytes]:
        yield next(said)
        while reads:
            pass
        yield next(said)

    reads = [1]
    with ScriptedWorker(lambda _: Says(pieces())).running() as worker:
        got = WorkerClient(worker.host).iter_lines("/api/pull", {"model": "x"})
        assert next(got) == {"completed": 1}
        reads.clear()
        assert list(got) == [{"completed": 2}]


def answer(said: Says, _: Asked) -> Says:
    return said


def test_lines_are_joined_from_chunks_of_any_size() -> None:
    text = line(a="ö" * 3) + b"\r\n" + line(b=1).strip()
    for size in (1, 2, 7, 1000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        with ScriptedWorker(partial(answer, Says(pieces))).running() as worker:
            assert list(WorkerClient(worker.host).iter_lines("/", {})) == [{"a": "ööö"}, {"b": 1}]


@pytest.mark.parametrize("text", [b"{\n", b"[]\n", b"3\n", b"\xff\n"])
def test_a_line_that_is_not_an_object_is_refused(text: bytes) -> None:
    with (
        ScriptedWorker(lambda _: Says([text])).running() as worker,
        pytest.raises(errors.FormatError),
    ):
        list(WorkerClient(worker.host).iter_lines("/", {}))


def test_an_error_in_a_stream_is_raised() -> None:
    answers = {
        "/1": (Says([line(status="x"), line(error="gone wrong")]), errors.AccessError),
        "/2": (Says([line(error="none", code="model_not_found")]), errors.NotFoundError),
        "/3": (
            Says([event("error", openai(400, kind="invalid_request_error"))]),
            errors.UsageError,
        ),
        "/4": (Says([event("error", openai(507, "insufficient_storage"))]), errors.NoSpaceError),
        "/0/1": (
            Says([line(error="who?", status=502, code="registry_unauthorized")]),
            errors.UnauthorizedError,
        ),
        "/0/2": (
            Says([line(error="odd", status=502, code="verification_failed")]),
            errors.VerificationError,
        ),
        "/0/3": (Says([line(error="{", status=502, code="invalid_content")]), errors.FormatError),
        "/0/4": (Says([line(error="x", status=502, code="registry_failed")]), errors.AccessError),
    }
    with ScriptedWorker(lambda asked: answers[asked.path][0]).running() as worker:
        client = WorkerClient(worker.host)
        for path, (_, kind) in answers.items():
            read = client.iter_lines if path < "/3" else client.iter_events
            with pytest.raises(errors.AImageError) as caught:
                list(read(path, {}))
            assert type(caught.value) is kind


def test_server_sent_events_are_parsed_per_the_standard() -> None:
    text = (
        b": keep-alive\n\n"
        b'event: progress\r\ndata: {"step": 1}\r\n\r\n'
        b"event: nothing\n\n"
        b'data:{"a":\ndata: 2}\nid: 7\nretry: 3\n\n'
        b'event: done\ndata: {"x": "y: z"}\n\n'
        b'event: half\ndata: {"never": "seen"}\n'
    )
    for size in (1, 5, 1000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        said = Says(pieces, headers={"X-Name": "value"})
        with ScriptedWorker(partial(answer, said)).running() as worker:
            (kind, headers), *others = WorkerClient(worker.host).iter_events("/", {})
            assert (kind, headers["x-name"]) == ("open", "value")
            assert others == [
                ("comment", {}),
                ("progress", {"step": 1}),
                ("message", {"a": 2}),
                ("done", {"x": "y: z"}),
            ]


def test_a_large_event_arrives_whole() -> None:
    picture = "A" * 3_000_000
    with ScriptedWorker(lambda _: Says([event("done", {"b64": picture})])).running() as worker:
        _, (_, value) = WorkerClient(worker.host).iter_events("/", {})
    assert value["b64"] == picture


@pytest.mark.parametrize("said", [line(a=1), line(a=1) + b'{"half', b""])
@pytest.mark.parametrize("length", [{}, {"Content-Length": "99"}], ids=["chunked", "length"])
def test_a_stream_that_breaks_off_is_an_error(said: bytes, length: dict[str, str]) -> None:
    with (
        ScriptedWorker(lambda _: Says([said], headers=length, is_cut=True)).running() as worker,
        pytest.raises(errors.NetworkError, match="was lost"),
    ):
        list(WorkerClient(worker.host).iter_lines("/", {}))


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.engine.worker_client._MAX_LINE", 1000)
    whole = line(a="b" * 900)
    answer = Says([whole, whole, b"x" * 600, b"x" * 600])
    with ScriptedWorker(lambda _: answer).running() as worker:
        lines = WorkerClient(worker.host).iter_lines("/", {})
        assert [len(next(lines)["a"]), len(next(lines)["a"])] == [900, 900]
        with pytest.raises(errors.FormatError, match=r"a line from .* exceeds"):
            next(lines)


@pytest.mark.parametrize("header", ["keep-alive", "close"])
def test_closing_a_stream_closes_the_connection(header: str) -> None:
    def for_ever() -> Iterator[bytes]:
        while True:
            yield event("progress", {"step": 1})

    answer = Says(for_ever(), headers={"Connection": header})
    with ScriptedWorker(lambda _: answer).running() as worker:
        events = WorkerClient(worker.host).iter_events("/", {})
        next(events)
        assert not worker.left.is_set()
        events.close()
        assert worker.left.wait(30)


def test_a_request_body_is_ascii() -> None:
    def script(asked: Asked) -> Says:
        return says({"same": json.loads(asked.body) == {"prompt": "\udc80 ö"}})

    with ScriptedWorker(script).running() as worker:
        assert WorkerClient(worker.host).ask("POST", "/", {"prompt": "\udc80 ö"}) == {"same": True}
    assert worker.asked[0].body.isascii()
