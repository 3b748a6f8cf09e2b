"""``aimage batch`` with a server whose batches are real, and whose responses are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.api.batch.routes import BatchRoutes
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.batch.store import DirectoryBatchStore
from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.cli.verbs import batch
from clowder_aimage.engine import batch_client
from clowder_aimage.engine.batch_client import RemoteBatch
from clowder_aimage.engine.batch_line import BatchRequest
from clowder_aimage.http.app import build_app
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.local_request import LocalRequest
from clowder_aimage.http.route import Role, Route
from clowder_aimage.http.server import accepting
from tests.process import Aimage
from tests.scripted_worker import ScriptedWorker, says
from tests.wait import until

PICTURES, CHAT = "/v1/images/generations", "/v1/chat/completions"


def line(name: str, url: str = PICTURES, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def results(path: Path) -> dict[str, Any]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    named = {each["custom_id"]: each for each in found}
    assert len(named) == len(found)
    return named


class BatchServer(Role):
    """Serves batches whose requests fail for the prompt "bad", and wait for the prompt "slow"."""

    def __init__(self, directory: Path) -> None:
        self.is_mended = False
        self.served = list[tuple[str, dict[str, Any]]]()
        self.may_go_on = threading.Event()
        self._store, self.host = DirectoryBatchStore(directory), ""

    def build_routes(self) -> list[Route]:
        runner = self._runner
        return [
            *ollama_routes.build_open_routes(),
            *BatchRoutes(runner).build_routes(),
        ]

    async def send(self, request: LocalRequest) -> web.StreamResponse:
        """Respond as the route of a worker, for a batch."""
        assert request.fields is not None
        request["id"], prompt = "1", request.fields["prompt"]
        self.served.append((prompt, dict(request.fields)))
        while prompt == "slow" and not self.may_go_on.is_set():
            await asyncio.sleep(0.01)
        if prompt == "bad" and not self.is_mended:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return web.json_response({"data": [{"b64_json": prompt}]})

    @property
    def prompts(self) -> list[str]:
        return [prompt for prompt, _ in self.served]

    def records(self) -> list[str]:
        return [name for _, name in asyncio.run(self._store.list_keys())]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        ready, over = threading.Event(), threading.Event()

        async def serve() -> None:
            self._runner = BatchRunner(self._store, self, lambda: 1)  # type: ignore[arg-type]
            listening = listen("127.0.0.1:0", has_tokens=False)
            self.host = listening.urls[0].removeprefix("http://")
            async with accepting(build_app(self), listening), run_in_background(self._runner.run()):
                ready.set()
                while not over.is_set():
                    await asyncio.sleep(0.01)
            listening.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert ready.wait(30)
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 0.02)
    monkeypatch.setattr(batch_client, "PAUSE", 0.01)
    found = BatchServer(tmp_path / "server")
    with found.serving():
        yield found


@pytest.fixture
def here(tmp_path: Path, server: BatchServer) -> Aimage:
    return Aimage(tmp_path, tmp_path / "store", {"AIMAGE_HOST": server.host})


def test_a_batch_is_run_once_and_failed_requests_again(
    tmp_path: Path, server: BatchServer, here: Aimage
) -> None:
    file, target = tmp_path / "b.jsonl", tmp_path / "b.results.jsonl"
    names = ("good", "bad", "chat")
    urls = {"chat": CHAT}
    file.write_text("\n".join(line(each, urls.get(each, PICTURES), prompt=each) for each in names))
    done = here("batch", file, code=1)
    assert "1 request of 3 failed: bad" in done.err and done.out == f"{target}\n"
    found = results(target)
    assert found["good"]["response"]["body"] == {"data": [{"b64_json": "good"}]}
    assert found["bad"]["response"]["status_code"] == 400 and found["bad"]["error"] is None
    assert sorted(server.prompts) == sorted(names)
    assert all(each.startswith("batch_") for each in server.records())  # the files are removed
    here("batch", file, code=1)
    assert len(server.prompts) == 3
    here("batch", file, "--retry-failed", code=1)
    server.is_mended = True
    here("batch", file, "--retry-failed")
    assert server.prompts[3:] == ["bad", "bad"]
    assert results(target)["bad"]["response"]["status_code"] == 200
    # Interrupted while a result was written
    target.write_bytes(target.read_bytes().splitlines(keepends=True)[0] + b'{"custom_id": "ba')
    here("batch", file)
    assert set(results(target)) == set(names)


def test_results_of_an_earlier_version_are_read(tmp_path: Path, here: Aimage) -> None:
    """They name an error where the API has a response that is not 200."""
    failed = {"id": "1", "custom_id": "a", "response": None, "error": {"code": "UsageError"}}
    (tmp_path / "b.results.jsonl").write_text(json.dumps(failed) + "\n")
    (tmp_path / "b.jsonl").write_text(line("a", prompt="x"))
    assert "failed: a" in here("batch", tmp_path / "b.jsonl", code=1).err
    here("batch", tmp_path / "b.jsonl", "--retry-failed")


def test_a_batch_goes_on_without_its_command_and_is_found_again(
    tmp_path: Path, server: BatchServer, here: Aimage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text(line("a", prompt="a") + line("b", prompt="slow"))

    def killed(_: RemoteBatch, show: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteBatch, "wait", killed)
        with pytest.raises(SystemExit):
            here("batch", file)
    until(lambda: "slow" in server.prompts)
    server.may_go_on.set()
    here("batch", file)
    assert server.prompts == ["a", "slow"] and set(results(tmp_path / "b.results.jsonl")) == {*"ab"}


def test_an_interruption_cancels_a_batch_and_its_results_are_kept(
    tmp_path: Path, server: BatchServer, here: Aimage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text(line("a", prompt="a") + line("b", prompt="slow") + line("c", prompt="c"))

    def interrupted(found: RemoteBatch, show: object) -> None:
        until(lambda: "slow" in server.prompts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteBatch, "wait", interrupted)
        assert "the same command takes its results" in here("batch", file, code=130).err
    assert not (tmp_path / "b.results.jsonl").read_bytes()
    server.may_go_on.set()
    here("batch", file)
    assert set(results(tmp_path / "b.results.jsonl")) == {*"abc"}
    assert server.prompts.count("a") == 1 and server.prompts[-1] == "c"


def test_a_batch_that_another_client_cancels_ends(
    tmp_path: Path, server: BatchServer, here: Aimage, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, wait = tmp_path / "b.jsonl", RemoteBatch.wait
    file.write_text(line("a", prompt="slow"))

    def cancelled(found: RemoteBatch, show: Any) -> None:
        found.cancel()
        wait(found, show)

    monkeypatch.setattr(RemoteBatch, "wait", cancelled)
    assert "was cancelled by another client" in here("batch", file, code=1).err


def test_a_server_without_batches_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(line("a", prompt="x"))
    error = {"error": {"message": "no such endpoint", "code": "unknown_url"}}
    with ScriptedWorker(lambda _: says(error, 404)).running() as worker:
        other = Aimage(tmp_path, tmp_path / "store", {"AIMAGE_HOST": worker.host})
        done = other("batch", tmp_path / "b.jsonl", code=1)
    assert "has no batches" in done.err and "of this version" in done.err


def test_a_batch_has_no_more_requests_than_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_LINES", 3)
    requests = [BatchRequest(str(at), (PICTURES, CHAT)[at % 2], {}) for at in range(10)]
    parts = list(batch.split_batches(requests))
    assert [len(part) for part in parts] == [3, 2, 3, 2]
    assert all(len({each.url for each in part}) == 1 for part in parts)
    monkeypatch.setattr(batch, "MAX_FILE", 1)
    assert [len(part) for part in batch.split_batches(requests)] == [1] * 10


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "expected an object"),
        ("{", "line 1"),
        (line("a", prompt="x") + line("a", prompt="y"), "no other line"),
        (line("a", prompt="x", stream=True), "without stream"),
        (line("a", "/v1/models", prompt="x"), "url one of"),
        ('{"custom_id": "a", "url": "' + PICTURES + '"}', "expected an object"),
    ],
)
def test_a_malformed_batch_is_refused_before_anything_is_sent(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "b.jsonl").write_text(text)
    done = Aimage(tmp_path, tmp_path / "store")("batch", tmp_path / "b.jsonl", code=2)
    assert reason in done.err and "b.jsonl" in done.err


def test_another_file_is_not_taken_for_results(tmp_path: Path) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    (tmp_path / "b.jsonl").write_text(line("a", prompt="x"))
    assert (
        "has no results"
        in here("batch", tmp_path / "b.jsonl", "-o", tmp_path / "b.jsonl", code=2).err
    )
    assert "no such file" in here("batch", tmp_path / "none.jsonl", code=3).err


def test_pictures_of_a_batch_are_pushed_by_the_worker(
    tmp_path: Path, server: BatchServer, here: Aimage
) -> None:
    (tmp_path / "b.jsonl").write_text(line("a", prompt="x") + line("b", prompt="y"))
    here("batch", tmp_path / "b.jsonl", "--push", "localhost:1/team/foxes")
    pushed = {prompt: fields["output"]["push"] for prompt, fields in server.served}
    assert pushed == {"x": "localhost:1/team/foxes:a", "y": "localhost:1/team/foxes:b"}
    (tmp_path / "c.jsonl").write_text(line("not a tag", prompt="x"))
    assert (
        "not a tag"
        in here("batch", tmp_path / "c.jsonl", "--push", "localhost:1/foxes", code=2).err
    )
