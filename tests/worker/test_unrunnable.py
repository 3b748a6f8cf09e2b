"""Models that cannot run here are listed without capabilities, and refused before a load."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from tests.importer.formats_gguf import UINT32, WEIGHTS
from tests.process import Aimage
from tests.program import need_package
from tests.text.test_ability import change, write_gguf
from tests.text.tiny_encoder import write_encoder
from tests.text.tiny_text import write_model
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.text_worker import scripted_worker

need_package("mlx_lm")

MODERN = "no network of the type 'modernbert'; convert it to GGUF"
VOCABULARY = "it has a vocabulary and no weights"
MESSAGES = [{"role": "user", "content": "a"}]
REQUESTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "embeddings": ("modern", "/v1/embeddings", {"input": "a"}, MODERN),
    "embeddings of ollama": ("modern", "/api/embed", {"input": "a"}, MODERN),
    "a load of ollama": ("modern", "/api/embed", {}, MODERN),
    "a chat": ("words", "/v1/chat/completions", {"messages": MESSAGES}, VOCABULARY),
    "a stream": ("words", "/v1/completions", {"prompt": "a", "stream": True}, VOCABULARY),
    "a chat of ollama": ("words", "/api/chat", {"messages": MESSAGES}, VOCABULARY),
    "a text of ollama": ("words", "/api/generate", {"prompt": "a"}, VOCABULARY),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("unrunnable")
    here = Aimage(home, home / "store")
    here("create", "-q", "modern", change(write_encoder(home / "m"), model_type="modernbert"))
    here("create", "-q", "words", write_gguf(home / "w", []))
    here("create", "-q", "chat", write_model(home / "c"))
    vectors = ("llama.pooling_type", UINT32, 1)
    here("create", "-q", "vectors", write_gguf(home / "v", WEIGHTS, vectors))
    with scripted_worker(here) as found:
        yield found


def post(worker: LocalWorker, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    status, _, answer = answer_to(urllib.request.Request(worker.url + path, data, headers))
    return status, json.loads(answer)


@pytest.mark.parametrize(("model", "path", "body", "reason"), REQUESTS.values(), ids=REQUESTS)
def test_requests_are_refused_without_a_load(
    worker: LocalWorker, model: str, path: str, body: dict[str, Any], reason: str
) -> None:
    status, answer = post(worker, path, {"model": model, **body})
    error = answer["error"] if isinstance(answer["error"], dict) else answer
    message = str(error.get("message") or error["error"])
    assert (status, error["code"]) == (422, "model_not_supported")
    assert f"{model}:latest cannot run here: " in message and reason in message
    assert worker.service.engine.list_loaded() == []


@pytest.mark.parametrize(
    ("model", "path", "body", "label"),
    [
        ("chat", "/v1/embeddings", {"input": "a"}, "embeddings"),
        ("chat", "/api/embed", {"input": "a"}, "embeddings"),
        ("vectors", "/v1/chat/completions", {"messages": MESSAGES}, "texts"),
        ("vectors", "/api/chat", {"messages": MESSAGES}, "texts"),
    ],
)
def test_other_work_is_refused_without_a_load(
    worker: LocalWorker, model: str, path: str, body: dict[str, Any], label: str
) -> None:
    status, answer = post(worker, path, {"model": model, **body})
    assert status == 400 and f"the model does not support {label}" in json.dumps(answer)
    assert worker.service.engine.list_loaded() == []


def test_lists_show_no_capabilities(worker: LocalWorker) -> None:
    listed = worker.get("/v1/models")["data"]
    named = {one["id"]: one["capabilities"] for one in listed}
    assert named["modern:latest"] == named["words:latest"] == []
    assert named["vectors:latest"] == ["embedding"] and "chat" in named["chat:latest"]
    tags = {one["name"]: one["capabilities"] for one in worker.get("/api/tags")["models"]}
    assert tags["modern:latest"] == tags["words:latest"] == []
    assert post(worker, "/api/show", {"model": "words"})[1]["capabilities"] == []
