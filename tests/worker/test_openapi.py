"""The OpenAPI document: made of the routes, true of the server that gives it."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from pydantic import BaseModel, ValidationError

from clowder_aimage.api.openapi import build_document
from clowder_aimage.api.request_body import RequestBody
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import Route
from tests.api_listing import COMMAND, LISTING, gateway_routes, listing, worker_routes
from tests.process import run

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker

WORKER = worker_routes()
DOCUMENT = build_document(WORKER, title="aimage worker", has_tokens=False)


def test_a_change_of_the_api_shows_in_the_listing() -> None:
    is_current = LISTING.read_text("utf-8") == listing()
    assert is_current, f"the API has changed: write {LISTING.name} again by {COMMAND}"


@pytest.mark.parametrize("routes", [WORKER, gateway_routes()], ids=["worker", "gateway"])
def test_every_component_is_defined_and_used(routes: list[Route]) -> None:
    found = build_document(routes, title="", has_tokens=True)
    names = [operation["operationId"] for operation in operations(found)]
    assert len(names) == len(set(names))
    there = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses")
        for name in found["components"][kind]
    }
    assert set(references(found)) == there


def operations(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for methods in found["paths"].values() for one in methods.values()]


def references(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_a_worker_describes_all_of_its_routes() -> None:
    assert not [route.path for route in WORKER if route.operation is None]


def test_a_gateway_describes_what_it_answers() -> None:
    """A request for what only workers have is refused (501)."""
    routes = gateway_routes()
    refused = {"/v1/store", "/v1/events", "/v1/jobs", "/v1/jobs/{id}"}
    assert {route.path for route in routes if route.operation is None} == refused
    found = build_document(routes, title="", has_tokens=True)
    assert not refused & found["paths"].keys() and "/v1/fleet" in found["paths"]
    posted = found["paths"]["/v1/images/generations"]["post"]
    assert {one["name"] for one in posted["parameters"]} == {
        *("strict", "Aimage-Priority", "Idempotency-Key")
    }


def test_a_node_without_models_describes_no_pictures() -> None:
    found = build_document(worker_routes(makes_pictures=False), title="", has_tokens=True)
    assert not [path for path in found["paths"] if path.startswith("/v1/images")]
    assert "/api/pull" in found["paths"] and "ImageFields" not in found["components"]["schemas"]


def test_a_server_without_tokens_demands_none() -> None:
    assert "securitySchemes" not in DOCUMENT["components"]
    for operation in operations(DOCUMENT):
        assert "security" not in operation and "401" not in operation["responses"]
    for operation in operations(build_document(WORKER, title="", has_tokens=True)):
        is_open = operation["x-aimage-scope"] == "open"
        assert bool(operation["security"]) == ("401" in operation["responses"]) == (not is_open)


def test_every_refusal_has_the_form_of_its_interface() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            names = [one["$ref"] for one in operation["responses"].values() if "$ref" in one]
            assert {"/Ollama" in name for name in names} == {path.startswith("/api/")}, path


def test_the_document_is_served(worker: LocalWorker) -> None:
    assert worker.get("/openapi.json") == DOCUMENT


# -- bodies


def bodies(kind: type[BaseModel] = RequestBody) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from bodies(one)


FIELDS = [
    (kind, name, schema)
    for kind in {one.__name__: one for one in bodies()}.values()
    for name, schema in DOCUMENT["components"]["schemas"]
    .get(kind.__name__, {})
    .get("properties", {})
    .items()
]


def refused(kind: type[BaseModel], name: str, value: object) -> bool:
    """Return whether a field of a body is refused, whatever other fields it lacks."""
    try:
        kind.model_validate({name: value})
    except ValidationError as error:
        return any(each["loc"][0] == name for each in error.errors())
    except ApiError as error:
        return error.param == name and error.code != "missing_required_parameter"
    return False


def test_every_integer_may_be_written_with_a_point() -> None:
    """JSON Schema has one number 1, which is also written 1.0."""
    tried = 0
    for kind, name, schema in FIELDS:
        if "integer" in schema.get("type", ()):
            value = schema.get("enum", [schema.get("minimum", 0)])[0]
            assert not refused(kind, name, float(value)), (kind, name)
            assert refused(kind, name, 0.5) and refused(kind, name, "1"), (kind, name)
            tried += 1
    assert tried > 30


def test_null_is_an_absent_field() -> None:
    for kind, name, _ in FIELDS:
        required = DOCUMENT["components"]["schemas"][kind.__name__].get("required", ())
        if name not in required:
            assert not refused(kind, name, None), (kind, name)


# -- parameters


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/batches?limit=0", "limit must be at least 1"),
        ("/v1/batches?limit=many", "limit must be a valid integer, unable to parse string as an"),
        ("/v1/batches?limit=1&limit=2", "limit must be there once only"),
        ("/v1/files?order=up", "order must be 'asc' or 'desc'"),
        ("/v1/files?purpose=vision", "purpose must be 'batch' or 'batch_output'"),
        ("/v1/referrers?model=tiny&registry=1", "registry must be 'true' or 'false'"),
        ("/v1/referrers", "missing required field: model"),
    ],
)
def test_a_parameter_has_one_of_its_values(worker: LocalWorker, path: str, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        worker.get(path)
    assert caught.value.code == 400
    assert message in caught.value.read().decode()


@pytest.mark.parametrize("text", ["", "2", "yes", "True"])
@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/embeddings", "/v1/batches"])
def test_strict_is_true_or_false(worker: LocalWorker, path: str, text: str) -> None:
    body = {
        "prompt": "a",
        "input": "a",
        "model": "tiny",
        "input_file_id": "file-1",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    asked = urllib.request.Request(
        f"{worker.url}{path}?strict={text}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == 400
    assert "strict must be '1', 'true', '0' or 'false'" in caught.value.read().decode()


# -- schemathesis

# Keep requests cheap and, of the 500 that cover each large body, the first FIRST valid and FIRST
# invalid ones, and one of EVERY. In every other one of pictures remove fields. Valid requests get
# what JSON Schema cannot state:
# - data URLs that are pictures, and as many as the model takes;
# - credentials that are base64 of "user:password";
# - no names in a body that the query forbids with "strict", and none in its objects that the body
#   forbids;
# - pictures, and numbers of texts, within the limits of products;
# - parameters of masks only with a mask, though one may be in an image;
# - one of two fields for the same value, which must be equal;
# - for the one path whose body depends on the kind of the model, that of the kind that is there.
# Registries are at a closed port of this machine. The fuzzer cannot make bodies by more than some
# rules between their fields (the others can): bodies that it makes without them, and that break
# them, are replaced.
HOOKS = """
import base64
import collections
import copy
import io
import os
import re
import zlib

import jsonschema
import schemathesis
from PIL import Image

seen = collections.Counter()
file = io.BytesIO()
Image.new("RGBA", (64, 64), (255, 255, 255, 128)).save(file, "PNG")
BASE64 = base64.b64encode(file.getvalue()).decode()
URL = f"data:image/png;base64,{BASE64}"
REGISTRY = "127.0.0.1:1/"
PLAIN = {"prompt": "a", "size": "16x16"}
BODIES = {
    "/v1/images/generations": ("ImageFields", PLAIN),
    "/v1/images/edits": ("EditFields", PLAIN | {"image": URL}),
    "/v1/images/variations": ("VariationFields", {"image": URL}),
    "/api/generate": ("OllamaPictureFields", {"model": "tiny", "prompt": "a", "width": 16}),
}
whole = {}


@schemathesis.hook
def before_load_schema(context, raw_schema):
    whole.update(copy.deepcopy(raw_schema["components"]))
    if os.environ["PHASES"] == "fuzzing":
        for name, _ in BODIES.values():
            del raw_schema["components"]["schemas"][name]["allOf"]


def is_picture(value):
    values = value if isinstance(value, list) else [value]
    datas = [getattr(each, "data", each) for each in values]
    return bool(datas) and all(isinstance(one, bytes) and one[1:4] == b"PNG" for one in datas)


def is_valid(body, name):
    fields = {"$ref": f"#/components/schemas/{name}", "components": whole}
    return jsonschema.Draft202012Validator(fields).is_valid(body)


@schemathesis.hook
def filter_case(context, case):
    is_form = case.media_type == "multipart/form-data" and case.operation.path in BODIES
    if is_form and not case.meta.generation.mode.is_negative:
        files = [case.body[name] for name in ("image", "control") if name in case.body]
        if "mask" in case.body or not all(map(is_picture, files)):  # a mask needs white parts
            return False
    if case.meta.phase.name != "coverage":
        return True
    kind = (case.operation.label, case.meta.generation.mode.is_negative)
    seen[kind] += 1
    if seen[kind] <= int(os.environ["FIRST"]):
        return True
    return zlib.crc32(repr(case.body).encode()) % int(os.environ["EVERY"]) == 0


@schemathesis.hook
def before_call(context, case, kwargs):
    body, path = case.body, case.operation.path
    if case.meta.generation.mode.is_negative:
        return
    if case.query:
        case.query.update(dict.fromkeys({"strict"} & {*case.query}, "0"))
        case.query.update(dict.fromkeys({"registry"} & {*case.query}, "false"))
    if not isinstance(body, dict):
        return
    if case.media_type == "multipart/form-data":  # whose files are pictures, see filter_case
        for name in ("mask", *MASKED):  # a mask needs white parts; a copy would be judged again
            body.pop(name, None)
        return
    case.body = body = dict(body)  # other cases have parts of it
    if body.get("strict"):
        body["strict"] = False
    if path in BODIES and not is_valid(body, BODIES[path][0]):
        body.clear()
        body |= BODIES[path][1]
    body.pop("output", None)  # no registry is there
    for name in ("n", "steps", "num_inference_steps"):
        if type(body.get(name)) in (int, float):
            body[name] = min(body[name], 1)
    if path in ("/api/pull", "/api/push"):
        for name in ("model", "name"):
            if body.get(name):
                body[name] = REGISTRY + body[name].split("/", 1)[1]
    if path == "/content/":
        name = re.sub("^[a-zA-Z]+:///*([^/]*[.:][^/]*/)?", "", body["url"])
        body["url"] = f"oci://{REGISTRY}{name}"
        if str(body.get("credentialsType")).lower() == "basic":
            body["credentials"] = base64.b64encode(b"user:password").decode()
    if path not in BODIES:
        return
    given = BASE64 if path == "/api/generate" else URL
    for name in ("image", "images", "mask", "control"):
        if body.get(name) not in (None, "", [], "alpha"):
            body[name] = [given] if isinstance(body[name], list) else given
    for name in () if body.get("mask") else MASKED:
        body.pop(name, None)
    sides = [body.get(name) for name in ("width", "height")]
    if any(type(side) in (int, float) and side > 64 for side in sides):  # too large a picture
        body |= {"width": 4096, "height": 2016}
    for name in ("width", "height"):
        if type(body.get(name)) in (int, float):
            body[name] = body[name] if body[name] > 64 else min(body[name], 16)
    if body.get("size") not in (None, "auto"):
        body["size"] = "16x16"
        for name in ("width", "height"):
            body.pop(name, None)
    for name, synonym in (("steps", "num_inference_steps"), ("guidance", "guidance_scale")):
        if body.get(name) is not None:
            body.pop(synonym, None)
    if type(body.get("prompt")) is str and zlib.crc32(repr(body).encode()) % 2:  # a picture
        for name in set(body) - (KEPT | PICTURES if "/edits" in path or "/var" in path else KEPT):
            del body[name]
        body |= PLAIN


MASKED = ("paste", "feather", "crop")
PICTURES = {"image", "images"}
KEPT = {"seed", "n", "steps", "quality", "response_format", "stream", "stream_format", "trigger"}
"""
# A model, or the state of the server, may not allow what is valid: 404, 409, 422. No registry is
# there: 502
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "502"]

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "422", "5xx"]
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,unsupported_method,negative_data_rejection,"
    "positive_data_acceptance"
)


def explore(url: str, place: Path, first: int, every: int, examples: int) -> None:
    """Send requests that are made of the document of a server, valid ones and others."""
    (place / "hooks.py").write_text(HOOKS)
    (place / "schemathesis.toml").write_text(CONFIG)
    for phases in ("examples,coverage", "fuzzing"):
        _explore(url, place, phases, {"FIRST": first, "EVERY": every}, examples)


def _explore(url: str, place: Path, phases: str, limits: dict[str, int], examples: int) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--checks", CHECKS, "--no-color"]
    command += ["--max-examples", str(examples), "--phases", phases]
    command += ["--exclude-path", "/v1/events"]  # an endless stream
    command += ["--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--request-timeout", "100"]  # loading the model takes longer on a busy machine
    settings = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(place)}
    settings |= {"PHASES": phases} | {name: str(limit) for name, limit in limits.items()}
    done = run(
        command,
        cwd=place,
        env=os.environ | settings,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert tried and tried[1] == tried[2] and int(tried[1]) > 40, done.stdout[-4000:]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("first", "every", "examples"),
    [(10, 40, 1), pytest.param(40, 4, 3, marks=pytest.mark.slow)],
)
def test_a_worker_is_as_its_document_says(
    worker: LocalWorker, tmp_path: Path, first: int, every: int, examples: int
) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    stores = f"{tmp_path / 'store'}:{worker.store}"  # the model is in the read-only second store
    said = ("--default-model", "tiny", "--token-file", tokens(tmp_path))
    other = worker.launch(*said, AIMAGE_STORE=stores)
    explore(other.url, tmp_path, first, every, examples)
    log = "".join(other.lines)
    assert " internal error " not in log
    assert len(re.findall("route=/v1/images/generations .* status=200", log)) > 3
    assert other.get("/healthz") == {"status": "ok"}
    asked = urllib.request.Request(f"{other.url}/metrics", headers={"Authorization": BEARER})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert b'"died"' not in answer.read()  # no model process has died


TOKEN = "t" * 20
BEARER = f"Bearer {TOKEN}"


def tokens(directory: Path) -> Path:
    (directory / "tokens").write_text(f"admin {TOKEN}\n")
    return directory / "tokens"
