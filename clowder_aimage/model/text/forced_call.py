"""Answers that must be calls of functions: their JSON Schema, and their text.

The prompt ends with the mark of a call, and a grammar allows only the JSON of calls after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.model.text.language_model import TextEvent, TextRequest, ToolCall
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.tool_call_format import WHOLE, CallFormat, Tools, list_complete_items

# Calls of an answer: without a bound a small model would not end them
MAX_CALLS = 8
# Keys that would change what references in a schema mean
_BASE = ("$schema", "$id")
_REFERENCE = "$ref"


class CallStream(TextStream):
    """The text of an answer that is calls from its beginning to its end."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(calls=WHOLE, tools=tools)
        self._state = "call"

    def _call(self, text: str, end: str) -> Iterator[TextEvent]:
        """Yield the calls that are complete: a limit may have cut the text."""
        items = list_complete_items(text, MAX_CALLS) if text.startswith("[") else []
        events = super()._call(f"[{', '.join(items)}]" if items else text, end)
        return (event for event in events if isinstance(event, ToolCall))


def open_call(form: CallFormat) -> str:
    """Return the text that begins a call in the form of a template."""
    if form.is_whole or not form.starts:
        return ""
    mark = form.starts[0]
    return f"{mark}\n" if mark.startswith("<") else mark


def build_call_schema(request: TextRequest, form: CallFormat) -> dict[str, Any]:
    """Return the JSON Schema of an answer that calls functions of ``request.must_call``."""
    functions = [tool["function"] for tool in request.tools]
    called = [function for function in functions if function["name"] in request.must_call]
    calls = [
        _build_call(function["name"], index, "parameters" if form.is_whole else "arguments")
        for index, function in enumerate(called)
    ]
    schema: dict[str, Any] = {"anyOf": calls}
    if not request.has_one_call:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_CALLS}
    arguments = [_place(function.get("parameters"), index) for index, function in enumerate(called)]
    return {**schema, "$defs": {str(index): value for index, value in enumerate(arguments)}}


def _build_call(name: str, index: int, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {_REFERENCE: f"#/$defs/{index}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _place(parameters: Mapping[str, Any] | None, index: int) -> dict[str, Any]:
    """Return the schema of arguments as one of the definitions of another schema.

    A function without parameters has no arguments (OpenAI, "Function calling").
    """
    stated = {name: value for name, value in (parameters or {}).items() if value is not None}
    stated = stated or {"additionalProperties": False}
    fields = {name: value for name, value in stated.items() if name not in _BASE}
    moved: dict[str, Any] = _move(fields, f"#/$defs/{index}")
    return {"type": "object", **moved}


def _move(value: Any, root: str) -> Any:
    """Return a schema whose references to its root refer to ``root``."""
    if isinstance(value, Mapping):
        return {
            key: root + item[1:]
            if key == _REFERENCE and isinstance(item, str) and item.startswith("#")
            else _move(item, root)
            for key, item in value.items()
        }
    return [_move(item, root) for item in value] if isinstance(value, list) else value
