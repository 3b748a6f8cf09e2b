"""The work on batches with a scripted server: busy, expired, and taken over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.api.batch import stored_file
from clowder_aimage.api.batch.operation import BatchBody
from clowder_aimage.api.batch.routes import _new_batch
from clowder_aimage.api.batch.run import BatchRun, BatchRunner
from clowder_aimage.api.batch.store import ChangedRecordError, DirectoryBatchStore
from clowder_aimage.api.batch.stored_file import (
    FileWriter,
    iter_lines,
    remove_expired,
)
from clowder_aimage.engine import batch_line
from clowder_aimage.engine.batch_line import MAX_LINE, OVER, BatchRequest
from clowder_aimage.errors import FormatError, NetworkError
from clowder_aimage.http import background
from clowder_aimage.http.local_request import LocalRequest
from clowder_aimage.oci import read_json
from tests.wait import until_async

URL: Final = "/v1/completions"


class ScriptedApp:
    """Answers each request with ``answer(prompt)``, which may raise."""

    def __init__(self, answer: Callable[[str], tuple[int, bytes]]) -> None:
        self._answer = answer
        self.asked: list[str] = []

    async def send(self, request: LocalRequest) -> web.StreamResponse:
        assert request.fields is not None
        request["id"], prompt = "1", request.fields["prompt"]
        self.asked.append(prompt)
        status, body = self._answer(prompt)
        if status == 0:
            await asyncio.sleep(60)
        return web.Response(status=status, body=body)


async def add(store: DirectoryBatchStore, *prompts: str, now: int = 1 << 33) -> str:
    writer = FileWriter(store)
    for one in prompts:
        line = {"custom_id": one, "url": URL, "body": {"prompt": one}}
        await writer.write(json.dumps(line).encode() + b"\n")
    file = await writer.end("in.jsonl", "")
    body = BatchBody(input_file_id=file["id"], endpoint=URL, completion_window="24h")
    batch = _new_batch(body, now)
    record: dict[str, Any] = {"owner": "", "object": batch, "scope": "infer", "caller": ""}
    record |= {"host": "h", "keep": 3600, "runner": None, "outputs": [], "errors": []}
    record |= {"pieces": writer.chunks, "sizes": {"outputs": 0, "errors": 0}}
    await store.write(batch["id"], record, 0)
    return str(batch["id"])


async def ended(store: DirectoryBatchStore, name: str) -> dict[str, Any]:
    async def over() -> Any:
        found = await store.read("", name)
        assert found is not None
        return found[0] if found[0]["object"]["status"] in OVER else None

    record: dict[str, Any] = await until_async(over)
    return record


async def written(store: DirectoryBatchStore, pieces: list[str]) -> dict[str, Any]:
    found = [json.loads(line) async for line in iter_lines(store, pieces, 1 << 20)]
    return {one["custom_id"]: one for one in found}


@contextlib.asynccontextmanager
async def running(runner: BatchRunner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await scene

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 0.01)
    monkeypatch.setattr(batch_run, "PAUSE", 0.001)


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    tried = dict[str, int]()

    def answer(prompt: str) -> tuple[int, bytes]:
        tried[prompt] = tried.get(prompt, 0) + 1
        return (503, b"") if tried[prompt] == 1 else (200, b"no JSON")

    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "busy")
        async with running(BatchRunner(store, ScriptedApp(answer), lambda: 2)):  # type: ignore[arg-type]
            record = await ended(store, name)
        assert record["object"]["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        good = await written(store, record["outputs"])
        assert good["busy"]["response"]["body"] == "no JSON"
        assert tried == {"busy": 2}

    play(scene())


def test_a_batch_ends_whose_work_loses_a_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python 3.11 ``wait_for`` loses it if its future ends at the same time."""
    monkeypatch.setattr(background, "AGAIN", 0.05)
    is_flushing = asyncio.Event()

    class LosingStore(DirectoryBatchStore):
        has_lost = False

        async def check_space(self) -> None:
            if not app.asked or self.has_lost:
                return
            is_flushing.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.has_lost = True

    class WaitingApp(ScriptedApp):
        async def send(self, request: LocalRequest) -> web.StreamResponse:
            response = await super().send(request)
            await is_flushing.wait()
            return response

    app = WaitingApp(lambda _: (200, b"{}"))

    async def scene() -> None:
        store = LosingStore(tmp_path)
        name = await add(store, "a")
        async with running(BatchRunner(store, app, lambda: 2)):  # type: ignore[arg-type]
            assert (await ended(store, name))["object"]["status"] == "completed"
        assert store.has_lost

    play(scene())


def _raise(error: Exception) -> tuple[int, bytes]:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("x"),
        KeyError("x"),
        ConnectionResetError("the response was aborted"),
        TimeoutError(),
        FormatError("x"),
        NetworkError("x"),
        UnicodeEncodeError("utf-8", "x", 0, 1, "x"),
    ],
)
def test_any_error_of_a_request_ends_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def scene() -> None:
        store, asked = DirectoryBatchStore(tmp_path), list[str]()

        def answer(prompt: str) -> tuple[int, bytes]:
            asked.append(prompt)
            return (200, b"{}") if prompt == "good" else _raise(error)

        name = await add(store, "good", "SECRET")
        async with running(BatchRunner(store, ScriptedApp(answer), lambda: 1)):  # type: ignore[arg-type]
            record = await ended(store, name)
        batch = record["object"]
        assert (batch["status"], asked) == ("failed", ["good", "SECRET"])
        assert batch["failed_at"] and batch["errors"]["data"][0]["message"]
        assert set(await written(store, record["outputs"])) == {"good"}
        assert "SECRET" not in caplog.text + str([vars(entry) for entry in caplog.records])

    play(scene())


def test_answers_that_cannot_become_a_file_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise KeyError

    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "a")
        monkeypatch.setattr(batch_run, "add_file", refuse)
        server = ScriptedApp(lambda _: (200, b"{}"))
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            batch = (await ended(store, name))["object"]
            assert (batch["status"], batch["output_file_id"]) == ("failed", None)

            async def has_input_only() -> bool:
                return len(list(tmp_path.rglob("*.piece"))) == 1

            await until_async(has_input_only)

    play(scene())


@pytest.mark.parametrize(
    ("change", "is_damaged", "status"),
    [
        ({"status": "in_progress"}, True, "failed"),
        ({"status": "validating"}, True, "failed"),
        ({"status": "cancelling"}, True, "cancelled"),
        ({"status": "cancelling"}, False, "cancelled"),
        ({"status": "cancelling", "expires_at": 1}, False, "cancelled"),
        ({"status": "in_progress", "expires_at": 1}, False, "expired"),
        ({"status": "validating", "expires_at": 1}, False, "expired"),
    ],
)
def test_a_batch_that_is_over_ends_before_it_begins(
    tmp_path: Path, change: dict[str, Any], is_damaged: bool, status: str
) -> None:
    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "a")
        record, revision = (await store.read("", name)) or ({}, 0)
        record["object"] |= change
        await store.write(name, record, revision)
        if is_damaged:
            for path in tmp_path.rglob("*.piece"):
                path.unlink()
        server = ScriptedApp(lambda _: (200, b"{}"))
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            record = await ended(store, name)
        assert (record["object"]["status"], server.asked) == (status, [])

    play(scene())


def test_a_line_that_is_not_unicode_fails_the_batch(tmp_path: Path) -> None:
    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "\ud800")
        server = ScriptedApp(lambda _: (200, b"{}"))
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            batch = (await ended(store, name))["object"]
        assert (batch["status"], batch["errors"]["data"][0]["line"]) == ("failed", 1)
        assert "valid Unicode" in batch["errors"]["data"][0]["message"] and not server.asked

    play(scene())


def test_a_batch_of_a_server_that_has_gone_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        store, now = DirectoryBatchStore(tmp_path), [0.0]
        name = await add(store, "a", "b")
        first = ScriptedApp(lambda prompt: (200 if prompt == "a" else 0, b"{}"))
        async with running(BatchRunner(store, first, lambda: 2)):  # type: ignore[arg-type]

            async def has_output() -> bool:
                found = await store.read("", name)
                return bool(found and found[0]["outputs"])

            await until_async(has_output)
        record, revision = (await store.read("", name)) or ({}, 0)
        assert record["runner"] is None  # it said that it ends
        await store.write(name, {**record, "runner": "killed"}, revision)
        with pytest.raises(ChangedRecordError):
            await store.write(name, record, revision)
        other = ScriptedApp(lambda _: (200, b"{}"))
        clock = lambda: now[0]  # noqa: E731
        async with running(BatchRunner(store, other, lambda: 2, clock)):  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            assert not other.asked
            now[0] += batch_run.STALE
            record = await ended(store, name)
        assert (record["object"]["status"], other.asked) == ("completed", ["b"])
        assert set(await written(store, record["outputs"])) == {"a", "b"}

    play(scene())


def test_what_is_not_answered_in_time_has_expired_and_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_file, "CHUNK_SIZE", 100)

    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "a" * 90, "b", now=0)
        never = ScriptedApp(lambda _: (0, b""))
        async with running(BatchRunner(store, never, lambda: 1)):  # type: ignore[arg-type]
            record = await ended(store, name)
        assert record["object"]["status"] == "expired" and record["pieces"][0][1] > 1
        assert {
            one["error"]["code"] for one in (await written(store, record["errors"])).values()
        } == {"batch_expired"}
        keys = await store.list_keys()
        assert [name.partition("-")[0] for _, name in keys].count("file") == 2
        monkeypatch.setattr(time, "time", lambda: 1e11)
        await remove_expired(store)
        assert not await store.list_keys() and not list(tmp_path.rglob("*.piece"))

    play(scene())


def test_the_record_of_a_batch_stays_short_however_many_pieces_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a piece that is perhaps half stored is not used again."""

    async def scene() -> None:
        store, named = DirectoryBatchStore(tmp_path), list[str]()
        record, revision = (await store.read("", await add(store, "a"))) or ({}, 0)
        own: Any = ScriptedApp(lambda _: (200, b"{}"))
        run = BatchRun(BatchRunner(store, own, lambda: 1), record, revision)
        put = store.put

        async def flaky(name: str, data: bytes) -> None:
            named.append(name)
            if len(named) == 20:
                raise NetworkError("no answer")
            await put(name, data)

        monkeypatch.setattr(store, "put", flaky)
        numbers = [str(number) for number in range(50)]
        for number in numbers:
            line = json.dumps({"custom_id": number}).encode() + b"\n"
            run._add(BatchRequest(number, URL, {}), line, is_good=True)
            with contextlib.suppress(NetworkError):
                await run._flush()
        assert len(set(named)) == 50 and [count for _, count in record["outputs"]] == [19, 30]
        assert sorted(await written(store, record["outputs"])) == sorted(numbers)
        assert len(json.dumps(record)) < 2000

    play(scene())


def test_no_line_is_parsed_where_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[threading.Thread]()

    def record_thread(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return read_json(*arguments)

    monkeypatch.setattr(batch_line, "read_json", record_thread)
    monkeypatch.setattr(batch_run, "read_json", record_thread)

    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "a", 'b "\\')
        server = ScriptedApp(lambda _: (200, b"{}"))
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            record = await ended(store, name)
        # As after a server that stopped before it had named the files
        _, revision = (await store.read("", name)) or ({}, 0)
        batch = record["object"] | {"status": "in_progress", "output_file_id": None}
        await store.write(name, record | {"object": batch, "runner": None}, revision)
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            batch = (await ended(store, name))["object"]
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert server.asked == ["a", 'b "\\']
        assert len(threads) > 4 and threading.current_thread() not in threads

    play(scene())


# Functions: each process of the tests imports this module.
LARGE_LINES: dict[str, Callable[[], bytes]] = {
    "values": lambda: (
        b'{"custom_id":"%d","url":"/v1/completions","body":{"a":[' + b"[]," * 100_000 + b"[]]}}"
    ),
    "bytes": lambda: (
        b'{"custom_id":"%d","url":"/v1/completions","body":{"a":"' + b"x" * MAX_LINE + b'"}}'
    ),
    "bytes of no line": lambda: b"x" * (MAX_LINE + 1),
}


@pytest.mark.parametrize("kind", LARGE_LINES)
def test_a_large_line_fails_the_batch(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        store = DirectoryBatchStore(tmp_path)
        name = await add(store, "a")
        record, revision = (await store.read("", name)) or ({}, 0)
        writer = FileWriter(store)
        await writer.write(b"\n\n".join([LARGE_LINES[kind]()] * 2))
        await writer.end("in.jsonl", "")
        await store.write(name, record | {"pieces": writer.chunks}, revision)
        server = ScriptedApp(lambda _: (200, b"{}"))
        async with running(BatchRunner(store, server, lambda: 1)):  # type: ignore[arg-type]
            batch = (await ended(store, name))["object"]
        faults = batch["errors"]["data"]
        assert (batch["status"], [fault["line"] for fault in faults]) == ("failed", [1, 2])
        assert all("the request is too large" in fault["message"] for fault in faults)
        assert server.asked == []

    play(scene())
