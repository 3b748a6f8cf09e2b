from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest

from clowder_aimage.errors import ChatTemplateError, UsageError
from clowder_aimage.model.text.chat_template import (
    ChatTemplate,
    check_request,
    require_template,
)
from clowder_aimage.model.text.language_model import TextRequest
from clowder_aimage.model.text.template_file import find_templates, parse_special_tokens
from tests.conftest import measure_slowness
from tests.text.chat_template import CHATML, GEMMA, LLAMA, MISTRAL, QWEN3

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1234",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1234", "content": "rain"}


def render(source: str, *messages: Any, **options: Any) -> str:
    request = TextRequest(messages=messages, **options)
    return ChatTemplate({"default": source}, TOKENS).compose(request)[0]


def test_chatml() -> None:
    assert render(CHATML, SYSTEM, USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_with_tools_a_call_and_its_result() -> None:
    text = render(QWEN3, SYSTEM, USER, CALL, RESULT, tools=(TOOL,))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "weather"' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    ) in text


def test_qwen3_leaves_out_earlier_thoughts_and_disables_new_ones() -> None:
    answer = {"role": "assistant", "content": "<think>\nlong\n</think>\n\nHello"}
    text = render(QWEN3, USER, answer, USER, thinking=False)
    assert "long" not in text and "assistant\nHello<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert render(QWEN3, USER).endswith("<|im_start|>assistant\n")


def test_llama_writes_arguments_as_an_object() -> None:
    text = render(LLAMA, SYSTEM, USER, CALL, RESULT, tools=(TOOL,))
    assert text.startswith("<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython")
    assert '{\n    "type": "function",' in text
    assert '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>' in text


def test_mistral_gets_ids_of_nine_characters_that_match() -> None:
    text = render(MISTRAL, SYSTEM, USER, CALL, RESULT, tools=(TOOL,))
    assert text.startswith('<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": ')
    number = text.partition('"id": "')[2][:9]
    assert number.isalnum() and f'"call_id": "{number}"' in text


def test_gemma_merges_the_system_message() -> None:
    assert render(GEMMA, SYSTEM, USER) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("source", [MISTRAL, GEMMA])
def test_a_template_that_refuses_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(UsageError, match=r"refuses the messages: .*roles must alternate") as raised:
        render(source, USER, USER)
    assert raised.value.facts["field"] == "messages"


def test_the_text_of_a_refusal_is_short_and_printable() -> None:
    with pytest.raises(UsageError) as raised:
        render("{{ raise_exception('no\\x1b[2J' ~ 'x' * 5000) }}", USER)
    assert len(raised.value.message) < 400 and raised.value.message.isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999 }}",
        "{% set ns = namespace(t='x') %}{% for i in range(64) %}{% set ns.t = ns.t ~ ns.t %}"
        "{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ messages.append(1) }}",
        "{{ undefined.attribute }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_hostile_templates_are_stopped_with_a_sentence(source: str) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"^the chat template (failed|cannot be read): "
    ) as raised:
        render(source, USER)
    assert len(raised.value.message) < 500


def long(part: str, before: str = "", after: str = "") -> str:
    return before + part * ((48 << 10) // len(part) - 40) + after


LONG_TEXT = "{% set n = namespace(s='ab' * 30000) %}" + "{% set n.s = n.s ~ n.s %}" * 6
LONG_LIST = "{% set x = range(400000) | list %}"
COSTLY = {
    "deep lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "deep loops": long("{% for a in [1] %}"),
    "deep conditions": "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "many conditions": long("{% elif 1 %}", "{% if 1 %}", "{% endif %}"),
    "more tokens than allowed": long("1<", "{{ ", "1 }}"),
    "many comparisons": "{{ " + "1<" * 7_990 + "1 }}",
    "many sums": "{{ " + "1~" * 7_990 + "1 }}",
    "many filters": long("|d", "{{ 1", " }}"),
    "many macros": "{% macro m() %}{% endmacro %}" * 1100,
    "many names": "".join(f"{{{{ v{number} }}}}" for number in range(3150)),
    "many digits": long("1_", "{{ ", "1 }}"),
    "open comments": long("{# "),
    "white space": long(" \n", "a", "{%- if 1 -%}{%- endif -%}"),
    "a long loop": "{% for i in range(10**12) %}{% endfor %}",
    "loops in loops": "{% for i in 'x' * 9999 %}{% for j in 'x' * 9999 %}{% endfor %}{% endfor %}",
    "a sorted text": LONG_TEXT + "{{ n.s | sort | length }}",
    "a text that is searched": LONG_TEXT
    + "{% for i in range(99999) %}{{ 'zz' in n.s }}{% endfor %}",
    "a text that is counted": LONG_TEXT + "{{ n.s.count('ab' * 500 ~ 'c') }}",
    "a text that is written": LONG_TEXT
    + "{% for i in range(9999) %}{{ n.s | tojson }}{% endfor %}",
    "lists that are compared": LONG_LIST
    + "{% for i in range(9999) %}{{ x == x + [] }}{% endfor %}",
    "lists that are sorted": LONG_LIST + "{% for i in range(99) %}{% set y = x|sort %}{% endfor %}",
    "products": "{{ 'a' * 10**9 }}{{ 9 ** 9 ** 9 }}",
    "a message that is counted": "{% for i in range(99) %}{{ messages[0].content | wordcount }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY)
def test_a_template_is_read_and_rendered_within_seconds(source: str) -> None:
    message = {"role": "user", "content": "x " * 2_000_000}
    # Collections would look at all that other tests have left.
    gc.freeze()
    begun = time.thread_time()
    with contextlib.suppress(ChatTemplateError, UsageError):
        render(source, message)
    seconds = time.thread_time() - begun
    gc.unfreeze()
    # To read it takes a second, and to render it 2 seconds at most. Without budgets it is minutes;
    # the rest is for machines that are slow, busy and traced.
    assert seconds < 20 * measure_slowness()


def test_the_names_of_templates_lead_nowhere() -> None:
    source = "{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}{{ messages[0].content }}"
    assert render(source, USER) == USER["content"]


TOOL_USE = "{{ tools[0].function.name }} {{ messages[0].content }}"


def test_the_template_for_tools_is_used_for_tools() -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "plain {{ messages[0].content }}"},
            {"name": "tool_use", "template": TOOL_USE},
            {"name": "rag", "template": "other"},
        ]
    }
    template = ChatTemplate(find_templates(config, lambda _: None), {})
    assert template.compose(TextRequest(messages=(USER,)))[0] == "plain Hi"
    assert template.compose(TextRequest(messages=(USER,), tools=(TOOL,)))[0] == "weather Hi"


@pytest.mark.parametrize(
    "config, files, expected",
    [
        ({"chat_template": "a"}, {}, {"default": "a"}),
        ({"chat_template": "a"}, {"chat_template.jinja": b"b"}, {"default": "b"}),
        ({}, {"chat_template.json": b'{"chat_template": "c"}'}, {"default": "c"}),
        ({"chat_template": {"tool_use": "t"}}, {}, {"tool_use": "t", "default": "t"}),
        ({"chat_template": 7}, {}, {}),
        ({}, {}, {}),
    ],
)
def test_places_of_templates(config: Any, files: dict[str, bytes], expected: Any) -> None:
    assert find_templates(config, files.get) == expected


def test_special_tokens_are_texts_or_objects() -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    assert parse_special_tokens(config) == TOKENS


def test_requests_beyond_the_capabilities_name_their_field() -> None:
    with pytest.raises(UsageError, match="no chat template") as raised:
        require_template(None)
    assert raised.value.facts["field"] == "messages"
    for options, field in (
        ({"tools": (TOOL,)}, "tools"),
        ({"thinking": True}, "thinking"),
        ({"schema": {}}, "response_format"),
        ({"alternatives": 1}, "logprobs"),
    ):
        with pytest.raises(UsageError) as raised:
            check_request(TextRequest(messages=(USER,), **options), frozenset())
        assert raised.value.facts["field"] == field
