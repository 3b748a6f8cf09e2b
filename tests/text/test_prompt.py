"""Prompts have what the messages say, in the form that a template takes, and continue answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clowder_aimage.errors import ChatTemplateError, UsageError
from clowder_aimage.model.text.chat_prompt import begin_chat
from clowder_aimage.model.text.chat_template import ChatTemplate
from clowder_aimage.model.text.content_form import ContentForm
from clowder_aimage.model.text.language_model import TextDelta, TextNotice, TextRequest
from clowder_aimage.model.text.prompt_check import find_lost
from clowder_aimage.model.text.template_file import find_templates
from tests.text.chat_template import CHATML, GEMMA, LLAMA, MISTRAL, QWEN3
from tests.text.published_template import (
    CALL,
    CONVERSATIONS,
    TOKENS,
    TOOL,
    make_published,
    read_templates,
)

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 boxes"}
ANSWER = {"role": "assistant", "content": "three pink"}
LOOP = "{% for m in messages %}{{ m.role }}:"
PARTS = LOOP + "{% for p in m.content %}{{ p.text if p.type == 'text' }};{% endfor %}{% endfor %}"
FIRST = LOOP + "{{ m.content[0]['text'] }};{% endfor %}"
TEXT = LOOP + "{{ m.content }};{% endfor %}"
JSON = LOOP + "{{ m.content | tojson }};{% endfor %}"
# The system message as a text, the others as parts
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ 's:' + m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)


# Their templates fail, in transformers too
NEVER = ("CohereForAI-c4ai-command-r-plus-tool_use", "fireworks-ai-llama-3-firefunction-v2")


def make(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, TOKENS)


def compose(source: str, *messages: Any, **options: Any) -> tuple[str, TextNotice]:
    return make(source).compose(TextRequest(messages=messages, **options))


def build_parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize(
    ("source", "message", "prompt"),
    [
        (PARTS, USER, "user:2 boxes;"),
        (PARTS, build_parts("a", "b"), "user:a;b;"),
        (FIRST, USER, "user:2 boxes;"),
        (FIRST, build_parts("a", "b"), "user:a\nb;"),
        (TEXT, build_parts("a", "b"), "user:a\nb;"),
        (TEXT, build_parts("a"), "user:a;"),
        (JSON, build_parts("a", "b"), 'user:"a\\nb";'),
        (BOTH, USER, "2 boxes"),
        (BOTH, build_parts("a", "b"), "<a><b>"),
    ],
    ids=str,
)
def test_the_content_has_the_form_that_the_template_takes(
    source: str, message: Any, prompt: str
) -> None:
    assert compose(source, message) == (prompt, TextNotice())


def test_each_role_has_a_form_of_its_own() -> None:
    prompt, notice = compose(MIXED, SYSTEM, USER, ANSWER, USER)
    assert prompt == "s:Be brief.2 boxes;three pink;2 boxes;" and not notice.warnings
    assert ContentForm(takes_text=False, takes_part=True).convert("") == ""


def test_a_template_of_parts_for_tools_gets_parts() -> None:
    source = "{% for t in tools %}{{ t.function.name }} {% endfor %}" + PARTS
    template = ChatTemplate({"default": TEXT, "tool_use": source}, TOKENS)
    plain, called = (TextRequest(messages=(USER,), tools=tools) for tools in ((), (TOOL,)))
    assert template.compose(plain)[0] == "user:2 boxes;"
    assert template.compose(called)[0] == "get_weather user:2 boxes;"


@pytest.mark.parametrize("name", read_templates())
def test_published_templates_write_each_text_or_say_which_not(name: str) -> None:
    template, checked = make_published(name), 0
    for messages, tools in CONVERSATIONS[2:]:
        marks = [f"mark{at}mark" for at in range(len(messages))]
        marked = [
            message | ({} if message is CALL else {"content": mark})
            for message, mark in zip(messages, marks, strict=True)
        ]
        parts = [*map(mark_parts, marked)]
        for asked in (marked, parts):
            try:
                prompt, notice = template.compose(TextRequest(messages=(*asked,), tools=(*tools,)))
            except (UsageError, ChatTemplateError) as error:
                # As in transformers, see test_published_template
                assert re.search("refuses the messages|template failed", error.message), name
                continue
            checked += 1
            for number, message in enumerate(asked):
                texts = [part["text"] for part in mark_parts(message)["content"]]
                # Köln, which may be escaped
                texts = ["ln"] if message["role"] == "assistant" and not texts else texts
                is_written = all(text in prompt for text in texts)
                is_said = any(f"messages[{number}]" in text for text in notice.warnings)
                assert is_written != is_said, (name, message)
                assert is_written or message["role"] != "user", (name, message)
    assert checked or name in NEVER


def mark_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is in two parts."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    half = len(content) // 2
    texts = (content[:half], content[half:])
    return message | {"content": [{"type": "text", "text": text} for text in texts if text]}


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", [USER, ANSWER, USER | {"content": "and now?"}]),
        ("{{ messages[-1].content[:4] }}", [USER | {"content": "one two three four five"}]),
        ("Answer!", [USER]),
        ("Answer!", [USER | {"content": "An"}]),
        (
            "{{ messages[0].content }}",
            [USER | {"content": "one or 2"}, ANSWER, USER | {"content": "2"}],
        ),
        ("<user>", [USER | {"content": "use"}]),
        ("Answer!", [USER | {"content": f"question {at}"} for at in range(20)]),
        (LOOP + "{% endfor %}", [USER]),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
            [SYSTEM, USER],
        ),
    ],
    ids=str,
)
def test_a_template_that_leaves_out_the_question_is_refused(source: str, messages: Any) -> None:
    with pytest.raises(UsageError, match="leaves out the text of messages") as raised:
        compose(source, *messages)
    assert raised.value.facts["field"] == "messages"


def test_other_texts_that_are_left_out_are_said() -> None:
    last = "{{ messages[-1].content }}"
    _, notice = compose(last, SYSTEM, USER)
    assert notice.warnings == (
        "the model's chat template leaves out the text of messages[0] (system)",
    )
    long = USER | {"content": " ".join(map(str, range(1000, 1040)))}
    _, notice = compose("{{ messages[0].content[:150] }}", long)
    assert "a part of the text of messages[0] (user)" in notice.warnings[0]
    _, notice = compose(last, USER, tools=(TOOL,))
    assert "leaves out the tools" in notice.warnings[0]


TURNS = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}{% endfor %}"
NAMED = TURNS + "{{ messages[0].name }}{{ messages[1].tool_calls[0].function.name }}"
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL["tool_calls"][0]]}


@pytest.mark.parametrize(
    ("source", "messages", "warning", "ignored"),
    [
        (TURNS, (SYSTEM | {"content": "start"}, USER), "text of messages[0] (system)", ()),
        (TURNS, (USER, CALLING, USER), "tool_calls of messages[1] (assistant)", ()),
        (TURNS, (USER | {"name": "im"}, USER), "", ("messages[0].name",)),
        (NAMED, (USER | {"name": "im"}, CALLING, USER), "", ()),
    ],
    ids=str,
)
def test_short_texts_names_and_calls_are_not_in_a_prompt_by_chance(
    source: str, messages: Any, warning: str, ignored: Any
) -> None:
    _, notice = compose(source, *messages)
    assert notice.ignored == ignored
    assert [text.partition("leaves out the ")[2] for text in notice.warnings] == [warning] * bool(
        warning
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("replace('\n',' ') | e", "🙂\n🎈"),
        ("urlencode", "größe & x"),
        ("tojson", "é"),
        ("upper", "straße"),
        ("trim", " 2 "),
    ],
)
def test_short_texts_may_be_changed(change: str, text: str) -> None:
    source = "{% for m in messages %}{{ m.content | " + change + " }}{% endfor %}"
    assert compose(source, USER | {"content": text})[1] == TextNotice()


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("  a b \n", "a b"),
        ("Hello There", "hello there"),
        ('say "ä"\nnow', '{"text": "say \\"ä\\"\\nnow"}'),
        ('say "ä"', '{"text": "say \\"\\u00e4\\""}'),
        ("a < b & c", "a &lt; b &amp; c"),
        ("one\n\ntwo   three", "one two three"),
        ("/no_think draw", "draw"),
        ("", "x"),
        ("🙂🙂", "x 🙂🙂 y"),
        ("+ - * /", "+▁-▁*▁/"),
        ("🙂\n🎈 &", "🙂 🎈 &amp;"),
    ],
)
def test_texts_may_be_trimmed_and_encoded(text: str, prompt: str) -> None:
    assert find_lost([(0, text)], prompt) == {}


def test_texts_that_are_lost() -> None:
    texts = [(at, f"text{at}") for at in range(20)]
    assert find_lost(texts, "text1 text3 text19") == dict.fromkeys((0, 2, *range(4, 10)), 0.0)
    assert find_lost([(0, "🙂"), (1, "one two")], "one") == {0: 0.0, 1: 0.5}


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, "<|im_start|>assistant\nthree pink"),
        (LLAMA, "<|start_header_id|>assistant<|end_header_id|>\n\nthree pink"),
        (GEMMA, "<start_of_turn>model\nthree pink"),
        (MISTRAL, "[INST] 2 boxes[/INST] three pink"),
        (QWEN3, "<|im_start|>assistant\nthree pink"),
        (PARTS, "user:2 boxes;assistant:three pink"),
    ],
    ids=["chatml", "llama", "gemma", "mistral", "qwen3", "parts"],
)
def test_an_answer_is_continued_where_it_ends(source: str, prompt: str) -> None:
    text, _ = compose(source, USER, ANSWER, is_continued=True)
    assert text.endswith(prompt)


def test_trailing_spaces_of_a_continued_answer_are_those_of_the_template() -> None:
    spaced = ANSWER | {"content": "three "}
    assert compose(CHATML, USER, spaced, is_continued=True)[0].endswith("\nthree ")
    assert compose(LLAMA, USER, spaced, is_continued=True)[0].endswith("\n\nthree")


def test_a_prompt_may_end_with_the_last_message() -> None:
    assert compose(CHATML, USER, has_opening=False)[0].endswith("2 boxes<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ((USER,), {}),
        ((USER, ANSWER | {"content": ""}), {}),
        ((USER, ANSWER), {"tools": (TOOL,)}),
        ((USER, ANSWER), {"schema": {}}),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: Any, options: Any) -> None:
    with pytest.raises(UsageError) as raised:
        TextRequest(messages=messages, is_continued=True, **options)
    assert raised.value.facts["field"] == "messages"


def test_a_template_without_the_last_answer_cannot_continue_it() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="cannot be continued"):
        compose(source, USER, ANSWER, is_continued=True)


def test_the_text_of_a_continued_answer_is_not_trimmed() -> None:
    request = TextRequest(messages=(USER, ANSWER), is_continued=True)
    _, stream, _ = begin_chat(make(CHATML), request, is_stripped=True)
    assert stream.feed(b" boxes") == [TextDelta(" boxes")]
    thought = ANSWER | {"content": "<think>so"}
    request = TextRequest(messages=(USER, thought), is_continued=True)
    _, stream, _ = begin_chat(make(CHATML + "{# <think></think> #}"), request)
    assert stream.feed(b" far</think>") == [TextDelta(" far", "thinking")]


OPTIONS = (
    TEXT + "{{ enable_thinking }},{{ thinking }},{{ reasoning_effort }},{{ clear is defined }}"
)


@pytest.mark.parametrize(
    ("source", "options", "tail", "ignored"),
    [
        (OPTIONS, {}, ",,,False", ()),
        (OPTIONS, {"thinking": False}, "False,False,,False", ()),
        (OPTIONS, {"effort": "high"}, "True,True,high,False", ()),
        (OPTIONS, {"effort": "none"}, "False,False,none,False", ()),
        (OPTIONS, {"effort": "high", "thinking": False}, "False,False,high,False", ()),
        (OPTIONS, {"template_options": {"clear": 1}}, ",,,True", ()),
        (OPTIONS, {"template_options": {"x": 1}}, ",,,False", ("chat_template_kwargs.x",)),
        (
            OPTIONS,
            {"effort": "low", "template_options": {"reasoning_effort": "max"}},
            "True,True,max,False",
            (),
        ),
        (TEXT, {"effort": "high"}, ";", ("reasoning_effort",)),
        (
            TEXT + "{{ thinking }}",
            {"thinking": True, "template_options": {"enable_thinking": True}},
            ";True",
            (),
        ),
        (
            TEXT,
            {"template_options": {"enable_thinking": False}},
            ";",
            ("chat_template_kwargs.enable_thinking",),
        ),
    ],
    ids=str,
)
def test_options_reach_a_template_that_reads_them(
    source: str, options: Any, tail: str, ignored: Any
) -> None:
    prompt, notice = compose(source, USER, **options)
    assert prompt.endswith(tail) and notice == TextNotice(ignored=ignored)


def test_thoughts_that_cannot_be_turned_off_are_said() -> None:
    _, notice = compose(TEXT + "{# <think> #}", USER, thinking=False)
    assert notice.warnings == ("the model's chat template cannot turn thinking off",)


def test_earlier_thoughts_have_the_names_that_templates_read() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}"
    thought = ANSWER | {"reasoning_content": " hm "}
    assert compose(source, thought, USER)[0] == "three pink hm 2 boxes"


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {"chat_template.jinja": b"a"}, {"default": "a"}),
        (
            {"chat_template": "c"},
            {"chat_template.jinja": b"a", "additional_chat_templates/tool_use.jinja": b"b"},
            {"default": "a", "tool_use": "b"},
        ),
        (
            {"chat_template": "c"},
            {"additional_chat_templates/tool_use.jinja": b"b"},
            {"default": "c", "tool_use": "b"},
        ),
        (
            {"chat_template": [{"name": "tool_use", "template": "d"}]},
            {"chat_template.jinja": b"a"},
            {"default": "a"},
        ),
        ({}, {"additional_chat_templates/rag.jinja": b"b"}, {}),
    ],
)
def test_files_of_templates(config: Any, files: dict[str, bytes], expected: Any) -> None:
    assert find_templates(config, files.get) == expected
