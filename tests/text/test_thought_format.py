"""The thoughts and answers of models in the forms of published ones, however they are divided."""

from __future__ import annotations

from typing import Any

import pytest

from clowder_aimage.model.text.language_model import TextDelta, ToolCall
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.thought_format import PLAIN, find_format, has_thinking
from clowder_aimage.model.text.tool_call_format import MESSAGES, call_format
from tests.text.published_template import read_templates

HARMONY = "<|start|>x<|message|><|channel|>"
CALLED = {"in_header": True, "calls": MESSAGES}
# What declares the marks, the text, its thoughts and its answer
FORMS: dict[str, tuple[str, str, str, str]] = {
    "tags": ("<think>", "<think>\nplan\n</think>\n\nanswer", "plan", "answer"),
    "a tag of two": ("</think>", "<think>plan</think>answer", "plan", "answer"),
    "a mark in the answer": ("<think>", "see <think> and </think>", "", "see <think> and </think>"),
    "no mark before": ("x.split('</think>')", "plan</think>answer", "plan", "answer"),
    "no mark at all": ("x.split('</think>')", "answer", "", "answer"),
    "one of two ends": ("</think>", "<think>a</think>b</think>c", "a", "b</think>c"),
    "Magistral": ("[THINK][/THINK]", "[THINK]plan[/THINK]answer", "plan", "answer"),
    "Seed": ("<seed:think></seed:think>", "<seed:think>plan</seed:think>answer", "plan", "answer"),
    "Kimi": ("◁think▷◁/think▷", "◁think▷plan◁/think▷answer", "plan", "answer"),
    "thinking": ("<thinking>", "<thinking>plan</thinking>answer", "plan", "answer"),
    "EXAONE": ("<thought></thought>", "<thought>plan</thought>answer", "plan", "answer"),
    "MiniMax": ("</mm:think>", "<mm:think>plan</mm:think>answer", "plan", "answer"),
    "unknown tags": ("<|ponder|><|/ponder|>", "<|ponder|>plan<|/ponder|>answer", "plan", "answer"),
    "Apertus": (
        "<|inner_prefix|> <|inner_suffix|>",
        "<|inner_prefix|>plan<|inner_suffix|>answer",
        "plan",
        "answer",
    ),
    "Command": (
        "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>",
        "<|START_THINKING|>plan<|END_THINKING|><|START_RESPONSE|>answer<|END_RESPONSE|>",
        "plan",
        "answer",
    ),
    "Command without thoughts": (
        "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>",
        "<|START_RESPONSE|>answer<|END_RESPONSE|>",
        "",
        "answer",
    ),
    "OpenThinker": (
        "<|begin_of_thought|><|end_of_thought|><|begin_of_solution|>",
        "<|begin_of_thought|>plan<|end_of_thought|>\n<|begin_of_solution|>answer<|end_of_solution|>",
        "plan",
        "answer",
    ),
    "Granite 3.3": (
        "<think></think><response>",
        "<think>plan</think><response>answer</response>",
        "plan",
        "answer",
    ),
    "Granite 3.2": (
        "'Here is my thought process:' and 'Here is my response:'",
        "Here is my thought process: plan\nHere is my response: answer",
        "plan",
        "answer",
    ),
    "Gemma 4": (
        "<|channel>x<channel|>",
        "<|channel>thought\nplan\n<channel|>answer",
        "plan",
        "answer",
    ),
    "Solar": (
        "<|think|><|end|><|begin|><|content|>",
        "<|think|>plan<|end|><|begin|>assistant<|content|>answer<|end|>",
        "plan",
        "answer",
    ),
    "Kimi K3": (
        "<|open|><|sep|><|close|>",
        "<|open|>think<|sep|>plan<|close|>think<|sep|>"
        "<|open|>response<|sep|>answer<|close|>response<|sep|>",
        "plan",
        "answer",
    ),
}
MESSAGES_OF: dict[str, tuple[str, dict[str, Any], str, str, list[str]]] = {
    "answer": (
        "<|channel|>analysis<|message|>plan<|end|>"
        "<|start|>assistant<|channel|>final<|message|>answer<|return|>",
        {"in_header": True},
        "plan",
        "answer",
        [],
    ),
    "call": (
        "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>',
        CALLED,
        "plan",
        "",
        ["look"],
    ),
    "another order": (
        ' to=functions.look<|channel|>commentary json<|message|>{"at": 1}',
        CALLED,
        "",
        "",
        ["look"],
    ),
    "preamble": ("<|channel|>commentary<|message|>I look.<|end|>", CALLED, "", "I look.", []),
    "no call is expected": (
        "<|channel|>commentary to=functions.look<|message|>{}",
        {"in_header": True},
        "",
        "<|channel|>commentary to=functions.look<|message|>{}",
        [],
    ),
    "not a call": (
        "<|channel|>commentary to=functions.look<|message|>none",
        CALLED,
        "",
        "<|channel|>commentary to=functions.look<|message|>none",
        [],
    ),
    "no header": ("a plain answer", {"in_header": True}, "", "a plain answer", []),
    "a long text without a header": ("word " * 200, {"in_header": True}, "", "word " * 200, []),
    "an unknown header": (
        "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|other|>x",
        {"in_header": True},
        "plan",
        "<|start|>assistant<|other|>x",
        [],
    ),
    "muse": (
        " to=self<|message|>plan<|eom|><|start|>assistant<|message|>answer",
        {"in_header": True},
        "plan",
        "answer",
        [],
    ),
}


def read(text: str, size: int, **options: Any) -> tuple[str, str, list[str]]:
    """Return thoughts, answer and calls of a text that comes in pieces of ``size`` bytes."""
    stream, data = TextStream(**options), text.encode()
    events = [
        event for at in range(0, len(data), size) for event in stream.feed(data[at : at + size])
    ]
    events += stream.finish()
    texts = {"thinking": "", "content": ""}
    for event in events:
        if isinstance(event, TextDelta):
            texts[event.kind] += event.text
    calls = [event.name for event in events if isinstance(event, ToolCall)]
    return texts["thinking"], texts["content"], calls


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", FORMS)
def test_thoughts_and_the_answer_are_told_apart(name: str, size: int) -> None:
    declared, text, thoughts, answer = FORMS[name]
    assert read(text, size, format_=find_format(declared)) == (thoughts, answer, [])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", MESSAGES_OF)
def test_messages_with_headers(name: str, size: int) -> None:
    text, options, *expected = MESSAGES_OF[name]
    assert read(text, size, format_=find_format(HARMONY), **options) == tuple(expected)


@pytest.mark.parametrize("name", FORMS)
def test_marks_of_other_models_stay_in_the_text(name: str) -> None:
    text = FORMS[name][1]
    assert read(text, 1, format_=PLAIN) == ("", text, [])


def test_marks_are_those_of_the_vocabulary_too() -> None:
    form = find_format("", ["[THINK]", "[/THINK]", "<|im_start|>"])
    assert form.thoughts == {"[THINK]": "[/THINK]"} and form.marks >= {"[THINK]", "[/THINK]"}
    assert find_format("<|start|><|message|>", ["<|channel|>"]).headers is not None


def test_special_tokens_without_a_known_meaning_are_shown() -> None:
    tokens = ["<|im_start|>", "<|muse|>", "<|turn|>", "<pad>", "<|reserved_7|>", "[OTHER_MARK]"]
    form = find_format("", tokens, tokens, prompt="<|turn|>user")
    assert form.shown == {"<|muse|>", "[OTHER_MARK]"}
    assert TextStream(format_=form).marks >= form.shown


def test_a_text_may_continue_thoughts_or_an_answer() -> None:
    form = find_format("<think></think>")
    assert form.find_open("<think>so") == "<think>" and not form.find_open("<think>a</think>b")
    opened = {"format_": form, "opened": "<think>"}
    assert read(" far</think>b", 1, **opened) == (" far", "b", [])
    assert read(" <think>b", 1, format_=form, is_begun=True) == ("", " <think>b", [])


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("openai-gpt-oss-120b", "<|channel|>"),
        ("Qwen-Qwen3-0.6B", "<think>"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]"),
        ("ByteDance-Seed-OSS", "<seed:think>"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_THINKING|>"),
        ("MiniMax-M3", "<mm:think>"),
        ("google-gemma-4-31B-it", "<|channel>thought"),
        ("upstage-Solar-Open-100B", "<|think|>"),
        ("Kimi-K3", "<|open|>think<|sep|>"),
        ("Apertus-8B-Instruct", "<|inner_prefix|>"),
        ("unsloth-Apriel-1.5", "<thinking>"),
    ],
)
def test_marks_of_published_templates(name: str, start: str) -> None:
    source = read_templates()[name]
    form = find_format(source)
    starts = {*form.thoughts, *(form.headers.starts if form.headers else ())}
    assert start in starts and has_thinking(source)


def test_templates_without_thoughts() -> None:
    for name in ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "MiMo-VL"):
        assert not has_thinking(read_templates()[name]), name


def test_calls_of_gpt_oss_are_messages() -> None:
    assert call_format(read_templates()["openai-gpt-oss-120b"]) is MESSAGES
