"""Undocumented expectations of ollama's clients, and malicious models."""

from __future__ import annotations

import asyncio
import http.client
import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

pytest.importorskip("mlx.core")
pytest.importorskip("aiohttp")

from clowder_aimage.api.ollama import routes as ollama_routes
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from tests.conftest import ROOT
from tests.worker.conftest import LocalWorker

ollama = pytest.importorskip("ollama")

DRAW: dict[str, Any] = {"model": "tiny", "prompt": "a dog", "width": 32, "height": 32, "steps": 1}
NAME = "vnd.clowder.aimage.name"  # the annotation with the file name of a layer
# Engine options of ollama. Requests cannot set any of them here.
ENGINE = {
    "num_gpu": 99,
    "main_gpu": 7,
    "num_thread": 10**9,
    "num_ctx": 10**9,
    "num_batch": -1,
    "use_mmap": False,
    "use_mlock": True,
    "low_vram": True,
    "numa": True,
    "trust_remote_code": True,
    "runtime_flags": ["--log-file", "/etc/passwd"],
}


@pytest.fixture(scope="module")
def client(worker: LocalWorker) -> Iterator[Any]:
    with ollama.Client(worker.url) as found:
        yield found


def ask(worker: LocalWorker, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Return the status and the JSON of a response."""
    with closing(http.client.HTTPConnection(worker.host, timeout=60)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if raw else None


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ("0.1.0", "0.1.0"),
        ("1.2.3+local.7", "1.2.3"),
        ("2.0rc1.dev4+g0123abc", "2.0"),
        ("unknown", "0"),
    ],
)
def test_the_version_is_parseable_by_open_webui(
    ours: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open WebUI splits the part before a hyphen at the dots and converts each part to int."""
    monkeypatch.setattr(ollama_routes, "__version__", ours)
    answer: Any = asyncio.run(ollama_routes._show_version(make_mocked_request("GET", "/")))
    version = json.loads(answer.text)["version"]
    assert version == told
    assert all(int(part) >= 0 for part in version.partition("-")[0].split("."))


def test_a_model_without_a_tag_means_latest_on_every_route(
    client: Any, worker: LocalWorker
) -> None:
    shown = [client.show(name).model_dump() for name in ("tiny", "tiny:latest")]
    assert shown[0] == shown[1]
    made = [
        client.generate(**DRAW | {"model": name}, options={"seed": 7}).image
        for name in ("tiny", "tiny:latest")
    ]
    assert made[0] == made[1]
    assert [model.model for model in client.ps().models] == ["tiny:latest"]
    client.copy("tiny", "other")
    assert {model.model for model in client.list().models} == {"tiny:latest", "other:latest"}
    client.delete("other:latest")
    status, answer = ask(worker, "POST", "/api/generate", {"model": "tiny:latest", "keep_alive": 0})
    assert (status, answer["done_reason"]) == (200, "unload")
    assert client.ps().models == []


def test_model_lists_have_the_fields_that_open_webui_reads(
    client: Any, worker: LocalWorker
) -> None:
    client.generate(**DRAW)
    for path in ("/api/tags", "/api/ps"):
        _, answer = ask(worker, "GET", path)
        assert answer["models"], path
        for model in answer["models"]:
            assert model["name"] == model["model"] == "tiny:latest"
            assert model["size"] > 0 and isinstance(model["details"], dict)
            when = model["expires_at" if path == "/api/ps" else "modified_at"]
            assert datetime.fromisoformat(when).tzinfo is not None


def test_models_have_the_image_capability_only(client: Any, worker: LocalWorker) -> None:
    _, answer = ask(worker, "GET", "/api/tags")
    for model in answer["models"]:
        assert model["capabilities"] == client.show(model["name"]).capabilities == ["image"]


def test_unsupported_calls_are_404_errors_of_the_client(client: Any, worker: LocalWorker) -> None:
    with pytest.raises(ollama.ResponseError, match="POST /api/create is not supported") as caught:
        client.create("new", from_="tiny")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="generates pictures; use /api/generate"):
        client.chat("tiny", [{"role": "user", "content": "hello"}])
    for digest in ("0" * 64, "..%2f..%2fsecret"):
        for method in ("HEAD", "POST"):
            assert ask(worker, method, f"/api/blobs/sha256:{digest}", {})[0] == 404
    assert not [path for path in worker.store.rglob("*") if "secret" in path.name]


def test_engine_options_of_a_request_have_no_effect(client: Any) -> None:
    """CVE-2026-28400: engine flags in a request. They are ignored here."""
    plain = client.generate(**DRAW, options={"seed": 7}).image
    assert client.generate(**DRAW, options={"seed": 7, **ENGINE}).image == plain


def test_text_generation_fields_of_ollama_are_ignored(worker: LocalWorker) -> None:
    said = {"system": "be kind", "template": "{{ .Prompt }}", "raw": True, "context": [1, 2]}
    said |= {"suffix": "x", "format": "json", "think": True, "truncate": True, **ENGINE}
    body = {**DRAW, "seed": 7, "stream": False}
    plain, other = (ask(worker, "POST", "/api/generate", body | more) for more in ({}, said))
    assert plain[0] == other[0] == 200
    assert plain[1]["image"] == other[1]["image"]


def test_only_the_last_line_of_a_stream_is_done(worker: LocalWorker) -> None:
    """Clients read ``completed`` and ``total`` of each line, then ``image``."""
    with closing(http.client.HTTPConnection(worker.host, timeout=60)) as connection:
        connection.request("POST", "/api/generate", json.dumps(DRAW | {"steps": 4}))
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.read().splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    steps = [(line["completed"], line["total"]) for line in lines if "completed" in line]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [index for index, line in enumerate(lines) if "image" in line] == [len(lines) - 1]
    for line in lines:
        assert {"model", "created_at", "response", "done"} <= set(line)
        assert (line["model"], line["response"]) == ("tiny", "")


# -- malicious models

UNSAFE = re.compile(r"^\s*(import|from) (pickle|marshal|shelve|dill|runpy)\b", re.MULTILINE)


class Trap:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def altered(
    worker: LocalWorker, name: str, change: Callable[[list[Any], Callable[..., Any]], None]
) -> None:
    """Tag the embedded model with changed layers as ``name``; all digests are valid."""
    store = ImageLayout(worker.store)
    document = json.loads(store.read(store.resolve(Reference.parse("tiny"))))

    def put(data: bytes, layer: dict[str, Any]) -> dict[str, Any]:
        descriptor = Descriptor.of(layer["mediaType"], data)
        store.push(descriptor, build_bytes_body(data))
        return layer | {"digest": str(descriptor.digest), "size": descriptor.size}

    change(document["layers"], put)
    raw = json.dumps(document).encode()
    store.push(
        Descriptor.of(document["mediaType"], raw), build_bytes_body(raw), Reference.parse(name)
    )


def is_tensor(layer: dict[str, Any]) -> bool:
    return "safetensors" in layer["mediaType"]


def lie(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield safetensors files with false sizes and offsets (CVE-2026-7482)."""
    size = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + size], data[8 + size :]
    (name, known), *_ = (item for item in json.loads(header).items() if item[0] != "__metadata__")
    begin, end = known["data_offsets"]

    def file(text: bytes, length: int | None = None) -> bytes:
        return (len(text) if length is None else length).to_bytes(8, "little") + text + values

    def told(**facts: Any) -> bytes:
        return file(json.dumps({name: known | facts}).encode())

    yield "header", file(header, 2**63)
    yield "past-the-end", told(data_offsets=[begin, end + (1 << 40)])


def test_weights_with_false_headers_fail_and_the_worker_continues(worker: LocalWorker) -> None:
    store = ImageLayout(worker.store)
    document = json.loads(store.read(store.resolve(Reference.parse("tiny"))))
    number = next(index for index, one in enumerate(document["layers"]) if is_tensor(one))
    data = store.read(Descriptor.from_json(document["layers"][number]))
    for kind, wrong in lie(data):

        def change(layers: list[Any], put: Callable[..., Any], wrong: bytes = wrong) -> None:
            layers[number] = put(wrong, layers[number])

        altered(worker, f"lies:{kind}", change)
        body = DRAW | {"model": f"lies:{kind}", "stream": False}
        status, answer = ask(worker, "POST", "/api/generate", body)
        assert 400 <= status < 600 and answer["error"], (kind, answer)
        assert str(worker.store) not in answer["error"]
    assert ask(worker, "POST", "/api/generate", DRAW | {"stream": False})[0] == 200


def test_code_in_a_model_is_not_executed(worker: LocalWorker, tmp_path: Path) -> None:
    """CVE-2026-5817, CVE-2025-32434: code and pickles in layers, and configs that name them."""
    marks = [tmp_path / name for name in ("pickled", "imported")]
    code = f"open({str(marks[1])!r}, 'w')".encode()

    def beside(layers: list[Any], put: Callable[..., Any]) -> None:
        file = next(layer for layer in layers if not is_tensor(layer))
        for name, data in (
            ("evil.py", code),
            ("sitecustomize.py", code),
            ("transformer/pytorch_model.bin", pickle.dumps(Trap(marks[0]))),
        ):
            layers.append(put(data, file | {"annotations": {NAME: name}}))

    def named(layers: list[Any], put: Callable[..., Any]) -> None:
        beside(layers, put)
        store = ImageLayout(worker.store)
        for index, layer in enumerate(layers):
            if layer["annotations"][NAME].endswith("config.json"):
                config = json.loads(store.read(Descriptor.from_json(layer)))
                config |= {"auto_map": {"AutoModel": "evil.Evil"}, "trust_remote_code": True}
                layers[index] = put(json.dumps(config).encode(), layer)

    altered(worker, "named", named)
    worker.notice()
    status, answer = ask(
        worker, "POST", "/api/generate", DRAW | {"model": "named", "stream": False}
    )
    assert (status, answer["code"]) == (422, "model_not_supported")
    assert "unknown fields auto_map, trust_remote_code" in answer["error"]
    assert not any(mark.exists() for mark in marks)
    for path in (ROOT / "clowder_aimage").rglob("*.py"):
        text = path.read_text("utf-8")
        assert "trust_remote_code" not in text, path
        assert UNSAFE.search(text) is None, path
