"""Texts of clients in each field of each route: no failure, and nothing of them in a log."""

from __future__ import annotations

import builtins
import io
import json
import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.document.unicode_text import find_invalid_text
from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.engine.engine import Engine
from clowder_aimage.http.log import JSON, configure
from clowder_aimage.http.operation import Operation
from clowder_aimage.http.route import INFER
from tests.wait import until
from tests.worker.conftest import LocalWorker, answer_to

HALF = "x\ud800"
# Values of fields whose routes need others
BODIES: tuple[dict[str, Any], ...] = (
    {HALF: 1},
    {"metadata": {HALF: "a"}},
    {"metadata": {"a": HALF}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    {"messages": [{"role": HALF, "content": "a", "name": HALF}]},
    {"tools": [{"type": "function", "function": {"name": HALF}}]},
    {"response_format": {"json_schema": {"schema": {"properties": {HALF: {}}}}}},
    {"stop": ["a", HALF]},
    {"options": {"stop": [HALF]}},
    {"loras": [{"model": HALF}]},
    {"input": [HALF]},
)


def list_operations(worker: LocalWorker) -> list[Operation]:
    routes = WorkerRole(worker.service).build_routes()
    return [route.operation for route in routes if route.operation is not None]


def send(worker: LocalWorker, method: str, path: str, data: bytes | None, **headers: str) -> Any:
    path = path.replace(":.+", "").replace("{", "").replace("}", "")
    asked = urllib.request.Request(worker.url + path, data, method=method)
    for name, value in headers.items():
        asked.add_header(name.replace("_", "-"), value)
    status, _, body = answer_to(asked)
    return status, body


def list_bodies(kind: Any) -> Iterator[dict[str, Any]]:
    fields = getattr(kind, "model_fields", {})
    yield from ({field.alias or name: HALF} for name, field in fields.items())
    yield from BODIES


def test_no_text_in_a_json_body_is_a_failure(worker: LocalWorker) -> None:
    wrong, count = list[Any](), 0
    for operation in list_operations(worker):
        if operation.body is None:
            continue
        for body in list_bodies(operation.body):
            data, count = json.dumps(body).encode(), count + 1
            status, answer = send(
                worker, operation.method, operation.path, data, Content_Type="application/json"
            )
            if status != 400 or b"valid Unicode" not in answer:
                wrong.append((operation.name, data, status, answer[:100]))
    assert not wrong and count > 300, wrong


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "User-Agent", "Accept"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/batches")])
def test_no_header_is_a_failure(worker: LocalWorker, name: str, method: str, path: str) -> None:
    """Bytes that are not UTF-8 become halves of surrogate pairs."""
    value = "Bearer a\xe9" if name == "Authorization" else "a\xe9"
    body = b"{}" if method == "POST" else None
    assert send(worker, method, path, body, **{name: value})[0] in (200, 400)


def test_a_line_of_a_batch_and_the_name_of_a_file_are_refused(worker: LocalWorker) -> None:
    for name, purpose in ("a\xe9", "batch"), ("a", "b\xe9"):
        form = (
            f'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
            "a\r\n--x--\r\n"
        ).encode("latin-1")
        status, body = send(
            worker, "POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=x"
        )
        assert status == 400, body


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (r'{"a": "\ud83d\ude00"}', None),
        (r'{"a": "\\ud800"}', None),
        (r'{"a": ["b", "\uDfff"]}', ("a", 1)),
        (r'{"a": {"\uD800": 1}}', ("a", "\ud800")),
        (r'"\ude00\ud83d"', ()),
    ],
)
def test_the_first_text_that_is_not_unicode_is_named(text: str, path: Any) -> None:
    assert find_invalid_text(json.loads(text), text.encode()) == path


MARK = "MARKED7TEXT"
FAULTS = ("RuntimeError", "ValueError", "KeyError", "UnicodeEncodeError")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return all that is logged, of each level, as a server writes it."""
    root, file = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure(JSON, "debug", file=file)
    return file


def mark(value: Any) -> Any:
    """Return a JSON value whose texts, also keys, are marked ones."""
    if isinstance(value, dict):
        return {mark(key) if key == HALF else key: mark(nested) for key, nested in value.items()}
    if isinstance(value, list):
        return [mark(nested) for nested in value]
    return MARK if value == HALF else value


def make_fault(kind: str) -> Exception:
    if kind == "UnicodeEncodeError":
        return UnicodeEncodeError("utf-8", MARK, 0, 1, MARK)
    fault: Exception = getattr(builtins, kind)(MARK)
    return fault


def test_no_text_of_a_client_is_in_a_log(
    worker: LocalWorker, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"model": "tiny", "prompt": MARK, "size": "64x64", "steps": 1, "user": MARK}
    for operation in list_operations(worker):
        if operation.body is None:
            continue
        for body in map(mark, list_bodies(operation.body)):
            # The others would change the store
            may_work = operation.scope == INFER
            for fields in (body, {**good, **body}) if may_work else (body,):
                data = json.dumps(fields).encode()
                send(
                    worker, operation.method, operation.path, data, Content_Type="application/json"
                )
    images = "/v1/images/generations"
    line = {"custom_id": MARK, "method": "POST", "url": images, "body": good}
    for wrong in (b"{", json.dumps(MARK).encode(), f'{{"{MARK}": 1, "{MARK}": 2}}'.encode()):
        send(worker, "POST", images, wrong, Content_Type="application/json")
    for kind in ("", *FAULTS):

        def fail(*_: object, kind: str = kind, **__: object) -> Any:
            raise make_fault(kind)

        if kind:
            monkeypatch.setattr(Engine, "generate", fail)
        data = json.dumps(good).encode()
        status, _ = send(worker, "POST", images, data, Content_Type="application/json")
        assert status == (500 if kind not in ("", "UnicodeEncodeError") else 400 if kind else 200)
        for lines in (json.dumps(line), json.dumps(line)[:-2]):
            run_batch(worker, lines)
    assert MARK not in log.getvalue(), [
        entry[:300] for entry in log.getvalue().splitlines() if MARK in entry
    ][:5]
    assert log.getvalue().count("\n") > 500


def run_batch(worker: LocalWorker, lines: str) -> None:
    form = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--x\r\nContent-Disposition: form-data; name="file"; filename="{MARK}"\r\n\r\n'
        f"{lines}\r\n--x--\r\n"
    )
    kind = "multipart/form-data; boundary=x"
    file = json.loads(send(worker, "POST", "/v1/files", form.encode(), Content_Type=kind)[1])
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/images/generations",
        "completion_window": "24h",
        "metadata": {MARK: MARK},
    }
    data = json.dumps(body).encode()
    _, answer = send(worker, "POST", "/v1/batches", data, Content_Type="application/json")
    name = json.loads(answer)["id"]
    until(lambda: worker.get(f"/v1/batches/{name}")["status"] in OVER)
