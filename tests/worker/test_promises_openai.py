"""OpenAI's images API as typed by its SDK and as used by common clients.

The SDK does not validate responses. These tests validate them strictly against its types: every
required field is present with the right type, and there are no unknown fields.
"""

from __future__ import annotations

import base64
import json
import typing
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("openai")

import openai
from openai.types import (
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
    Model,
    image_generate_params,
)
from openai.types.image_model import ImageModel
from pydantic import BaseModel

from clowder_aimage.api.picture.request import read_request
from clowder_aimage.api.request_body import read_object
from clowder_aimage.http.api_error import ApiError
from tests.worker.conftest import LocalWorker, Worker, answer_to

GENERATIONS = "/v1/images/generations"
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a dog", "steps": 1, "size": "32x32"}
MORE = frozenset(
    {"output_tokens_details"}
)  # typed for whole responses only; events have it as well
# Accepted values among those that the SDK's types list; a later SDK may list more
TAKEN = {
    "background": {"opaque", "auto"},
    "model": {"gpt-image-1", "gpt-image-2", "dall-e-2", "dall-e-3"},
    "moderation": {"low", "auto"},
    "output_format": {"png", "webp", "jpeg"},
    "quality": {"low", "medium", "high", "auto", "standard", "hd"},
    "response_format": {"url", "b64_json"},
    "size": {"auto", "1024x1024", "1536x1024", "1024x1536", "256x256", "512x512", "1792x1024"},
}


@pytest.fixture
def client(worker: LocalWorker) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(
    worker: LocalWorker | Worker, path: str = GENERATIONS, **said: Any
) -> tuple[int, Any, bytes]:
    """Send a request; return the status, headers and body of the response."""
    headers = said.pop("headers", {})
    data = json.dumps(said).encode() if said else None
    asked = urllib.request.Request(worker.url + path, data, headers)
    return answer_to(asked)


def told(worker: LocalWorker, **said: Any) -> list[tuple[str, Any]]:
    """Return name and data of the events of a stream, without its comments."""
    status, headers, body = ask(worker, **SHORT | {"stream": True} | said)
    assert (status, headers.get_content_type()) == (200, "text/event-stream")
    found = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


MODEL_MORE = frozenset({"capabilities", "max_images", "defaults"})  # docs/api.md, "OpenAI"


def check(value: Any, model: type[BaseModel], more: frozenset[str] = MORE) -> None:
    """Validate ``value`` strictly as a ``model`` without unknown fields other than ``more``."""
    found = model.model_validate(value, strict=True)
    assert set(value) - more <= set(model.model_fields), (model, value.keys())
    for name in model.model_fields:
        part = getattr(found, name)
        for each, raw in zip(
            part if isinstance(part, list) else [part],
            value.get(name) if isinstance(part, list) else [value.get(name)],
            strict=True,
        ):
            if isinstance(each, BaseModel):
                check(raw, type(each), more)


# -- requests


def words(kind: Any) -> set[str]:
    """Return the literal strings of a type of the SDK."""
    if typing.get_origin(kind) is typing.Literal:
        return {word for word in typing.get_args(kind) if isinstance(word, str)}
    return set[str]().union(*map(words, typing.get_args(kind)))


def listed() -> dict[str, set[str]]:
    hints = typing.get_type_hints(image_generate_params.ImageGenerateParamsBase)
    return {name: found for name, kind in hints.items() if (found := words(kind))}


def test_every_literal_of_the_sdk_is_accepted_or_refused_by_field() -> None:
    said = listed()
    assert {"background", "model", "output_format", "quality", "size"} <= set(said)
    for name in {*said, *TAKEN}:
        for word in said.get(name, set()) | TAKEN.get(name, set()):
            try:
                wish = read_request(
                    read_object(json.dumps({"prompt": "a dog", name: word}).encode())
                )
            except ApiError as error:
                assert (error.status, error.param) == (400, name), word
                assert word not in TAKEN.get(name, ())
            else:
                assert [*wish.iter_ignored()] == ([] if name in TAKEN else [name]), word
    with pytest.raises(ApiError, match="background transparent is not supported") as caught:
        read_request({"prompt": "a dog", "background": "transparent"})
    assert caught.value.code == "unsupported_value"


def test_model_names_of_openai_mean_the_default_model(worker: LocalWorker) -> None:
    other = worker.start("--default-model", "tiny")
    names = {*words(ImageModel), "gpt-image-1", "gpt-image-1-mini", "dall-e-2", "dall-e-3"}
    assert len(names) > 8
    for name in sorted(names):
        status, headers, body = ask(other, **SHORT | {"model": name})
        assert (status, headers["X-Aimage-Model"]) == (200, "tiny:latest"), (name, body)


def test_a_request_of_open_webui_succeeds(worker: LocalWorker) -> None:
    """Open WebUI sends requests without a size, with "auto", or with additional parameters."""
    usual: dict[str, Any] = {
        "model": "tiny",
        "prompt": "a dog",
        "n": 1,
        "response_format": "b64_json",
    }
    for more in ({}, {"size": "auto"}, {"size": "32x32", "steps": 1}):
        status, headers, body = ask(worker, **usual | more)
        assert status == 200, body
        (item,) = json.loads(body)["data"]
        assert set(item) == {"b64_json"}
        assert base64.b64decode(item["b64_json"], validate=True).startswith(b"\x89PNG")
        assert headers["X-Aimage-Ignored"] is None


def test_a_request_of_librechat_succeeds(worker: LocalWorker) -> None:
    """LibreChat sends a fixed model name and fixed values."""
    other = worker.start("--alias", "gpt-image-1=tiny")
    body: dict[str, Any] = {
        "model": "gpt-image-1",
        "prompt": "a dog",
        "n": 1,
        "output_format": "webp",
    }
    body |= dict.fromkeys(("background", "quality", "size"), "auto")
    status, headers, answer = ask(other, **body)
    assert (status, headers["X-Aimage-Alias"]) == (200, "gpt-image-1"), answer
    assert base64.b64decode(json.loads(answer)["data"][0]["b64_json"])[8:12] == b"WEBP"
    assert headers["X-Aimage-Ignored"] is None


@pytest.mark.parametrize("accept", ["text/event-stream"])
def test_the_accept_header_has_no_effect(worker: LocalWorker, accept: str) -> None:
    """The SDK accepts application/json even for streams, so only the body decides."""
    headers = {"Accept": accept}
    assert told(worker, headers=headers)[-1][0] == "done"
    status, answered, body = ask(worker, **SHORT, headers=headers)
    assert (status, answered.get_content_type()) == (200, "application/json")
    check(json.loads(body), ImagesResponse)


@pytest.mark.parametrize("header", ["x-stainless-lang", "X-STAINLESS-LANG"])
def test_the_sdk_header_selects_openais_stream_format(worker: LocalWorker, header: str) -> None:
    (name, _) = told(worker, headers={header: "js"})[-1]
    assert name == "image_generation.completed"
    assert told(worker, headers={header: "js"}, stream_format="ollama")[-1][0] == "done"
    assert told(worker, headers={header: "js"}, partial_images=0)[-1][0] == name


def test_partial_images_sets_the_number_of_partial_events(worker: LocalWorker) -> None:
    assert [name for name, _ in told(worker, partial_images=0)] == ["image_generation.completed"]
    events = told(worker, partial_images=3, steps=8)
    partial = [data["partial_image_index"] for name, data in events if "partial" in name]
    assert partial == [0, 1, 2]


# -- responses


@pytest.mark.parametrize("more", [{}, {"n": 2, "quality": "hd"}, {"response_format": "url"}])
def test_responses_match_the_types_of_the_sdk(worker: LocalWorker, more: dict[str, Any]) -> None:
    _, _, body = ask(worker, **SHORT | more)
    check(json.loads(body), ImagesResponse)


@pytest.mark.parametrize("quality", ["auto", "hd"])
def test_events_match_the_types_of_the_sdk(worker: LocalWorker, quality: str) -> None:
    events = told(worker, partial_images=2, steps=4, quality=quality, output_format="jpeg")
    kinds: dict[str, type[BaseModel]] = {
        "image_generation.partial_image": ImageGenPartialImageEvent,
        "image_generation.completed": ImageGenCompletedEvent,
    }
    assert {name for name, _ in events} == set(kinds)
    for name, data in events:
        check(data, kinds[name])
        assert data["type"] == name
        assert data["created_at"] > 1_700_000_000
        assert base64.b64decode(data["b64_json"], validate=True)


def test_an_event_with_a_link_has_an_additional_url(worker: LocalWorker) -> None:
    (_, data) = told(worker, stream_format="openai", response_format="url")[-1]
    check(data, ImageGenCompletedEvent, frozenset({"url", *MORE}))


def test_models_match_the_types_of_the_sdk(worker: LocalWorker) -> None:
    answer = worker.get("/v1/models")
    assert (set(answer), answer["object"]) == ({"object", "data"}, "list")
    for each in answer["data"]:
        check(each, Model, MODEL_MORE)
    check(worker.get("/v1/models/tiny"), Model, MODEL_MORE)


def test_the_sdk_tolerates_progress_events(client: Any) -> None:
    """The SDK parses them into another class, but keeps their ``type``."""
    stream = client.images.generate(
        model="tiny",
        prompt="a dog",
        stream=True,
        extra_body={"steps": 2, "stream_format": "openai+progress"},
    )
    *events, completed = list(stream)
    first, steps = events[:-2], events[-2:]
    before = ("queued", "loading", "started")  # loading, if the model was not in memory
    assert {one.type for one in first} <= {f"image_generation.{name}" for name in before}
    assert first[0].type == "image_generation.queued"
    assert [one.type for one in steps] == ["image_generation.progress"] * 2
    assert [(one.step, one.total) for one in steps] == [(1, 2), (2, 2)]
    assert completed.type == "image_generation.completed"


# -- refusals


def test_unsupported_calls_raise_errors_of_the_sdk(client: Any) -> None:
    calls = [
        lambda: client.responses.create(model="tiny", input="a"),
        lambda: client.moderations.create(model="tiny", input="a"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.type) == ("unknown_url", "invalid_request_error")
    with pytest.raises(openai.APIStatusError) as refused:
        client.models.delete("tiny")
    assert refused.value.status_code == 405
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("dialect", ["openai", "openai+progress", "ollama"])
def test_refusals_before_the_first_event_have_an_error_status(
    worker: LocalWorker, dialect: str
) -> None:
    for more in ({"model": "absent"}, {"size": "7x7"}, {"n": 1025}):
        said = SHORT | {"stream": True, "stream_format": dialect} | more
        status, headers, body = ask(worker, **said)
        assert (status, headers.get_content_type()) == (
            404 if "model" in more else 400,
            "application/json",
        )
        assert json.loads(body)["error"]["param"] == next(iter(more))


# -- privacy of logs


@pytest.mark.integration
def test_prompts_and_users_are_not_logged_at_debug_level(worker: LocalWorker) -> None:
    """This includes failed requests and both interfaces."""
    other = worker.launch("--log-level", "debug")
    private = {name: f"xyzzy-{name}" for name in ("prompt", "negative_prompt", "user")}
    private["safety_identifier"] = "xyzzy-safety"
    for more in ({}, {"size": "16x16000"}, {"size": "1x1"}, {"model": "absent"}, {"stream": True}):
        ask(other, **SHORT | {"guidance": 2} | private | more)
    plain: list[dict[str, Any]] = [{}, {"width": 33}, {"width": 16, "height": 16000}]
    for more in (*plain, {"stream": False}):
        ask(other, "/api/generate", **{"model": "tiny", "steps": 1} | private | more)
    ask(other, f"{GENERATIONS}?prompt=xyzzy-query")
    code, lines = other.stop()
    assert code == 0
    assert "generations" in lines and "/api/generate" in lines
    assert "xyzzy" not in lines


@pytest.mark.integration
def test_secrets_are_not_logged_at_debug_level(worker: LocalWorker, tmp_path: Path) -> None:
    """Secrets are tokens, credentials and the signatures of links."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {'a' * 30}-sesame\ninfer {'i' * 30}-sesame\n")
    tokens.chmod(0o600)
    other = worker.launch("--token-file", tokens, "--log-level", "debug")

    def ask(path: str, body: Any = None, token: str = f"{'a' * 30}-sesame") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            asked = urllib.request.Request(other.url + path, data, headers)
            with urllib.request.urlopen(asked, timeout=100) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    assert ask("/v1/models", token="x" * 20 + "-sesame")[0] == 401
    said = {"model": "tiny", "prompt": "a dog", "steps": 1, "response_format": "url"}
    link = json.loads(ask("/v1/images/generations", said)[1])["data"][0]["url"]
    path = link.removeprefix(other.url)
    assert ask(path, token="")[0] == 200
    assert ask(path[:-1], token="")[0] == 404
    for kind, secret in ("Bearer", "open-sesame"), ("Basic", base64.b64encode(b"a:b").decode()):
        body = {"url": "oci://127.0.0.1:1/x", "credentials": secret, "credentialsType": kind}
        assert ask("/content/", body)[0] == 502
    assert ask("/content/", {"url": "oci://me:open-sesame@h.example/x"})[0] == 400
    code, lines = other.stop()
    assert code == 0 and "/content/" in lines and "/v1/files/pictures" in lines
    signature = path.rpartition("=")[2]
    assert len(signature) > 30
    for secret in ("sesame", signature[:-1], base64.b64encode(b"a:b").decode()):
        assert secret not in lines
