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

from tests.conftest import TINY
from tests.process import Aimage
from tests.worker.client_bodies import BODIES
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.text_worker import add_models, scripted_worker


@pytest.fixture(scope="module")
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalWorker]:
    """Return a worker with scripted texts, or one that makes pictures: not both at a time."""
    home = tmp_path_factory.mktemp("worker")
    here = Aimage(home, home / "store")
    if request.param == "texts":
        add_models(here, home)
        with scripted_worker(here, "--max-models", 2) as found:
            yield found
        return
    here("create", "-q", "tiny", TINY)
    found = LocalWorker(here)
    yield found
    found.end()


def kind_of(body: dict[str, Any]) -> str:
    return "pictures" if body["model"] == "tiny" else "texts"


@pytest.mark.parametrize(
    ("worker", "path", "body", "ignored"),
    [(kind_of(entry[2]), *entry[1:]) for entry in BODIES],
    ids=[entry[0] for entry in BODIES],
    indirect=["worker"],
)
def test_a_body_of_a_client_is_answered(
    worker: LocalWorker, path: str, body: dict[str, Any], ignored: str
) -> None:
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
