"""``aimage batch`` with a scripted worker."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.verbs import batch
from clowder_aimage.engine.batch_line import BatchRequest
from tests.process import Aimage
from tests.scripted_worker import Asked, Says, ScriptedWorker, says

URL = "/v1/images/generations"


def line(name: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}) + "\n"


def results(path: Path) -> dict[str, Any]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    named = {each["custom_id"]: each for each in found}
    assert len(named) == len(found)
    return named


class BatchWorker:
    """A worker that fails for the prompt "bad", and is busy for "busy" once."""

    def __init__(self) -> None:
        self.is_mended = False
        self._lock, self._seen = threading.Lock(), set[str]()

    def script(self, asked: Asked) -> Says:
        prompt = asked.value["prompt"]
        with self._lock:
            is_new = prompt not in self._seen
            self._seen.add(prompt)
        if prompt == "busy" and is_new:
            error = {"message": "the queue is full", "code": "overloaded"}
            return says({"error": error}, 503, Retry_After="1")
        if prompt == "bad" and not self.is_mended:
            return says({"error": {"message": "no", "code": "invalid_value"}}, 400)
        return says({"data": [{"b64_json": prompt}]})


def test_a_batch_is_sent_once_and_failed_requests_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PAUSE", 0.01)
    file, target = tmp_path / "b.jsonl", tmp_path / "b.results.jsonl"
    names = ("good", "busy", "bad")
    file.write_text("\n".join(line(name, model="m", prompt=name) for name in names))
    own = BatchWorker()
    with ScriptedWorker(own.script).running() as worker:
        here = Aimage(tmp_path, tmp_path / "store", {"AIMAGE_HOST": worker.host})
        done = here("batch", file, "--parallel", 2, code=1)
        assert "1 request of 3 failed: bad" in done.err and done.out == f"{target}\n"
        found = results(target)
        assert found["busy"]["response"]["body"] == {"data": [{"b64_json": "busy"}]}
        assert found["bad"]["error"] == {"code": "UsageError", "message": "no"}
        first = {each.value["prompt"]: each.headers["Idempotency-Key"] for each in worker.asked}
        assert {each.headers["Aimage-Priority"] for each in worker.asked} == {"batch"}
        count = len(worker.asked)
        assert count == 4 and len(set(first.values())) == 3
        here("batch", file, code=1)
        assert len(worker.asked) == count
        own.is_mended = True
        here("batch", file, "--retry-failed")
        assert [each.value["prompt"] for each in worker.asked[count:]] == ["bad"]
        assert worker.asked[-1].headers["Idempotency-Key"] != first["bad"]
        assert results(target)["bad"]["error"] is None
        # Interrupted while a result was written
        target.write_bytes(target.read_bytes().splitlines(keepends=True)[0] + b'{"custom_id": "ba')
        here("batch", file)
        assert {name for name, each in results(target).items() if not each["error"]} == set(names)


def test_few_results_of_a_batch_are_in_memory() -> None:
    begun = list[BatchRequest]()

    def begin(request: BatchRequest) -> Future[dict[str, Any]]:
        begun.append(request)
        done = Future[dict[str, Any]]()
        done.set_result({"custom_id": request.custom_id})
        return done

    requests = [BatchRequest(str(number), URL, {}, "") for number in range(50)]
    found = list[str]()
    for value in batch._results(begin, requests, 4):
        found.append(value["custom_id"])
        assert len(begun) - len(found) < 4
    assert sorted(found, key=int) == [each.custom_id for each in requests]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "expected an object"),
        ("{", "line 1"),
        (line("a", prompt="x") + line("a", prompt="y"), "no other line"),
        (line("a", prompt="x", stream=True), "without stream"),
        (line("a", prompt="x").replace(URL, "/v1/models"), "url one of"),
        ('{"custom_id": "a", "url": "' + URL + '"}', "expected an object"),
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


def test_pictures_of_a_batch_are_pushed_by_the_worker(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(line("a", prompt="x") + line("b", prompt="y"))
    with ScriptedWorker(BatchWorker().script).running() as worker:
        here = Aimage(tmp_path, tmp_path / "store", {"AIMAGE_HOST": worker.host})
        here("batch", tmp_path / "b.jsonl", "--push", "localhost:1/team/foxes")
        pushed = {each.value["prompt"]: each.value["output"]["push"] for each in worker.asked}
    assert pushed == {"x": "localhost:1/team/foxes:a", "y": "localhost:1/team/foxes:b"}
    (tmp_path / "c.jsonl").write_text(line("not a tag", prompt="x"))
    assert (
        "not a tag"
        in here("batch", tmp_path / "c.jsonl", "--push", "localhost:1/foxes", code=2).err
    )
