"""Unknown fields of requests: each is listed in the response or refused, wherever it is."""

from __future__ import annotations

import copy
import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.api.ollama.text_body import OllamaPromptBody
from clowder_aimage.api.openapi import build_document
from clowder_aimage.api.request_body import check_fields
from tests.api_listing import worker_routes
from tests.worker.conftest import LocalWorker, answer_to

DOCUMENT = build_document(worker_routes(), title="", has_tokens=False)
URL = "data:image/png;base64,iVBORw0KGgo="
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
# No registry is there
REMOTE = "127.0.0.1:1/team/absent:v1"
LINK = {"image_url": URL}
PICTURE: dict[str, Any] = {"prompt": "a", "image": LINK, "mask": LINK, "control": LINK}
PICTURE |= {"model": "absent", "loras": [{"model": "b"}], "output": {"push": REMOTE}}
CHAT: dict[str, Any] = {
    "model": "absent",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **CALL}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ],
    "tools": [TOOL],
    "stream_options": {},
    "response_format": {"type": "text", "json_schema": {}},
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "chat_template_kwargs": {},
}
OLLAMA_CHAT: dict[str, Any] = {
    "model": "absent",
    "options": {},
    "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}],
    "tools": [TOOL],
}
# A body of each operation, with all of the objects that its fields may be
BODIES: dict[str, dict[str, Any]] = {
    "generate": PICTURE,
    "edit": PICTURE,
    "vary": {key: value for key, value in PICTURE.items() if key != "prompt"},
    "chat": CHAT,
    "complete": {"model": "absent", "prompt": "a", "stream_options": {}},
    "embed": {"model": "absent", "input": "a"},
    "createBatch": {
        "input_file_id": "file-1",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "ollamaGenerate": {"model": "absent", "prompt": "a", "options": {}, "loras": [{"model": "b"}]},
    "ollamaChat": OLLAMA_CHAT,
    "ollamaEmbed": {"model": "absent", "input": "a"},
    "ollamaEmbeddings": {"model": "absent", "prompt": "a"},
    "show": {"model": "absent"},
    "copy": {"source": "absent", "destination": "b"},
    "delete": {"model": "absent"},
    "pull": {"model": REMOTE},
    "push": {"model": REMOTE},
    "addContent": {"url": f"oci://{REMOTE}"},
    "addJob": {
        "kind": "fuse",
        "model": "absent",
        "target": "b",
        "loras": [{"model": "b", "strength": 1}],
    },
}
Place = tuple[str, ...]


def with_bodies() -> dict[str, tuple[str, str, Any]]:
    """Return method, path and schema of each operation with a body in JSON."""
    return {
        operation["operationId"]: (
            method.upper(),
            path,
            operation["requestBody"]["content"]["application/json"]["schema"],
        )
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }


def declared(schema: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the places of the objects that a schema declares; "[]" stands for items."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from declared(DOCUMENT["components"]["schemas"][name], place)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from declared(part, place)
    if "items" in schema:
        yield from declared(schema["items"], (*place, "[]"))
    if schema.get("type") in ("object", ["object", "null"]) and "properties" in schema:
        yield place
        for name, part in schema["properties"].items():
            yield from declared(part, (*place, name))


def objects(value: Any, place: Place = (), path: str = "") -> Iterator[tuple[Place, str, Any]]:
    """Yield the place, the path and the value of each object in a body."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from objects(item, (*place, "[]"), f"{path}[{index}]")
    if isinstance(value, dict):
        yield place, path, value
        for name, item in value.items():
            yield from objects(item, (*place, name), f"{path}.{name}".removeprefix("."))


def walks() -> Iterator[tuple[str, Place]]:
    for name, (_, _, schema) in with_bodies().items():
        for place in dict.fromkeys(declared(schema)):
            yield name, place


@pytest.mark.parametrize(("name", "place"), [*walks()], ids=str)
def test_an_unknown_field_is_listed_or_refused(
    worker: LocalWorker, name: str, place: Place
) -> None:
    method, url, _ = with_bodies()[name]
    body = copy.deepcopy(BODIES[name])
    # A list of pictures takes the place of one
    if place[-1:] == ("[]",) and place[0] in ("image", "images"):
        del body["image"]
        body[place[0]] = [dict(LINK)]
    found = [(path, value) for each, path, value in objects(body) if each == place]
    path, target = found[0]
    target["x-new"] = 1
    path = f"{path}.x-new".removeprefix(".")
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(
        worker.url + url, json.dumps(body).encode(), headers, method=method
    )
    status, response, raw = answer_to(asked)
    listed = unquote(response.get("X-Aimage-Ignored", "")).split(", ")
    assert status != 422 and (path in listed or (status == 400 and "x-new" in raw.decode())), raw


def test_an_unknown_field_of_a_prompt_for_a_text_is_listed() -> None:
    body = check_fields({"prompt": "a", "options": {"num_ctx": 4}, "context": []}, OllamaPromptBody)
    assert [*body.iter_ignored()] == ["context", "options.num_ctx"]


def test_names_in_the_header_are_quoted_and_bounded(worker: LocalWorker) -> None:
    body = {"model": "absent", "ä, b\n": 1, **{f"{number:03}" * 50: 1 for number in range(30)}}
    asked = urllib.request.Request(
        f"{worker.url}/api/show", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    (listed,) = answer_to(asked)[1].get_all("X-Aimage-Ignored")
    assert len(listed.split(", ")) == 20 and len(listed) < 4000 and listed.isprintable()
