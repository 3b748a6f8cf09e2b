"""Requests for a model in memory: what they read of the store."""

from __future__ import annotations

import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.create import create
from clowder_aimage.importer import Provenance
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.process import Aimage
from tests.store import copy_store
from tests.text.tiny_text import write_model
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.text_worker import scripted_worker

PICTURES, CHAT = "/v1/images/generations", "/v1/chat/completions"
DRAW = {"model": "tiny", "prompt": "a dog", "size": "32x32", "steps": 1, "seed": 1}
DRAW_HERE = {"model": "tiny", "prompt": "a dog", "width": 32, "height": 32, "steps": 1}
SAID = {"model": "words", "messages": [{"role": "user", "content": "one two"}]}
PICTURE_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "picture": (PICTURES, DRAW),
    "stream of a picture": (PICTURES, DRAW | {"stream": True}),
    "picture by ollama": ("/api/generate", DRAW_HERE),
    "load by ollama": ("/api/generate", {"model": "tiny"}),
}
TEXT_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, SAID),
    "two chats": (CHAT, SAID | {"n": 2}),
    "text": ("/v1/completions", {"model": "words", "prompt": "one two"}),
    "text by ollama": ("/api/generate", {"model": "words", "prompt": "one two"}),
    "chat by ollama": ("/api/chat", SAID),
}


@pytest.fixture(scope="module")
def worker(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("pictures")
    copy_store(stocked, home / "store")
    found = LocalWorker(Aimage(home, home / "store"), "--max-models", "3")
    yield found
    found.end()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker whose texts are scripted: what is counted is the work before."""
    home = tmp_path_factory.mktemp("texts")
    here = Aimage(home, home / "store")
    here("create", "-q", "words", write_model(home / "words"))
    with scripted_worker(here) as found:
        yield found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls about files of a store: opens of the index, and all calls about blobs."""
    counts = Counter[str]()

    def counted(name: str, call: Any) -> Any:
        def count(path: Any, *arguments: Any, **options: Any) -> Any:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            counts["index"] += name == "open" and str(text).endswith("/index.json")
            counts["blobs"] += "/blobs/" in str(text)
            return call(path, *arguments, **options)

        return count

    for name in ("open", "stat", "lstat"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return counts


def ask(worker: LocalWorker, path: str, body: dict[str, Any]) -> Any:
    """Return the headers of a response without an error."""
    headers = {"Content-Type": "application/json"}
    status, found, answer = answer_to(
        urllib.request.Request(worker.url + path, json.dumps(body).encode(), headers)
    )
    assert status == 200 and b"error" not in answer, answer
    return found


@pytest.mark.worker_only("a gateway reads the store, too")
@pytest.mark.parametrize("kind", PICTURE_REQUESTS)
def test_a_warm_request_reads_the_index_once_and_no_blob(
    worker: LocalWorker, calls: Counter[str], kind: str
) -> None:
    check_warm(worker, calls, *PICTURE_REQUESTS[kind])


def check_warm(worker: LocalWorker, calls: Counter[str], path: str, body: dict[str, Any]) -> None:
    ask(worker, path, body)
    calls.clear()
    ask(worker, path, body)
    assert (calls["index"], calls["blobs"]) == (1, 0)


@pytest.mark.worker_only("a gateway reads the store, too")
def test_a_name_that_has_moved_is_checked_and_loaded(
    worker: LocalWorker, calls: Counter[str]
) -> None:
    store, name = LayeredStore([worker.store]), Reference.parse("moving")
    create(store, name, TINY)
    first = store.resolve(name).digest
    moving = DRAW | {"model": "moving"}
    assert ask(worker, PICTURES, moving)["X-Aimage-Digest"] == str(first)
    create(store, name, TINY, provenance=Provenance(source="elsewhere"))
    second = store.resolve(name).digest
    calls.clear()
    assert ask(worker, PICTURES, moving)["X-Aimage-Digest"] == str(second) != str(first)
    assert calls["blobs"] > 250
    assert ask(worker, PICTURES, DRAW)["X-Aimage-Digest"] == str(first)


# After the pictures: the models of workers are scripted until the end of the module.
@pytest.mark.worker_only("a gateway reads the store, too")
@pytest.mark.parametrize("kind", TEXT_REQUESTS)
def test_a_warm_text_request_reads_the_index_once_and_no_blob(
    texts: LocalWorker, calls: Counter[str], kind: str
) -> None:
    check_warm(texts, calls, *TEXT_REQUESTS[kind])
