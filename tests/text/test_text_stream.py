from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from clowder_aimage.model.text.language_model import TextDelta, TextEvent, Token
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.thought_format import find_format
from clowder_aimage.model.text.tool_call_format import BRACKETED, TAGGED, WHOLE, call_format
from tests.text import chat_template
from tests.text.mlx_models import calls_of, text_of

TAGS = find_format("<think>")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
)


def stream_events(
    parts: Iterable[str | bytes], **options: Any
) -> tuple[list[TextEvent], TextStream]:
    stream = TextStream(**options)
    events: list[TextEvent] = []
    for part in parts:
        events += stream.feed(part if isinstance(part, bytes) else part.encode())
    return [*events, *stream.finish()], stream


def pieces(events: Sequence[TextEvent]) -> list[str]:
    return [one.text for one in events if isinstance(one, TextDelta)]


def each(text: str) -> list[bytes]:
    """Return the bytes of a text one at a time, the hardest way to divide it."""
    return [bytes([one]) for one in text.encode()]


def test_characters_are_never_split() -> None:
    events, _ = stream_events(each("aé東🙂"))
    assert pieces(events) == ["a", "é", "東", "🙂"]
    events, _ = stream_events([b"a\xf0\x9f", b"b", b"\xe6\x9d"])
    assert "".join(pieces(events)) == "a�b�"


@pytest.mark.parametrize("parts", [each("one STOP two"), ["one ST", "OP two"], ["one STOP two"]])
def test_a_stop_string_ends_the_text_wherever_it_is_divided(parts: Sequence[str | bytes]) -> None:
    events, stream = stream_events(parts, stop=("STOP", "never"))
    assert text_of(events) == "one "
    assert stream.is_stopped and stream.reason == "stop"
    assert stream.feed(b"more") == []


def test_the_beginning_of_a_stop_string_is_held_back_and_sent_if_it_is_not_one() -> None:
    stream = TextStream(("END",))
    assert stream.feed(b"the E") == [TextDelta("the ")]
    assert stream.feed(b"N") == []
    assert stream.feed(b"T") == [TextDelta("ENT")]
    assert stream.feed(b"EN") == []
    assert stream.finish() == [TextDelta("EN")]


def test_the_first_of_several_stop_strings_counts() -> None:
    events, _ = stream_events(["abcd"], stop=("cd", "bc"))
    assert text_of(events) == "a"


@pytest.mark.parametrize("is_thinking", [False, True])
def test_thoughts_are_separated_without_their_marks(is_thinking: bool) -> None:
    text = ("" if is_thinking else "<think>\n") + "hmm,\nso\n</think>\n\nYes <think> no"
    opened = "<think>" if is_thinking else ""
    options = {"format_": TAGS, "opened": opened, "is_stripped": is_thinking}
    events, _ = stream_events(each(text), **options)
    assert text_of(events, "thinking") == "hmm,\nso"
    assert text_of(events) == "Yes <think> no"


def test_empty_thoughts_are_no_piece() -> None:
    events, _ = stream_events(each("<think>\n\n</think>\n\nYes"), format_=TAGS)
    assert pieces(events) == ["Y", "e", "s"]


def test_thoughts_without_an_end_stay_thoughts() -> None:
    events, _ = stream_events(each("<think>hm "), format_=TAGS)
    assert text_of(events, "thinking") == "hm " and not text_of(events)


@pytest.mark.parametrize(
    "form, text",
    [
        (
            TAGGED,
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n'
            "</tool_call>",
        ),
        (
            TAGGED,
            "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            TAGGED,
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ),
        (BRACKETED, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}]'),
        (BRACKETED, '[TOOL_CALLS]weather[ARGS]{"city": "Ulm", "days": 2}'),
        (WHOLE, '{"name": "weather", "parameters": {"city": "Ulm", "days": 2}}'),
        (WHOLE, '<|python_tag|>{"name": "weather", "parameters": {"city": "Ulm", "days": 2}}'),
        (
            WHOLE,
            '{"type": "function", "function": {"name": "weather", "arguments": '
            '"{\\"city\\": \\"Ulm\\", \\"days\\": 2}"}}',
        ),
    ],
)
def test_calls_in_the_forms_of_models(form: Any, text: str) -> None:
    events, stream = stream_events(each(text), calls=form, tools=TOOLS)
    (call,) = calls_of(events)
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Ulm", "days": 2}
    assert not text_of(events) and stream.reason == "tool_calls"


def test_several_calls_after_an_answer() -> None:
    one = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    two = one.replace('"a"', '"b"')
    events, _ = stream_events(each(f"I look.\n{one}\n{two}"), calls=TAGGED)
    assert [call.name for call in calls_of(events)] == ["a", "b"]
    assert text_of(events).strip() == "I look."
    events, _ = stream_events(
        each('[TOOL_CALLS]a[ARGS]{"x": {"y": 1}}[TOOL_CALLS]b[ARGS]{}'), calls=BRACKETED
    )
    assert [call.name for call in calls_of(events)] == ["a", "b"]
    text = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    events, _ = stream_events(each(text), calls=WHOLE)
    assert [call.name for call in calls_of(events)] == ["a", "b"]


@pytest.mark.parametrize(
    "form, text",
    [
        (TAGGED, "<tool_call>{'name'}</tool_call> after"),
        (TAGGED, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (TAGGED, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        (TAGGED, '<tool_call>{"name": "a", "arg'),
        (BRACKETED, "[TOOL_CALLS] none"),
        (WHOLE, '{"answer": 42}'),
        (WHOLE, "{" * 5000),
    ],
)
def test_what_is_not_a_call_is_text(form: Any, text: str) -> None:
    events, stream = stream_events([text], calls=form)
    assert not calls_of(events)
    assert "".join(text_of(events).split()) == "".join(text.split())
    assert stream.reason == "stop"


def test_the_template_decides_the_form_of_calls() -> None:
    assert call_format(chat_template.QWEN3) is TAGGED
    assert call_format(chat_template.MISTRAL) is BRACKETED
    assert call_format(chat_template.LLAMA) is WHOLE


def test_tokens_come_with_the_piece_that_has_their_text() -> None:
    stream = TextStream(("END",), format_=TAGS)
    found: list[TextEvent] = []
    for text in (
        b"<think>",
        b"hm",
        b"</think>",
        b"\n\n",
        b"\xc3",
        b"\xa9",
        b" E",
        b"N",
        b"D",
        b"x",
    ):
        found += stream.feed(text, Token("", tuple(text), -1.0))
    parts = [one for one in found if isinstance(one, TextDelta)]
    assert [(one.kind, one.text) for one in parts] == [
        ("thinking", "hm"),
        ("content", "é"),
        ("content", " "),
    ]
    shown = [bytes(token.data) for one in parts for token in one.tokens]
    assert shown == [b"hm", b"\xc3", b"\xa9"]


def test_a_prompt_may_end_inside_thoughts() -> None:
    assert TAGS.find_end("<|im_start|>assistant\n<think>\n") == "<think>"
    assert not TAGS.find_end("<think>\n\n</think>\n\n")
