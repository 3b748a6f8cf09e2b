"""Chats with GGUF models in llama.cpp: templates, thoughts, calls, and the texts of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.llama.model import LlamaModel
from clowder_aimage.model.text.language_model import (
    STOP,
    TOOL_CALLS,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
    ToolCall,
)
from tests.text.llama_models import GREEDY, load
from tests.text.tiny_gguf import write_gguf
from tests.text.tiny_text import write_model

QUESTION = ({"role": "user", "content": "what is the weather?"},)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '{"name": "look", "arguments": {"at": "ball"}}'
ANSWER = ("the red ball", " is on", " the table")
COUNTING = (  # prints the roles and the texts of all messages
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


def say(
    directory: Path, kind: str, says: tuple[str, ...], *others: Path, **fields: Any
) -> LlamaModel:
    """Return a model that gives this answer to every prompt."""
    model = write_model(directory / "model", kind, says=says, **fields)
    return load(write_gguf(directory / "model.gguf", model), *others)


def ask(model: LlamaModel, *messages: dict[str, Any], **fields: Any) -> list[TextEvent]:
    request = TextRequest(messages=messages or QUESTION, sampling=GREEDY, **fields)
    return [event for event in model.generate(request) if event != TextDelta("")]


def text(events: list[TextEvent], kind: str = "content") -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta) and one.kind == kind)


def test_answer_to_messages(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen2", ANSWER)
    assert model.capabilities == {"chat", "completion", "grammar", "logprobs"}
    events = ask(model)
    assert text(events) == "".join(ANSWER)
    end = events[-1]
    assert isinstance(end, TextEnd) and end.reason == STOP
    for fields in ({"tools": (LOOK,)}, {"thinking": True}):
        with pytest.raises(UsageError, match="does not support"):
            ask(model, **fields)


def test_thoughts_are_separate(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen3", ("<think>", "hm hm", "</think>", *ANSWER))
    assert model.capabilities >= {"thinking", "tools"}
    events = ask(model)
    assert (text(events, "thinking"), text(events)) == ("hm hm", "".join(ANSWER))


def test_calls_of_functions(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen3", ("<tool_call>", CALL, "</tool_call>"))
    *calls, end = ask(model, tools=(LOOK,))
    assert [ToolCall("look", '{"at": "ball"}')] == calls
    assert isinstance(end, TextEnd) and end.reason == TOOL_CALLS


def mark_special(directory: Path) -> LlamaModel:
    """Load a model whose added tokens in angle brackets are special."""
    stored = json.loads((directory / "tokenizer.json").read_bytes())
    for token in stored["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    (directory / "tokenizer.json").write_text(json.dumps(stored))
    return load(write_gguf(directory.parent / "model.gguf", directory))


def test_mark_that_is_a_special_token_begins_calls(tmp_path: Path) -> None:
    call = CALL.replace("arguments", "parameters")
    says = ("<|python_tag|>", call)
    model = mark_special(write_model(tmp_path / "model", "llama", says=says))
    assert ask(model, tools=(LOOK,))[:-1] == [ToolCall("look", '{"at": "ball"}')]
    # Without tools nothing says what the mark means
    assert text(ask(model)) == f"<|python_tag|>{call}"


def test_token_that_begins_texts_is_not_doubled(tmp_path: Path) -> None:
    model = say(tmp_path, "llama", ANSWER)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    source = json.loads((tmp_path / "model" / "tokenizer_config.json").read_bytes())
    bos = "<|begin_of_text|>"
    assert source["chat_template"].count("bos_token") or bos in source["chat_template"]
    assert model._template is not None
    prompt = model._template.compose(TextRequest(messages=QUESTION))[0]
    assert prompt.startswith(bos)
    expected = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    end = ask(model)[-1]
    assert isinstance(end, TextEnd) and end.prompt_tokens == expected
    for given in ("the red", f"{bos}the red"):
        *_, end = model.generate(TextRequest(prompt=given, max_tokens=1))
        plain = len(tokenizer.encode("the red", add_special_tokens=False).ids)
        assert isinstance(end, TextEnd) and end.prompt_tokens == plain + 1


def test_texts_of_other_tools_are_used(tmp_path: Path) -> None:
    system, messages, jinja = (
        tmp_path / name for name in ("system", "messages.json", "chat_template.jinja")
    )
    system.write_text("short")
    messages.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    jinja.write_text(COUNTING)
    (tmp_path / "template").write_text("{{ .Prompt }}")  # Go's templates are not supported
    model = say(tmp_path, "qwen2", ANSWER, system, messages, jinja, tmp_path / "template")
    assert model._begin(TextRequest(messages=QUESTION))[0] == "s:short;u:hi;u:what is the weather?;"
    own = ({"role": "system", "content": "long"}, *QUESTION)
    assert model._begin(TextRequest(messages=own))[0] == "u:hi;s:long;u:what is the weather?;"


def test_schema_takes_the_place_of_thoughts(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen3", ("<think>", "hm"))
    prompt, *_ = model._begin(TextRequest(messages=QUESTION, schema={}))
    assert prompt.endswith("<think>\n\n</think>\n\n")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    events = ask(model, schema=schema | {"additionalProperties": False}, max_tokens=40)
    assert text(events, "thinking") == "" and text(events).startswith("{")


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template cannot be read"):
        say(tmp_path, "qwen2", ANSWER, template="{% for %}")
    model = say(
        tmp_path, "qwen2", ANSWER, template="{{ raise_exception('no ' + messages[0].role) }}"
    )
    with pytest.raises(UsageError, match="no user"):
        ask(model)


def test_an_answer_is_continued(tmp_path: Path) -> None:
    model = say(tmp_path, "qwen2", ANSWER)
    begun = (*QUESTION, {"role": "assistant", "content": ANSWER[0]})
    events = ask(model, *begun, is_continued=True)
    assert text(events) == "".join(ANSWER[1:])


# llama.cpp ends a text at <|end|> unless the vocabulary has the other two
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY = "{{ messages[0].content }}{{ tools }}<|start|><|message|><|start|>assistant\n"


def test_messages_with_channels(tmp_path: Path) -> None:
    channel, message, end, *others = CHANNELS
    for name, says, thought, answer in (
        ("answer", (channel, "analysis", message, "plan", end, "so", *others), "plan", "so"),
        ("call", (channel, "final to=functions.look", message, "{}", *others[::-1], end), "", ""),
    ):
        directory = write_model(tmp_path / name / "model", "qwen2", says=says, template=HARMONY)
        events = ask(mark_special(directory), tools=(LOOK,))
        assert (text(events, "thinking"), text(events)) == (thought, answer)
        calls = [event.name for event in events if isinstance(event, ToolCall)]
        assert calls == ([] if answer else ["look"])
