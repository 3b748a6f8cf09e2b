"""Requests of the text APIs: what is accepted, what is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import web

from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaEmbedBody, OllamaPromptBody
from clowder_aimage.api.request_body import check_fields, read_object, record_ignored
from clowder_aimage.api.text.request import ChatRequest, CompletionRequest, EmbeddingsBody
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import RESPONSE_HEADERS, LocalRequest, add_recorded_headers
from clowder_aimage.http.route import INFER
from clowder_aimage.model.text.language_model import MAX_SEED, TextRequest

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED = {"name": "a", "schema": {"enum": [1]}, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def chat(**fields: Any) -> Any:
    raw = json.dumps({"messages": [USER], **fields}).encode()
    return check_fields(read_object(raw), ChatRequest)


def completion(**fields: Any) -> Any:
    return check_fields({"prompt": "a", **fields}, CompletionRequest)


def test_messages_are_passed_on_with_known_roles_and_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        tools=[TOOL],
    ).build_requests()
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    )
    assert request.tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").build_requests()[0].tools == ()


def test_parameters_are_passed_on() -> None:
    requests = chat(
        temperature=0,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-2,
        n=2,
        stop="x",
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=3,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": 1}}},
        reasoning_effort="none",
    ).build_requests()
    first, second = requests
    assert (first.sampling.seed, second.sampling.seed) == (MAX_SEED - 1, MAX_SEED)
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.min_p) == (0, 0, 0.1)
    assert (first.stop, first.max_tokens, first.alternatives) == (("x",), 5, 3)
    assert (first.schema, first.effort, first.thinking) == ({"a": 1}, "none", None)
    assert chat(response_format={"type": "json_object"}).build_requests()[0].schema == {}
    assert chat(response_format={"type": "text"}).build_requests()[0].schema is None
    thinks = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert thinks.build_requests()[0].thinking is False
    assert chat(logprobs=True).build_requests()[0].alternatives == 0
    assert chat(top_k=3).build_requests()[0].sampling.seed is None


@pytest.mark.parametrize(
    "stated",
    [
        {"type": "json_schema", "json_schema": NAMED},
        {"type": "json_schema", "schema": NAMED["schema"]},
        {"type": "json_object", "schema": NAMED["schema"], "json_schema": None},
        {"type": "json_object", "json_schema": NAMED},
    ],
    ids=str,
)
def test_a_schema_has_one_meaning_wherever_it_is(stated: dict[str, Any]) -> None:
    body = chat(response_format=stated)
    assert body.build_requests()[0].schema == {"enum": [1]}
    assert not [*body.iter_ignored()]
    prompt = check_fields({"prompt": "a", "format": NAMED["schema"]}, OllamaPromptBody)
    assert prompt.request().schema == {"enum": [1]}


@pytest.mark.parametrize(
    ("stated", "names", "has_one"),
    [
        ("auto", (), False),
        ("none", (), False),
        ("required", ("look", "stop"), False),
        ({"type": "required"}, ("look", "stop"), False),
        ({"type": "function", "function": {"name": "stop"}}, ("stop",), True),
    ],
    ids=str,
)
def test_calls_are_forced_by_tool_choice(
    stated: object, names: tuple[str, ...], has_one: bool
) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "stop"}}]
    (request,) = chat(tools=tools, tool_choice=stated).build_requests()
    assert (request.must_call, request.has_one_call) == (names, has_one)
    (request,) = chat(tools=tools, tool_choice=stated, parallel_tool_calls=False).build_requests()
    assert request.has_one_call
    assert TextRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{**USER, "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0]"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": {}, "json_schema": NAMED}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "x" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{at}": 1 for at in range(33)}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
    ids=str,
)
def test_a_chat_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


def test_prompts_are_continued_in_order() -> None:
    requests = completion(prompt=["a", "b"], n=2, seed=4, logprobs=2).build_requests()
    assert [(one.prompt, one.sampling.seed) for one in requests] == [
        ("a", 4),
        ("a", 5),
        ("b", 4),
        ("b", 5),
    ]
    assert (requests[0].max_tokens, requests[0].alternatives) == (16, 2)
    assert completion(best_of=1, suffix=None, max_tokens=7).build_requests()[0].max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=str,
)
def test_a_completion_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [1, 2]}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
    ],
    ids=str,
)
def test_embeddings_are_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields(fields, EmbeddingsBody)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_unknown_fields_are_ignored_unless_strict() -> None:
    request = LocalRequest("POST", "/v1/chat/completions", scope=INFER)
    body = chat(user="ann", metadata={"a": "b"}, other=1)
    record_ignored(request, body)
    assert request[RESPONSE_HEADERS] == {"X-Aimage-Ignored": "other"}
    assert "ann" not in repr(body)
    with pytest.raises(ApiError, match="unknown parameter 'other'"):
        record_ignored(LocalRequest("POST", "/v1?strict=1", scope=INFER), body)
    with pytest.raises(ApiError, match="unknown parameter 'other'"):
        record_ignored(request, chat(other=1, strict=True))


@pytest.mark.parametrize("stated", ["", "other, reasoning_effort"])
def test_the_fields_that_a_worker_ignores_are_kept_by_its_gateway(stated: str) -> None:
    request = LocalRequest("POST", "/v1/chat/completions", scope=INFER)
    record_ignored(request, chat(other=1))
    response = web.Response(headers={"X-Aimage-Ignored": stated} if stated else {})
    add_recorded_headers(request, response)
    assert response.headers["X-Aimage-Ignored"] == (stated or "other")


def test_ollamas_messages_and_options_become_openais() -> None:
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    body = check_fields(
        {
            "model": "a",
            "messages": [
                {"role": "assistant", "thinking": "hm", "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_name": "look"},
            ],
            "format": "json",
            "think": "low",
            "options": {"num_predict": -1, "seed": -1, "repeat_penalty": 1.5, "stop": ["x"]}
            | {"num_ctx": 2048, "mirostat": 1},
        },
        OllamaChatBody,
    )
    request = body.request()
    first, second = request.messages
    function = {"name": "look", "arguments": '{"at": 1}'}
    assert first["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert (first["content"], first["reasoning_content"]) == ("", "hm")
    assert (second["name"], second["content"]) == ("look", "3")
    assert (request.schema, request.thinking, request.stop) == ({}, True, ("x",))
    assert (request.max_tokens, request.sampling.seed) == (None, None)
    assert request.sampling.repetition_penalty == 1.5


def test_ollamas_prompts_are_messages_unless_raw() -> None:
    body = check_fields({"prompt": "a", "system": "b", "context": [1]}, OllamaPromptBody)
    assert body.request().messages == (
        {"role": "system", "content": "b"},
        {"role": "user", "content": "a"},
    )
    raw = check_fields({"prompt": "a", "raw": True}, OllamaPromptBody).request()
    assert (raw.prompt, raw.messages) == ("a", ())
    schema = {"type": "object"}
    formatted = check_fields({"prompt": "a", "format": schema}, OllamaPromptBody)
    assert formatted.request().schema == schema
    assert check_fields({"input": ["a", "b"]}, OllamaEmbedBody).texts == ("a", "b")
    assert check_fields({"prompt": "a"}, OllamaEmbedBody).texts == ("a",)
    assert check_fields({"input": ""}, OllamaEmbedBody).texts == ()


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (OllamaPromptBody, {"suffix": "b"}, "suffix"),
        (OllamaPromptBody, {"template": "{{ .Prompt }}"}, "template"),
        (OllamaPromptBody, {"images": ["AAAA"]}, "images"),
        (OllamaPromptBody, {"format": "xml"}, "format"),
        (OllamaPromptBody, {"options": {"temperature": "hot"}}, "temperature"),
        (OllamaChatBody, {"messages": [{"role": "user", "images": ["AAAA"]}]}, "messages[0]"),
        (OllamaChatBody, {"think": "hard"}, "think"),
        (OllamaEmbedBody, {"input": "a", "dimensions": 4}, "dimensions"),
        (OllamaEmbedBody, {"input": ["a", ""]}, "input"),
    ],
    ids=str,
)
def test_ollamas_requests_are_refused_by_field(kind: Any, fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_fields(fields, kind)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("last", "fields", "is_continued", "has_opening"),
    [
        ("assistant", {}, True, True),
        ("user", {}, False, True),
        ("assistant", {"continue_final_message": False}, False, True),
        ("assistant", {"add_generation_prompt": True}, False, True),
        (
            "assistant",
            {"continue_final_message": True, "add_generation_prompt": False},
            True,
            False,
        ),
        ("assistant", {"response_format": {"type": "json_object"}}, False, True),
        ("user", {"add_generation_prompt": False}, False, False),
    ],
    ids=str,
)
def test_a_last_message_of_the_assistant_is_continued(
    last: str, fields: Any, is_continued: bool, has_opening: bool
) -> None:
    (request,) = chat(messages=[USER, {"role": last, "content": "so"}], **fields).build_requests()
    assert (request.is_continued, request.has_opening) == (is_continued, has_opening)


def test_variables_of_a_template_are_passed_on() -> None:
    options = {"thinking": True, "budget": {"a": [1]}, "absent": None}
    (request,) = chat(chat_template_kwargs=options, reasoning_effort="low").build_requests()
    assert request.template_options == {"thinking": True, "budget": {"a": [1]}}
    assert (request.thinking, request.effort) == (True, "low")
    sent = TextRequest.from_json(json.loads(json.dumps(request.to_json())))
    assert sent == request


def test_levels_of_ollama_are_passed_on() -> None:
    for think, expected in ((True, (True, None)), ("high", (True, "high")), (None, (None, None))):
        made = check_fields({"messages": [USER], "think": think}, OllamaChatBody).request()
        assert (made.thinking, made.effort) == expected
    answered = [USER, {"role": "assistant", "content": "so"}]
    assert check_fields({"messages": answered}, OllamaChatBody).request().is_continued
    assert (
        not check_fields({"messages": answered, "format": "json"}, OllamaChatBody)
        .request()
        .is_continued
    )
