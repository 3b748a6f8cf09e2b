"""Bodies of other programs: each has an answer, and says which of its fields had no effect."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from tests.process import Aimage
from tests.worker.client_bodies import BODIES
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.text_worker import add_models, scripted_worker

PICTURES = [entry for entry in BODIES if entry[2]["model"] == "tiny"]
TEXTS = [entry for entry in BODIES if entry not in PICTURES]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with scripted texts."""
    home = tmp_path_factory.mktemp("texts")
    here = Aimage(home, home / "store")
    add_models(here, home)
    with scripted_worker(here, "--max-models", 2) as found:
        yield found


def check(worker: LocalWorker, path: str, body: dict[str, Any], ignored: str) -> None:
    """Send a body; fail unless it has an answer that names the ignored fields."""
    asked = urllib.request.Request(
        worker.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    status, headers, answer = answer_to(asked)
    assert status == 200, answer
    assert b'"error"' not in answer
    listed = unquote(headers.get("X-Aimage-Ignored", ""))
    assert [*filter(None, listed.split(", "))] == ignored.split()
    words = {b"hello", b"data:", b'"embedding', b'"image"', b'"b64_json"'}
    assert any(word in answer for word in words)


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [entry[1:] for entry in PICTURES],
    ids=[entry[0] for entry in PICTURES],
)
def test_a_body_for_pictures_is_answered(
    worker: LocalWorker, path: str, body: dict[str, Any], ignored: str
) -> None:
    check(worker, path, body, ignored)


# After the pictures: the models of a worker of texts are scripted until the end of the module.
@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [entry[1:] for entry in TEXTS],
    ids=[entry[0] for entry in TEXTS],
)
def test_a_body_for_texts_is_answered(
    texts: LocalWorker, path: str, body: dict[str, Any], ignored: str
) -> None:
    check(texts, path, body, ignored)
