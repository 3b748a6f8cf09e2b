"""OpenAI's files and batches, with its unmodified SDK; also through a gateway (``--gateway``)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.engine.batch_line import OVER
from tests.wait import until
from tests.worker.conftest import LocalWorker, answer_to

PICTURES = "/v1/images/generations"
WISH = {"model": "tiny", "size": "64x64", "steps": 1}
OWNERS = {"a": "a" * 32, "b": "b" * 32}


@pytest.fixture(scope="module")
def client(worker: LocalWorker) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_run, "FLUSH_INTERVAL", 0.05)
        with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as found:
            yield found


def line(name: str, url: str = PICTURES, **body: Any) -> str:
    sent = {"prompt": name, **WISH, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": sent})


def upload(client: Any, *lines: str) -> Any:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def ended(client: Any, batch: Any) -> Any:
    def over() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in OVER else None

    return until(over)


def begun(client: Any, *lines: str, **options: Any) -> Any:
    known = {"endpoint": PICTURES, "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, *lines).id, **known)


def output_lines(client: Any, name: str | None) -> dict[str, Any]:
    assert name is not None
    found = [json.loads(each) for each in client.files.content(name).text.splitlines()]
    return {each["custom_id"]: each for each in found}


def test_a_batch_is_run_and_its_output_is_a_file(client: Any, worker: LocalWorker) -> None:
    lines = (line("a", seed=7), "", "\ufeff" + line("b", loras=[], new=1), line("c", n=0))
    batch = begun(
        client, *lines, metadata={"k": "v"}, extra_body={"metadata": {"k": "v", "l": None}}
    )
    assert batch.status == "validating" and batch.object == "batch"
    done = ended(client, batch)
    assert (done.status, done.metadata) == ("completed", {"k": "v"})
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert done.in_progress_at and done.completed_at and done.expires_at == done.created_at + 86400
    good, bad = output_lines(client, done.output_file_id), output_lines(client, done.error_file_id)
    assert set(good) == {"a", "b"} and set(bad) == {"c"}
    assert good["b"]["response"]["ignored"] == ["new"] and "ignored" not in good["a"]["response"]
    assert bad["c"]["response"]["body"]["error"]["param"] == "n"
    assert (bad["c"]["response"]["status_code"], bad["c"]["error"]) == (400, None)
    made = client.images.generate(
        prompt="a", model="tiny", size="64x64", extra_body={"steps": 1, "seed": 7}
    )
    assert good["a"]["response"]["body"]["data"][0]["b64_json"] == made.data[0].b64_json
    listed = client.batches.list(limit=1)
    assert listed.data[0].id == done.id
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.filename.endswith("_output.jsonl")


def test_a_malformed_batch_fails_before_anything_is_sent(client: Any) -> None:
    other = line("x", "/v1/embeddings")
    done = ended(client, begun(client, line("a"), "{", line("a"), other))
    assert done.status == "failed" and done.output_file_id is None
    assert [(each.line, each.code) for each in done.errors.data] == [
        (2, "invalid_request"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
    ]
    assert ended(client, begun(client)).errors.data[0].code == "empty_file"


def test_a_cancelled_batch_says_what_was_not_sent(client: Any) -> None:
    batch = begun(client, *(line(f"n{number}", steps=200) for number in range(20)))
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at
    left = output_lines(client, done.error_file_id)
    assert left["n19"]["error"]["code"] == "batch_cancelled"
    counts = done.request_counts
    assert counts.completed + counts.failed == counts.total == 20 or not counts.total
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_files_are_listed_paged_and_deleted(client: Any) -> None:
    files = [upload(client, line("a")) for _ in range(3)]
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="no such batch"):
            call(files[0].id)
    assert client.files.retrieve(files[0].id).bytes == len(line("a"))
    found = [each.id for each in client.files.list(purpose="batch", limit=2)]  # follows pages
    assert {one.id for one in files} <= set(found) and len(found) == len(set(found))
    assert client.files.content(files[0].id).text == line("a")
    assert client.files.delete(files[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(files[0].id)
        assert caught.value.code == "file_not_found"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"endpoint": "/v1/models"}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"input_file_id": "file-0"}, "file_not_found", "input_file_id"),
        ({"input_file_id": "../../x"}, "file_not_found", "input_file_id"),
        ({"metadata": {"a" * 65: "b"}}, "invalid_value", "metadata"),
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"strict": True, "cfg": 1}, "unknown_parameter", "cfg"),
    ],
)
def test_a_malformed_request_for_a_batch_is_refused(
    client: Any, worker: LocalWorker, fields: dict[str, Any], code: str, param: str
) -> None:
    good = {"endpoint": PICTURES, "completion_window": "24h", "input_file_id": upload(client).id}
    data = json.dumps(good | fields).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{worker.url}/v1/batches", data, headers)
    status, _, body = answer_to(asked)
    error = json.loads(body)["error"]
    assert status in (400, 404) and (error["code"], error["param"]) == (code, param)


def test_malformed_uploads_are_refused(client: Any, worker: LocalWorker) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="must be at least 3600"):
        client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )
    asked = urllib.request.Request(f"{worker.url}/v1/files", b"{}")
    assert answer_to(asked)[0] == 415


@pytest.mark.parametrize(
    ("query", "param"),
    [("order=up", "order"), ("limit=0", "limit"), ("limit=x", "limit"), ("after=file-1", "after")],
)
def test_malformed_lists_are_refused(worker: LocalWorker, query: str, param: str) -> None:
    status, _, body = answer_to(urllib.request.Request(f"{worker.url}/v1/files?{query}"))
    expected = 404 if param == "after" else 400
    assert (status, json.loads(body)["error"]["param"]) == (expected, param)


SECONDS = "expires_after[seconds]"
BAD_SECONDS = ("000000003600" + "9" * 900, "9" * 1000, "3599", "2592001", "-3600", "1e4", "x")


def test_malformed_forms_are_refused(worker: LocalWorker) -> None:
    part = '--x\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    file = part.format("file", '; filename="a"', "x")
    purpose = part.format("purpose", "", "batch")
    for parts, param in (
        (purpose, "file"),
        (file + file, "file"),
        (file + purpose + part.format("model", "", "tiny"), "model"),
        (file + purpose + part.format("expires_after[anchor]", "", "now"), "expires_after[anchor]"),
        (file + purpose + purpose, "purpose"),
        (file + part.format("purpose", "", "batch" + " " * 2000), "purpose"),
        *((file + purpose + part.format(SECONDS, "", text), SECONDS) for text in BAD_SECONDS),
        ("no form", None),
    ):
        data = f"{parts}--x--\r\n".encode()
        asked = urllib.request.Request(f"{worker.url}/v1/files", data)
        asked.add_header("Content-Type", "multipart/form-data; boundary=x")
        status, _, body = answer_to(asked)
        assert (status, json.loads(body)["error"]["param"]) == (400, param), parts


def test_files_and_batches_are_those_of_a_token(worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"infer {text}\n" for text in OWNERS.values()))
    tokens.chmod(0o600)
    other = worker.start("--token-file", tokens)
    mine, theirs = (
        openai.OpenAI(base_url=f"{other.url}/v1", api_key=key, max_retries=0)
        for key in OWNERS.values()
    )
    with mine, theirs:
        batch = begun(mine, line("a"))
        assert ended(mine, batch).status == "completed"
        assert not theirs.files.list().data and not theirs.batches.list().data
        for call, name in (
            (theirs.batches.retrieve, batch.id),
            (theirs.batches.cancel, batch.id),
            (theirs.files.delete, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call(name)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        other.get("/v1/files")
