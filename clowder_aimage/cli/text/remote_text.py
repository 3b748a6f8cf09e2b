"""Answers of a language model in a worker, by OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.remote_worker import check_model, warn_of
from clowder_aimage.errors import FormatError, NetworkError
from clowder_aimage.model.text.language_model import STOP, TextEnd, TextEvent, TextPiece

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.model.text.language_model import TextRequest
    from clowder_aimage.oci import Reference

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_KINDS = {"content": "content", "reasoning_content": "thinking"}


def answer_remotely(
    client: WorkerClient, reference: Reference, request: TextRequest
) -> Generator[TextEvent, None, None]:
    """Yield the pieces of an answer of a worker; closing the generator cancels it.

    Raises as ``WorkerClient``. NotFoundError: the worker has another model only. FormatError: the
    answer is not as in OpenAI's API.
    """
    end = TextEnd("", 0, 0)
    body = {"model": str(reference), **_fields(request)}
    with contextlib.closing(client.events("/v1/chat/completions", body)) as events:
        for kind, value in events:
            if kind == "open":
                check_model(client, reference, value)
                warn_of(value)
                continue
            yield from _pieces(value)
            end = _ended(end, value)
    if not end.reason:
        raise NetworkError(
            f"the worker at {client.endpoint} disconnected before the answer was complete"
        )
    yield end


def _fields(request: TextRequest) -> dict[str, Any]:
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING}
    found = {
        "messages": [*request.messages],
        **sampling,
        "max_completion_tokens": request.max_tokens,
        "stop": [*request.stop] or None,
        "response_format": _format(request.schema),
    }
    if request.thinking is not None:
        found["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    found |= {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in found.items() if value is not None}


def _format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _pieces(value: Mapping[str, Any]) -> Generator[TextPiece, None, None]:
    for choice in _list(value.get("choices")):
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise FormatError("invalid response from the worker: expected a piece of an answer")
        for name, kind in _KINDS.items():
            text = delta.get(name)
            if isinstance(text, str) and text:
                yield TextPiece(text, kind)


def _ended(end: TextEnd, value: Mapping[str, Any]) -> TextEnd:
    """Return the end with the reason, the counts and the times of an event."""
    reasons = [choice.get("finish_reason") for choice in _list(value.get("choices"))]
    reason = next((str(one) for one in reasons if one), end.reason)
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return TextEnd(reason, end.prompt_tokens, end.tokens, end.cached_tokens)
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    counts = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    times = value.get("timings")
    found = times if isinstance(times, dict) else {}  # another server may not state them
    seconds = (_seconds(found, name) for name in ("prompt_ms", "predicted_ms"))
    return TextEnd(reason or STOP, *counts, cached, *seconds)


def _seconds(times: Mapping[str, Any], name: str) -> float:
    """Return milliseconds in seconds."""
    value = times.get(name)
    return value / 1000 if isinstance(value, int | float) and value > 0 else 0.0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Mapping[str, Any], name: str) -> int:
    found = value.get(name)
    return found if type(found) is int and found >= 0 else 0
