"""Requests for answers in OpenAI's API, and the events of their replies."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import FormatError
from clowder_aimage.model.text.language_model import STOP, TextDelta, TextEnd

if TYPE_CHECKING:
    from clowder_aimage.model.text.language_model import TextRequest

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_KINDS = {"content": "content", "reasoning_content": "thinking"}


def build_completion_fields(request: TextRequest) -> dict[str, Any]:
    """Return the fields of a request for an answer, without the model."""
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING}
    fields = {
        "messages": [*request.messages],
        **sampling,
        "max_completion_tokens": request.max_tokens,
        "stop": [*request.stop] or None,
        "response_format": _build_response_format(request.schema),
    }
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in fields.items() if value is not None}


def _build_response_format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def iter_pieces(value: Mapping[str, Any]) -> Generator[TextDelta, None, None]:
    """Yield the pieces of an answer in an event. Raises FormatError."""
    for choice in _parse_list(value.get("choices")):
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise FormatError("invalid response from the worker: expected a piece of an answer")
        for name, kind in _KINDS.items():
            text = delta.get(name)
            if isinstance(text, str) and text:
                yield TextDelta(text, kind)


def parse_end(end: TextEnd, value: Mapping[str, Any]) -> TextEnd:
    """Return the end with the reason, the counts and the times of an event."""
    reasons = [choice.get("finish_reason") for choice in _parse_list(value.get("choices"))]
    reason = next((str(stated) for stated in reasons if stated), end.reason)
    # Only the last event has the counts.
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return TextEnd(reason, end.prompt_tokens, end.tokens, end.cached_tokens)
    details = usage.get("prompt_tokens_details")
    cached = _parse_count(details, "cached_tokens") if isinstance(details, dict) else 0
    counts = _parse_count(usage, "prompt_tokens"), _parse_count(usage, "completion_tokens")
    # Another server may not state them.
    times = timings if isinstance(timings := value.get("timings"), dict) else {}
    seconds = (_parse_seconds(times, name) for name in ("prompt_ms", "predicted_ms"))
    return TextEnd(reason or STOP, *counts, cached, *seconds)


def _parse_seconds(times: Mapping[str, Any], name: str) -> float:
    """Return milliseconds in seconds."""
    value = times.get(name)
    return value / 1000 if isinstance(value, int | float) and value > 0 else 0.0


def _parse_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parse_count(value: Mapping[str, Any], name: str) -> int:
    count = value.get(name)
    return count if type(count) is int and count >= 0 else 0
