"""Answers that must be calls: the schema of them, and their text, whole or cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")

from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.chat_template import check_request
from clowder_aimage.model.text.forced_call import (
    MAX_CALLS,
    CallStream,
    build_call_schema,
    open_call,
)
from clowder_aimage.model.text.language_model import (
    LENGTH,
    TOOL_CALLS,
    TextEnd,
    TextRequest,
    ToolCall,
)
from clowder_aimage.model.text.tool_call_format import BRACKETED, TAGGED, WHOLE
from tests.text.test_llama_chat import QUESTION, ask, say, text

DEPTH = {"type": "object", "properties": {"n": {"enum": [1]}, "more": {"$ref": "#/$defs/Depth"}}}
LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"at": {"enum": ["red", "blue"]}, "deep": {"$ref": "#/$defs/Depth"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Depth": DEPTH},
    },
}
TOOLS = tuple({"type": "function", "function": function} for function in (LOOK, {"name": "stop"}))
BOTH = ("look", "stop")


def forced(*names: str, **fields: Any) -> TextRequest:
    return TextRequest(messages=QUESTION, tools=TOOLS, must_call=names or BOTH, **fields)


def is_valid(request: TextRequest, value: object, **fields: Any) -> bool:
    schema = build_call_schema(request, fields.get("form", TAGGED))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def call(name: str, key: str = "arguments", **arguments: Any) -> dict[str, Any]:
    return {"name": name, key: arguments}


def test_a_schema_allows_calls_of_the_tools_and_nothing_else() -> None:
    look, stop = call("look", at="red", deep={"n": 1, "more": {"n": 1}}), call("stop")
    for value in ([look], [stop], [look, stop]):
        assert is_valid(forced(), value)
    wrong = call("look", at="red", deep={"n": 1, "more": {"n": 2}})
    assert not is_valid(forced(), look)
    for value in ([], [wrong], [call("look")], [call("stop", at="red")], [call("other")]):
        assert not is_valid(forced(), value)
    assert not is_valid(forced(), [stop] * (MAX_CALLS + 1))
    assert is_valid(forced("stop", has_one_call=True), stop)
    assert not is_valid(forced("stop", has_one_call=True), look)
    assert is_valid(forced(has_one_call=True), call("stop", "parameters"), form=WHOLE)


def test_a_prompt_ends_with_the_mark_of_a_call() -> None:
    assert [open_call(form) for form in (TAGGED, BRACKETED, WHOLE)] == [
        "<tool_call>\n",
        "[TOOL_CALLS]",
        "",
    ]


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ('{"name": "stop", "arguments": {}}', ["stop"]),
        ('[{"name": "stop", "arguments": {}}]', ["stop"]),
        (
            '[{"name": "stop", "parameters": {}}, {"name": "look", "parameters": {}}]',
            ["stop", "look"],
        ),
        ('[{"name": "stop", "arguments": {}}, {"name": "lo', ["stop"]),
        ('[{"name": "stop", "arguments": {"a": "</tool_call>"}}]', ["stop"]),
    ],
)
def test_complete_calls_are_taken(written: str, names: list[str]) -> None:
    stream = CallStream(TOOLS)
    assert not [event for piece in written for event in stream.feed(piece.encode())]
    events = stream.finish()
    assert len(events) == len(names) and all(isinstance(event, ToolCall) for event in events)


@pytest.mark.parametrize("written", ['[{"name": "st', '{"name": "stop", "arg', "["])
def test_half_of_a_call_is_nothing(written: str) -> None:
    stream = CallStream(TOOLS)
    stream.feed(written.encode())
    assert stream.finish() == []


# Short ones: the contexts of tiny models are small
@pytest.mark.parametrize("mark", ["<tool_call>", "[TOOL_CALLS]", "tools"])
@pytest.mark.parametrize("has_one_call", [True, False])
def test_a_model_of_llama_calls_what_it_must(tmp_path: Path, mark: str, has_one_call: bool) -> None:
    template = f"{{{{ messages[0].content }}}} {{{{ tools | tojson }}}} {mark}"
    model = say(tmp_path, "qwen2", ("the red ball",), template=template)
    *calls, end = ask(model, tools=TOOLS, must_call=("look",), has_one_call=has_one_call)
    assert isinstance(end, TextEnd) and end.reason in (TOOL_CALLS, LENGTH)
    assert calls and all(isinstance(each, ToolCall) and each.name == "look" for each in calls)
    first = calls[0]
    assert isinstance(first, ToolCall)
    jsonschema.validate(json.loads(first.arguments), LOOK["parameters"])


def test_a_grammar_takes_the_place_of_thoughts(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ tools | length }} <tool_call><think>\n"
    model = say(tmp_path, "qwen3", ("<think>", "hm"), template=template)
    prompt, _ = model._begin(forced("stop"))[:2]
    assert prompt.endswith("<think>\n</think>\n\n<tool_call>\n")
    events = ask(model, tools=TOOLS, must_call=("stop",), has_one_call=True)
    assert text(events) == text(events, "thinking") == ""


def test_schemas_that_cannot_be_used_name_the_tools(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen3", ("the red ball",))
    wrong = {"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/gone"}}}
    with pytest.raises(UsageError, match="cannot be used") as caught:
        ask(model, tools=(wrong,), must_call=("a",))
    assert caught.value.facts["field"] == "tools"


def test_a_runtime_without_grammars_refuses() -> None:
    with pytest.raises(UsageError, match="cannot be made to call a function") as caught:
        check_request(forced(), frozenset({"chat", "tools"}))
    assert caught.value.facts["field"] == "tool_choice"
