"""Every field that the SDKs of OpenAI and ollama know: it is read, refused by name, or listed."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("openai", reason="OpenAI's SDK is not installed")
pytest.importorskip("ollama", reason="ollama's SDK is not installed")

import ollama._types as ollama_types
from openai import types as openai_types
from openai.types import chat as chat_types
from typing_extensions import get_type_hints, is_typeddict

from clowder_aimage.api.batch.operation import BatchBody
from clowder_aimage.api.ollama.operation import CopyBody
from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaEmbedBody, OllamaPromptBody
from clowder_aimage.api.picture.request import EditRequest, ImageRequest, VariationRequest
from clowder_aimage.api.picture.source import NAMES
from clowder_aimage.api.request_body import (
    ModelBody,
    NamedBody,
    RequestBody,
    TransferBody,
    check_fields,
)
from clowder_aimage.api.text.request import ChatRequest, CompletionRequest, EmbeddingsBody
from clowder_aimage.http.api_error import ApiError

USER = {"role": "user", "content": "a"}
REMOTE = {"model": "registry.example.com/team/tiny"}
BATCH = {"input_file_id": "a", "endpoint": "/v1/embeddings", "completion_window": "24h"}
TOOL = {"type": "function", "function": {"name": "look"}}
# A type of an SDK, the body that reads it, and the fields that this needs
REQUESTS: list[tuple[Any, type[RequestBody], dict[str, Any]]] = [
    (
        chat_types.completion_create_params.CompletionCreateParamsBase,
        ChatRequest,
        {"messages": [USER], "tools": [TOOL]},
    ),
    (
        openai_types.completion_create_params.CompletionCreateParamsBase,
        CompletionRequest,
        {"prompt": "a"},
    ),
    (openai_types.EmbeddingCreateParams, EmbeddingsBody, {"input": "a"}),
    (
        openai_types.image_generate_params.ImageGenerateParamsBase,
        ImageRequest,
        {"prompt": "a"},
    ),
    (openai_types.image_edit_params.ImageEditParamsBase, EditRequest, {"prompt": "a"}),
    (openai_types.ImageCreateVariationParams, VariationRequest, {}),
    (openai_types.BatchCreateParams, BatchBody, BATCH),
    (ollama_types.ChatRequest, OllamaChatBody, {"messages": [USER]}),
    (ollama_types.GenerateRequest, OllamaPromptBody, {"prompt": "a"}),
    (ollama_types.EmbedRequest, OllamaEmbedBody, {"input": "a"}),
    (ollama_types.EmbeddingsRequest, OllamaEmbedBody, {"prompt": "a"}),
    (ollama_types.ShowRequest, ModelBody, {}),
    (ollama_types.DeleteRequest, NamedBody, {"model": "a"}),
    (ollama_types.CopyRequest, CopyBody, {"source": "a", "destination": "b"}),
    (ollama_types.PullRequest, TransferBody, REMOTE),
    (ollama_types.PushRequest, TransferBody, REMOTE),
]
_SAMPLES: dict[Any, list[Any]] = {
    str: ["look"],
    int: [1],
    float: [0.5],
    bool: [True, False],
    bytes: ["look"],
    pydantic.ByteSize: [1],
}
# Texts that only some values make valid
_TEXTS = {"role": "user", "type": "function"}
_LISTS = (list, tuple, set, Iterable, Sequence)


def hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a TypedDict or a model, by their names in JSON."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return get_type_hints(kind)


def samples(kind: Any, depth: int = 5) -> list[Any]:
    """Return values of each alternative of a type, with all of their fields."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SAMPLES:
        return _SAMPLES[kind]
    if origin is typing.Literal:
        return list(args)
    if origin in (typing.Union, types.UnionType):
        return [each for part in args if part is not type(None) for each in samples(part, depth)]
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return samples(args[0], depth)
    if origin in _LISTS:
        return [[each] for each in samples(args[0], depth - 1)] if depth else []
    if origin in (dict, Mapping) or kind in (dict, object, Any):
        return [{}]
    if isinstance(kind, type) and (is_typeddict(kind) or issubclass(kind, pydantic.BaseModel)):
        return list(objects(kind, depth)) if depth else []
    return []


def objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield objects in which each field has each of its values once, and all are stated."""
    values = {name: samples(hint, depth - 1) for name, hint in hints(kind).items()}
    values |= {name: [_TEXTS[name]] for name in _TEXTS if values.get(name) == _SAMPLES[str]}
    stated = {name: listed for name, listed in values.items() if listed}
    for index in range(max(map(len, stated.values()), default=1)):
        yield {name: listed[min(index, len(listed) - 1)] for name, listed in stated.items()}


def unaccounted(body: Any, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that a body has neither read nor kept as ignored."""
    if isinstance(value, list) and isinstance(body, list):
        for index, (nested, item) in enumerate(zip(body, value, strict=True)):
            yield from unaccounted(nested, item, f"{path}[{index}]")
    if not isinstance(body, RequestBody) or not isinstance(value, dict):
        return
    kind = type(body)
    names = {field.alias or name: name for name, field in kind.model_fields.items()}
    ignored = [*body.iter_ignored()]
    for key, item in value.items():
        if key in names:
            yield from unaccounted(getattr(body, names[key]), item, f"{path}.{key}")
        elif item is not None and key not in (*kind.NO_EFFECT, *ignored):
            yield f"{path}.{key}".removeprefix(".")


def fields() -> Iterator[tuple[Any, type[RequestBody], dict[str, Any], str, Any]]:
    for kind, body, required in REQUESTS:
        for name, hint in hints(kind).items():
            # Pictures are taken from a body before it is checked
            if not (issubclass(body, ImageRequest) and name in NAMES):
                for value in samples(hint):
                    yield kind, body, required, name, value


def test_the_sdks_know_many_fields() -> None:
    tried = {(kind.__name__, name) for kind, _, _, name, _ in fields()}
    assert len(tried) > 120
    assert {("ChatRequest", "options"), ("ImageGenerateParamsBase", "size")} <= tried


def test_every_field_of_the_sdks_is_read_refused_or_listed() -> None:
    accepted = dict[tuple[str, str], int]()
    for kind, body_type, required, name, value in fields():
        try:
            body = check_fields(required | {name: value}, body_type)
        except ApiError as error:
            assert error.status == 400 and error.param, (kind, name, value)
            assert error.param.startswith(name) or name in ("options", "stream"), (name, error)
            continue
        missed = [*unaccounted(body, required | {name: value})]
        assert not missed, (kind, name, value)
        accepted[kind.__name__, name] = accepted.get((kind.__name__, name), 0) + 1
    assert len(accepted) > 90


def test_a_field_that_is_lost_would_be_noticed() -> None:
    class Lossy(RequestBody):
        NO_EFFECT = frozenset[str]()

    body = check_fields({"a": 1}, Lossy)
    body._unknown = ()
    assert [*unaccounted(body, {"a": 1})] == ["a"]
