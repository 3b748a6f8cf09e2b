"""Requests for embeddings in OpenAI's API, and their replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import FormatError
from clowder_aimage.model.text.language_model import Embeddings

if TYPE_CHECKING:
    from clowder_aimage.model.text.language_model import EmbeddingRequest


def build_embedding_fields(request: EmbeddingRequest) -> dict[str, Any]:
    """Return the fields of a request for embeddings, without the model."""
    fields: dict[str, Any] = {"input": [*request.texts]}
    return fields if request.prompt is None else {**fields, "prompt_name": request.prompt}


def parse_embeddings(answer: Any, count: int) -> Embeddings:
    """Return ``count`` embeddings of a reply. Raises FormatError."""
    data = answer.get("data") if isinstance(answer, dict) else None
    objects = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    vectors = tuple(_parse_vector(item.get("embedding")) for item in objects)
    if len(vectors) != count or len({len(vector) for vector in vectors}) != 1:
        raise FormatError(f"invalid response from the worker: expected {count} embeddings")
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else 0
    return Embeddings(vectors, tokens if type(tokens) is int and tokens >= 0 else 0)


def _parse_vector(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
        raise FormatError("invalid response from the worker: an embedding is not numbers")
    return tuple(map(float, value))
