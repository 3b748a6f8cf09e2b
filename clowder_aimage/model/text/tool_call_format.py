"""Calls of functions in the text of a model.

The chat template shows the form that a model writes:

    Hermes, Qwen      <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Qwen3-Coder       <tool_call><function=name><parameter=key>value</parameter></function>
                      </tool_call>
    GLM               <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    Mistral           [TOOL_CALLS] [{"name": ..., "arguments": {...}}]
                      [TOOL_CALLS]name[ARGS]{...}
    Llama 3.1         {"name": ..., "parameters": {...}}, the whole answer, perhaps after
                      <|python_tag|>, several of them separated by ;
    Seed              <seed:tool_call>, then as Qwen3-Coder
    Command           <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>
    Nemotron          <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>
    gpt-oss           a message to the function, whose body is the arguments, see thought_format
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.model.text.language_model import ToolCall

# Characters of the calls of a text
MAX_CALL = 1 << 20
_NAME = re.compile(r"[\w.:/-]{1,256}")
_FUNCTION = re.compile(r"<function=([^<>\s]{1,256})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,256})>\n?")
_ARGUMENT = re.compile(r"</arg_key>\s*<arg_value>")
_DECODER = json.JSONDecoder()
# Between the items of a list that a grammar allows
_SEPARATOR = ", "
_ARGUMENTS = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.:/-]{1,256})\s*(?:\[ARGS\])?\s*(?=\{)")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The marks around calls.

    start: begins calls; an empty one means that an answer which begins with { may be a call. end:
    ends a call, or is empty if calls last until the end of the text.
    """

    starts: tuple[str, ...]
    end: str = ""
    is_whole: bool = False

    def parse(self, text: str, tools: Tools = (), function: str = "") -> list[ToolCall]:
        """Return the calls between the marks, or an empty list if the text has another form.

        ``function`` is the name, if the text has the arguments only.
        """
        # Models make mistakes: a malformed call is text of the answer, not an error
        if len(text) > MAX_CALL:
            return []
        try:
            if function:
                return [_call(function, read_json(text.encode(), "the arguments"))]
            return _parse(text.strip(), tools)
        except (FormatError, ValueError, RecursionError):
            return []


TAGGED = CallFormat(("<tool_call>",), "</tool_call>")
BRACKETED = CallFormat(("[TOOL_CALLS]",))
WHOLE = CallFormat(("<|python_tag|>",), is_whole=True)
# Each is a message of its own
MESSAGES = CallFormat(())
_MARKED = (
    CallFormat(("<seed:tool_call>",), "</seed:tool_call>"),
    CallFormat(("<|START_ACTION|>",), "<|END_ACTION|>"),
    CallFormat(("<TOOLCALL>",), "</TOOLCALL>"),
    TAGGED,
    BRACKETED,
)


def has_tools(template: str) -> bool:
    """Return True if a template writes tools."""
    return re.search(r"\btools\b", template) is not None


def call_format(template: str) -> CallFormat:
    """Return the format in a chat template; JSON as the whole answer by default."""
    if "<|channel|>" in template and "<|message|>" in template:
        return MESSAGES
    return next((form for form in _MARKED if form.starts[0] in template), WHOLE)


def _parse(text: str, tools: Tools) -> list[ToolCall]:
    if match := _FUNCTION.match(text):
        parts = _iter_matches(text, _PARAMETER, "</parameter>")
        pairs = ((start[1], value.removesuffix("\n")) for _, start, value in parts)
        return [_convert_call(match[1], tools, pairs)]
    if "<arg_key>" in text:
        name = text.partition("<arg_key>")[0].strip()
        parts = _iter_matches(text, _ARGUMENT, "</arg_value>")
        pairs = ((key.rpartition("<arg_key>")[2], value) for key, _, value in parts)
        return [_convert_call(name, tools, pairs)]
    if text[:1] in ("{", "["):
        return [_from_json(call) for call in _parse_objects(text)]
    return _parse_named_calls(text)


def _iter_matches(text: str, start: re.Pattern[str], end: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the text before each match of ``start``, the match, and the text until ``end``.

    A pattern of all three would take quadratic time for a text without ``end``.
    """
    offset = 0
    while (match := start.search(text, offset)) and (stop := text.find(end, match.end())) >= 0:
        yield text[offset : match.start()], match, text[match.end() : stop]
        offset = stop + len(end)


def _convert_call(name: str, tools: Tools, pairs: Iterable[tuple[str, str]]) -> ToolCall:
    """Return a call whose parameters are written as texts."""
    types = _find_types(tools, name)
    return _call(name, {key: _parse_value(value, types.get(key)) for key, value in pairs})


def _parse_objects(text: str) -> list[Any]:
    """Return the objects of a list, of one object, or of several separated by ;."""
    try:
        value = read_json(text.encode(), "a call")
    except FormatError:
        value = [read_json(call.encode(), "a call") for call in re.split(r";\s*(?=\{)", text)]
    return value if isinstance(value, list) else [value]


def _from_json(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise FormatError("a call must be an object")
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments.encode(), "the arguments")
    return _call(value.get("name", value.get("tool_name")), arguments)


def _parse_named_calls(text: str) -> list[ToolCall]:
    """Return calls that are names, each followed by the JSON of its arguments."""
    calls, offset = [], 0
    while offset < len(text):
        head = _ARGUMENTS.match(text, offset)
        if head is None:
            raise FormatError("not a call")
        # Only the end of the JSON: its value is read by read_json, which has limits
        _, offset = _DECODER.raw_decode(text, head.end())
        calls.append(_call(head[1], read_json(text[head.end() : offset].encode(), "the arguments")))
    return calls


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FormatError("a call has no valid name")
    if not isinstance(arguments, dict):
        raise FormatError("the arguments must be an object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _find_types(tools: Tools, name: str) -> dict[str, Any]:
    """Return the stated types of a function's parameters."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            fields = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(fields, Mapping):
                return {
                    key: parameter.get("type")
                    for key, parameter in fields.items()
                    if isinstance(parameter, Mapping)
                }
    return {}


def _parse_value(text: str, kind: Any) -> Any:
    """Return a parameter that is written as text: JSON unless its type is a string."""
    if kind == "string":
        return text
    try:
        return read_json(text.encode(), "a parameter")
    except (FormatError, UnicodeEncodeError):
        return text


def list_complete_items(text: str, most: int) -> list[str]:
    """Return the texts of the first complete objects in a list, as a grammar writes it."""
    items, start = list[str](), 1
    with contextlib.suppress(ValueError, RecursionError):
        while len(items) < most:
            _, end = _DECODER.raw_decode(text, start)
            items.append(text[start:end])
            start = end + len(_SEPARATOR)
    return items
