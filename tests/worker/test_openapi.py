"""The OpenAPI document: it matches the routes and their behaviour."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.http.route import Route

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.api.health import DESCRIPTION as FILE
from clowder_aimage.api.image_request import read_request
from clowder_aimage.api.picture.picture_source import take_pictures
from clowder_aimage.api.request_body import GenerationBody, check_fields, read_object
from clowder_aimage.api.service import make_service
from clowder_aimage.api.text.text_request import ChatRequest, CompletionRequest, EmbeddingsBody
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import OPEN
from clowder_aimage.layout import ImageLayout
from clowder_aimage.registry import ClientOptions
from tests.process import run

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker


DOCUMENT = json.loads(FILE.read_text("utf-8"))
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
EXAMPLES: dict[str, object] = {
    "prompt": "a",
    "size": "16x16",
    "model": "tiny",
    "user": "me",
    "negative_prompt": "b",
}
EXAMPLES |= {"image": "data:image/png;base64,aGk=", "mask": "alpha"}
EXAMPLES |= {"control": "oci://registry.example.com/edges:v1", "controlnet": "union"}
EXAMPLES |= {"expand": "0,0,16,0", "images": ["data:image/png;base64,aGk="]}
EXAMPLES |= {"enhance": "talk", "enhance_instruction": "Be wild."}
EXAMPLES |= {"original_prompt": None, "enhancer": None}  # not with enhance
EXAMPLES |= {"output": {"push": "registry.example.com/team/pictures:v1"}}
EXAMPLES |= {"width": 16, "height": 16, "loras": [{"model": "style", "strength": 0.5}]}


@pytest.fixture
def routes(tmp_path: Path) -> list[Route]:
    async def make() -> list[Route]:
        service = make_service(Settings(), ImageLayout(tmp_path), ClientOptions())
        return WorkerRole(service).routes()

    return asyncio.run(make())


def test_the_document_describes_exactly_the_routes(routes: list[Route]) -> None:
    table = {(route.method, re.sub(r":[^}]*\}", "}", route.path)): route for route in routes}
    assert set(OPERATIONS) == set(table)
    for key, route in table.items():
        assert OPERATIONS[key]["x-aimage-scope"] == route.scope, key
        assert bool(OPERATIONS[key]["security"]) == (route.scope != OPEN), key


def test_every_operation_documents_its_refusals() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(names) == len(set(names))
    for key, operation in OPERATIONS.items():
        answers = operation["responses"]
        assert "403" in answers and ("401" in answers) == (operation["x-aimage-scope"] != OPEN), key
        if "requestBody" in operation:
            assert {"400", "408", "413"} <= set(answers), key
        assert operation["summary"].endswith("."), key


def test_errors_reference_the_format_of_their_interface() -> None:
    for (_, path), operation in OPERATIONS.items():
        for code, answer in operation["responses"].items():
            if int(code) >= 400 and code != "503":
                name = answer["$ref"].rpartition("/")[2]
                assert name.startswith("Ollama") == path.startswith("/api/"), (path, code)


def references(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_components_are_defined_and_used() -> None:
    used = set(references(DOCUMENT))
    there = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses")
        for name in DOCUMENT["components"][kind]
    }
    assert used == there


def example(name: Any, schema: Any) -> Any:
    """Return a value that the schema allows."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if "enum" in schema:
        return schema["enum"][-2]
    kinds = schema["type"]
    if "boolean" in kinds:
        return False
    return schema["maximum"]


def test_every_documented_request_field_is_accepted() -> None:
    properties = DOCUMENT["components"]["schemas"]["ImageRequest"]["properties"]
    body = {name: example(name, schema) for name, schema in properties.items()}
    body |= {"num_inference_steps": body["steps"], "seed": 0, "pull": "never"}
    for name in ("images", "image"):
        other = {key: value for key, value in body.items() if key != name}
        assert len(take_pictures(other)) == 3
    assert not other.keys() & {"image", "images", "mask", "control"}
    body = other
    read = read_request(read_object(json.dumps(body | {"strict": True}).encode()))
    assert (read.steps, read.n, read.quality, read.ignored) == (1000, 10, "max", ())
    assert (
        read_request(
            read_object(json.dumps(dict.fromkeys(properties) | {"prompt": "a"}).encode())
        ).n
        == 1
    )


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, EmbeddingsBody])
def test_the_fields_of_texts_are_documented(kind: type[GenerationBody]) -> None:
    """``function_call``, which is refused, is not; what has no effect has one example, ``user``."""
    name = kind.__name__.replace("Body", "Request")
    properties = DOCUMENT["components"]["schemas"][name]["properties"]
    assert set(properties) == {*kind.model_fields, "user"} - {"function_call"}
    for field, schema in properties.items():  # the bounds are those of the document
        for bound, step in ("minimum", -1), ("maximum", 1):
            if bound in schema and field not in ("best_of", "top_logprobs"):
                body = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
                assert getattr(check_fields(body | {field: schema[bound]}, kind), field) is not None
                with pytest.raises(ApiError):
                    check_fields(body | {field: schema[bound] + step}, kind)


def test_the_committed_document_is_served(worker: LocalWorker) -> None:
    assert worker.get("/openapi.json") == DOCUMENT


# -- schemathesis

# Keep requests cheap and, of the 500 that cover each large body, the first FIRST and one of EVERY.
# In every other one remove fields that are often refused.
HOOKS = """
import collections
import os
import zlib

import schemathesis

seen = collections.Counter()


@schemathesis.hook
def filter_case(context, case):
    if case.meta.phase.name != "coverage":
        return True
    seen[case.operation.label] += 1
    if seen[case.operation.label] <= int(os.environ["FIRST"]):
        return True
    return zlib.crc32(repr(case.body).encode()) % int(os.environ["EVERY"]) == 0


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if not isinstance(body, dict):
        return
    body.pop("output", None)  # no registry is there
    for name in ("n", "steps", "num_inference_steps"):
        if type(body.get(name)) is int:
            body[name] = min(body[name], 1)
    sides = [body.get(name) for name in ("width", "height")]
    if any(type(side) is int and side > 64 for side in sides):  # too large a picture, and told so
        body |= {"width": 4096, "height": 2016}
    for name in ("width", "height"):
        if type(body.get(name)) is int:
            body[name] = body[name] if body[name] > 64 else min(body[name], 16)
    if body.get("size") == "32x32":  # the example of the description
        body["size"] = "16x16"
    if type(body.get("prompt")) is str and len(body["prompt"]) % 2:
        body["size"] = "16x16"
        for name in ("negative_prompt", "guidance_scale", "num_inference_steps", "model", "width"):
            body.pop(name, None)
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method"
)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("first", "every", "examples", "pictures"),
    [(10, 40, 1, 5), pytest.param(40, 4, 3, 20, marks=pytest.mark.slow)],
)
def test_schemathesis_finds_no_server_error(
    worker: LocalWorker, tmp_path: Path, first: int, every: int, examples: int, pictures: int
) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    stores = f"{tmp_path / 'store'}:{worker.store}"  # the model is in the read-only second store
    said = ("--default-model", "tiny", "--token-file", tokens(tmp_path))
    other = worker.launch(*said, AIMAGE_STORE=stores)
    (tmp_path / "hooks.py").write_text(HOOKS)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{other.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--checks", CHECKS, "--no-color"]
    command += ["--max-examples", str(examples), "--phases", "examples,coverage,fuzzing"]
    command += ["--exclude-path", "/v1/events"]  # an endless stream
    command += ["--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--request-timeout", "100"]  # loading the model takes longer on a busy machine
    settings = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
    settings |= {"FIRST": str(first), "EVERY": str(every)}
    done = run(
        command,
        cwd=tmp_path,
        env=os.environ | settings,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert tried and tried[1] == tried[2] and int(tried[1]) > 100, done.stdout[-4000:]
    log = "".join(other.lines)
    assert " internal error " not in log
    assert len(re.findall("route=/v1/images/generations .* status=200", log)) > pictures
    assert other.get("/healthz") == {"status": "ok"}
    asked = urllib.request.Request(f"{other.url}/metrics", headers={"Authorization": BEARER})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert b'"died"' not in answer.read()  # no model process has died


TOKEN = "t" * 20
BEARER = f"Bearer {TOKEN}"


def tokens(directory: Path) -> Path:
    (directory / "tokens").write_text(f"admin {TOKEN}\n")
    return directory / "tokens"
