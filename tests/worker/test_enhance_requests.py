"""The field ``enhance``: a language model of the worker writes the prompt of a picture."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.api.text.enhance_field import EnhanceFields, PromptEnhancer
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.model.text.enhancement import INSTRUCTION
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.process import Aimage
from tests.program import need_package
from tests.worker.conftest import LocalWorker, answer_to

need_package("mlx_lm")

ENHANCER = Path(__file__).parents[2] / "examples" / "shapes" / "enhancer"
OPENAI, OLLAMA = "/v1/images/generations", "/api/generate"
SMALL = {"model": "tiny", "width": 32, "height": 32, "steps": 1, "seed": 3}
WRITTEN = "two blue squares on a black background"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("enhance")
    here = Aimage(home, home / "store")
    here("create", "-q", "enhancer", ENHANCER)
    here("create", "-q", "tiny", TINY, "--whole-files")
    found = LocalWorker(here)
    try:
        yield found
    finally:
        found.end()


def ask(worker: LocalWorker, path: str, **body: Any) -> tuple[int, Any]:
    """Return the status and the JSON of a response."""
    asked = urllib.request.Request(worker.url + path, json.dumps(SMALL | body).encode())
    status, _, answer = answer_to(asked)
    return status, json.loads(answer)


@pytest.mark.parametrize(
    ("path", "field", "status", "message"),
    [
        (OPENAI, True, 422, "enhance requires the name of a language model"),
        (OLLAMA, True, 422, "enhance requires the name of a language model"),
        (OPENAI, "tiny", 422, "enhance: model tiny:latest generates pictures"),
        (OPENAI, "none", 404, "enhance: model none:latest not found"),
        (OPENAI, "a b", 404, "enhance"),
        (OPENAI, "true", 422, "enhance requires the name of a language model"),  # as in a form
        (OPENAI, 7, 400, "enhance must be true, false, or the name of a language model"),
        (OLLAMA, "", 400, "enhance must be true, false, or the name of a language model"),
    ],
)
def test_requests_without_a_language_model_are_refused(
    worker: LocalWorker, path: str, field: Any, status: int, message: str
) -> None:
    found, answer = ask(worker, path, prompt="2 blue boxes", enhance=field)
    error = answer["error"]
    assert found == status
    assert message in (error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", [OPENAI, OLLAMA])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enhance": "enhancer", "enhance_instruction": " "}, "enhance_instruction"),
        ({"enhance": "enhancer", "enhance_instruction": 7}, "enhance_instruction"),
        ({"enhance": "enhancer", "enhance_instruction": "x" * 65_537}, "65536 characters"),
        ({"enhance_instruction": "Be wild."}, "enhance_instruction requires enhance"),
        ({"original_prompt": "x" * 32_001}, "32000 characters"),
        ({"original_prompt": "\ud800"}, "original_prompt"),
        ({"original_prompt": "a", "enhance": True}, "original_prompt cannot be combined with"),
        ({"original_prompt": "a", "enhancer": ""}, "enhancer"),
        ({"original_prompt": "a", "enhancer": "x" * 1025}, "1024 characters"),
        ({"enhancer": "words"}, "enhancer requires original_prompt"),
    ],
)
def test_texts_of_an_enhancement_have_limits_and_belong_together(
    worker: LocalWorker, path: str, fields: dict[str, Any], message: str
) -> None:
    status, answer = ask(worker, path, prompt="2 blue boxes", **fields)
    assert status == 400 and message in str(answer["error"])


class Planned(NamedTuple):
    """A worker, as far as an enhancer uses it."""

    settings: Any
    resolve_reference: Any = Reference.parse


def test_the_instruction_is_that_of_the_request() -> None:
    service: Any = Planned(settings=None)
    for given, expected in (("Be wild.\n", "Be wild."), (None, INSTRUCTION)):
        fields = EnhanceFields(enhance="talk", enhance_instruction=given)
        enhancer = PromptEnhancer.of(service, fields, "a fox", 3, "never")
        assert enhancer is not None
        system, user = enhancer.request().messages
        assert (system["content"], user["content"]) == (expected, "a fox")


@pytest.mark.integration
def test_the_picture_states_both_prompts(worker: LocalWorker) -> None:
    wish = {"prompt": "2 blue boxes, black bg", "enhance": "enhancer"}
    status, answer = ask(worker, OPENAI, **wish, size="32x32")
    (entry,) = answer["data"]
    assert status == 200 and entry["revised_prompt"] == WRITTEN
    status, line = ask(worker, OLLAMA, **wish, stream=False)
    for data in (entry["b64_json"], line["image"]):
        facts = read_metadata(base64.b64decode(data))
        assert facts["prompt"] == WRITTEN and facts["original_prompt"] == wish["prompt"]
        assert facts["enhancer"].startswith("enhancer@sha256:")
    assert entry["b64_json"] == line["image"]
    known = {name: facts[name] for name in ("prompt", "original_prompt", "enhancer")}
    status, answer = ask(worker, OPENAI, **known, size="32x32")
    assert answer["data"] == [{"b64_json": line["image"]}]
    status, other = ask(worker, OLLAMA, **known, stream=False)
    assert other["image"] == line["image"]


@pytest.mark.integration
def test_each_picture_has_a_prompt_with_its_own_seed(worker: LocalWorker) -> None:
    wish: dict[str, Any] = {"prompt": "", "enhance": "enhancer", "size": "32x32"}
    status, answer = ask(worker, OPENAI, **wish, n=2)
    first, second = answer["data"]
    assert status == 200 and first["revised_prompt"] != second["revised_prompt"] != ""
    _, alone = ask(worker, OPENAI, **wish, seed=4)
    assert alone["data"] == [second]
    body = json.dumps(SMALL | wish | {"n": 2, "stream": True}).encode()
    _, _, stream = answer_to(urllib.request.Request(worker.url + OPENAI, body))
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    assert [(one["step"], one["total"]) for one in events[:-1]] == [(1, 2), (2, 2)]
    assert events[-1]["data"] == answer["data"]
