"""Values as clients write them: one rule for each kind, at every interface that has it."""

from __future__ import annotations

import base64
import json
from codecs import BOM_UTF8
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.api.batch.operation import BatchBody
from clowder_aimage.api.ollama.generate import OllamaPictureBody
from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaEmbedBody, OllamaPromptBody
from clowder_aimage.api.picture.request import EditRequest, ImageRequest, read_request
from clowder_aimage.api.request_body import RequestBody, check_fields, read_object
from clowder_aimage.api.text.request import ChatRequest, CompletionRequest
from clowder_aimage.engine.batch_line import read_line
from clowder_aimage.errors import FormatError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.model.text.content_form import join_parts
from clowder_aimage.pictures.input_file import decode_base64

USER = {"role": "user", "content": "a"}
BATCH = {"input_file_id": "a", "endpoint": "/v1/embeddings", "completion_window": "24h"}
LEAST = -(1 << 63)
MOST = (1 << 64) - 1


def read(kind: type[RequestBody], fields: dict[str, Any], *, is_form: bool = False) -> Any:
    """Return a body with these fields, and those that it requires."""
    required = {"messages": [USER]} if kind in (ChatRequest, OllamaChatBody) else {"prompt": "a"}
    body = (BATCH if kind is BatchBody else required) | fields
    if issubclass(kind, ImageRequest):
        return read_request(body, kind, is_form=is_form)
    return check_fields(read_object(json.dumps(body).encode()), kind)


def seed_of_text(kind: type[RequestBody], seed: object) -> int | None:
    fields = {"seed": seed} if kind in (ChatRequest, CompletionRequest) else {}
    body = read(kind, fields or {"options": {"seed": seed}})
    request = body.build_requests()[0] if fields else body.request()
    found: int | None = request.sampling.seed
    return found


def seed_of_picture(seed: object, *, is_form: bool = False) -> int | None:
    found: int | None = read(EditRequest, {"seed": seed}, is_form=is_form).stated.get("seed")
    return found


@pytest.mark.parametrize(
    ("stated", "seed"),
    [
        (0, 0),
        (42, 42),
        (42.0, 42),
        ("42", 42),
        ("42.0", 42),
        (MOST, MOST),
        (str(MOST), MOST),
        (-1, None),
        (-1.0, None),
        ("-1", None),
        (None, None),
        (-2, MOST - 1),
        (LEAST, 1 << 63),
    ],
    ids=str,
)
def test_a_seed_means_the_same_at_every_interface(stated: object, seed: int | None) -> None:
    for kind in (ChatRequest, CompletionRequest, OllamaChatBody, OllamaPromptBody):
        assert seed_of_text(kind, stated) == seed, kind
    assert seed_of_picture(stated) == seed
    assert seed_of_picture("null" if stated is None else str(stated), is_form=True) == seed
    for fields in ({"seed": stated}, {"options": {"seed": stated}}):
        drawn = read(OllamaPictureBody, fields).with_options()
        assert drawn.stated.get("seed") == seed


@pytest.mark.parametrize(
    "stated", [MOST + 1, LEAST - 1, 1.5, "x", "1e3", True, [1], 1e300], ids=str
)
def test_a_wrong_seed_has_one_message_with_exact_numbers(stated: object) -> None:
    messages = set()
    for kind in (ChatRequest, CompletionRequest, EditRequest, OllamaPictureBody):
        with pytest.raises(ApiError) as caught:
            read(kind, {"seed": stated})
        messages.add(caught.value.message)
    with pytest.raises(ApiError) as caught:
        read(OllamaChatBody, {"options": {"seed": stated}})
    assert messages == {caught.value.message}
    assert caught.value.message.startswith(f"seed must be a whole number from 0 to {MOST}")


def test_a_drawn_seed_is_the_same_wherever_it_is_read() -> None:
    body = read(ImageRequest, {"seed": -1})
    assert body.first_seed == body.first_seed == body.build_request(None).sampling.seed
    assert len({read(ImageRequest, {"seed": -1}).first_seed for _ in range(9)}) > 1


@pytest.mark.parametrize(
    ("stated", "stops"),
    [
        ("", []),
        (None, []),
        ([], []),
        ([""], []),
        (["", "x", None], ["x"]),
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([""] * 20, []),
    ],
    ids=str,
)
def test_empty_stop_texts_are_left_out(stated: object, stops: list[str]) -> None:
    for openai in (ChatRequest, CompletionRequest):
        assert read(openai, {"stop": stated}).build_requests()[0].stop == tuple(stops)
    for kind in (OllamaChatBody, OllamaPromptBody):
        for fields in ({"options": {"stop": stated}}, {"stop": stated}):
            body = read(kind, fields)
            assert (body.request().stop, body.ends_work) == (tuple(stops), False)


def test_ollamas_stop_is_a_flag_or_texts() -> None:
    assert read(OllamaPromptBody, {"stop": True}).ends_work
    both = read(OllamaPromptBody, {"stop": ["b", "a"], "options": {"stop": ["a"]}})
    assert both.request().stop == ("a", "b")
    for kind in (OllamaPictureBody, OllamaEmbedBody):
        assert [*read(kind, {"stop": ["a"]}).iter_ignored()] == ["stop"]
    for wrong in ([1], ["a"] * 17, ["a" * 1025], {"a": 1}, 1):
        with pytest.raises(ApiError, match="stop must be a boolean, or up to 16 texts"):
            read(OllamaPromptBody, {"stop": wrong})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (OllamaPromptBody, {"options": dict.fromkeys(("stop", "temperature", "seed", "mirostat"))}),
        (OllamaPromptBody, dict.fromkeys(("format", "images", "keep_alive", "system", "think"))),
        (OllamaChatBody, {"messages": [{**USER, "images": None, "tool_calls": None}]}),
        (OllamaPictureBody, {"options": {"width": None, "seed": None}, "images": None}),
        (ChatRequest, {"stream_options": {"include_usage": None}}),
        (ChatRequest, {"response_format": {"type": "text", "json_schema": None}}),
        (ChatRequest, {"messages": [{**USER, "name": None, "mood": None}]}),
        (
            ChatRequest,
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "cache": None}]}]},
        ),
        (
            ChatRequest,
            {"tools": [{"type": None, "function": {"name": "a", "parameters": None}}]},
        ),
        (ChatRequest, {"reasoning_effort": "", "messages": [{**USER, "name": ""}]}),
        (OllamaChatBody, {"think": "", "format": ""}),
        (ImageRequest, dict.fromkeys(("size", "quality", "background", "response_format"), "")),
        (BatchBody, {"metadata": {"a": None}, "output_expires_after": None, "prompt": None}),
        (ImageRequest, {"loras": [{"model": "a", "strength": None}], "output": None}),
    ],
    ids=str,
)
def test_nulls_and_empty_choices_count_as_absent(kind: type[RequestBody], fields: Any) -> None:
    body = read(kind, fields)
    assert not [*body.iter_ignored()] and getattr(body, "size", "auto") == "auto"


@pytest.mark.parametrize(("text", "is_form"), [("", False), ("", True), ("null", True)])
def test_an_absent_field_has_the_default_of_the_worker(text: str, is_form: bool) -> None:
    body = {"prompt": "a", "pull": text}
    assert read_request(body, ImageRequest, is_form=is_form, pull="never").pull == "never"


def test_alternatives_of_no_log_probabilities_ask_for_nothing() -> None:
    body = read(ChatRequest, {"logprobs": False, "top_logprobs": 0})
    assert body.build_requests()[0].alternatives is None


def test_numbers_of_tokens_may_have_no_bound() -> None:
    assert read(ChatRequest, {"max_tokens": -1}).build_requests()[0].max_tokens is None
    assert read(ChatRequest, {"max_completion_tokens": -1}).build_requests()[0].max_tokens is None
    assert read(CompletionRequest, {"max_tokens": -1}).build_requests()[0].max_tokens is None
    assert read(ChatRequest, {"max_tokens": 5.0}).build_requests()[0].max_tokens == 5
    for count in (-1, -2):
        assert (
            read(OllamaChatBody, {"options": {"num_predict": count}}).request().max_tokens is None
        )
    with pytest.raises(ApiError, match="max_tokens"):
        read(ChatRequest, {"max_tokens": -2})


@pytest.mark.parametrize(
    ("message", "content", "ignored"),
    [
        ({"content": [{"type": "refusal", "refusal": "no", "x": 1}]}, "no", ["content[0].x"]),
        ({"content": None}, "", []),
        ({"content": None, "reasoning_content": "x", "tool_calls": []}, "", []),
        ({"content": "a", "tool_call_id": "1"}, "a", ["tool_call_id"]),
        ({"content": "a", "tool_call_id": ""}, "a", []),
    ],
    ids=str,
)
def test_answers_that_are_sent_back_are_read(message: Any, content: str, ignored: Any) -> None:
    body = read(ChatRequest, {"messages": [{"role": "assistant", **message}, USER]})
    assert [*body.iter_ignored()] == [f"messages[0].{path}" for path in ignored]
    (asked,) = body.build_requests()
    assert join_parts(asked.messages[0]["content"]) == content


def test_a_raw_prompt_has_no_system_message() -> None:
    assert read(OllamaPromptBody, {"raw": True, "system": ""}).request().prompt == "a"
    with pytest.raises(ApiError, match="system cannot be combined with raw") as caught:
        read(OllamaPromptBody, {"raw": True, "system": "be brief"})
    assert (caught.value.status, caught.value.param) == (400, "system")


def test_a_mask_of_an_edit_may_be_in_its_image() -> None:
    fields = {"paste": True, "feather": 2}
    read(EditRequest, fields).check_rules({"image"})
    with pytest.raises(ApiError, match="requires a mask"):
        read(ImageRequest, fields).check_rules({"image"})


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        ("true", True),
        ("True", True),
        ("1", True),
        ("on", True),
        ("false", False),
        ("0", False),
    ],
)
def test_flags_of_a_form_are_texts(stated: str, value: bool) -> None:
    body = read(EditRequest, {"stream": stated, "trigger": stated, "enhance": stated}, is_form=True)
    assert (body.stream, body.trigger, body.enhance) == (value, value, value)
    parameters = read(EditRequest, {"fine": stated}, is_form=True).stated
    assert parameters["fine"] is value
    # A line that curl reads from a file has its end
    assert read(EditRequest, {"trigger": f" {stated}\r\n"}, is_form=True).trigger is value
    assert seed_of_picture(" 7\r\n", is_form=True) == 7
    texts = {"prompt": " 7\n", "negative_prompt": " x\n", "guidance": "2"}
    body = read(EditRequest, texts, is_form=True)
    assert (body.prompt, body.negative_prompt) == (" 7\n", " x\n")


@pytest.mark.parametrize("text", ["", "null", "undefined", "None"])
def test_an_empty_input_of_a_form_counts_as_absent(text: str) -> None:
    names = ("seed", "n", "size", "steps", "guidance", "stream", "loras", "quality", "model", "new")
    body = read(EditRequest, dict.fromkeys(names, text), is_form=True)
    assert not body.stated and not [*body.iter_ignored()]
    assert read(EditRequest, {"prompt": "null"}, is_form=True).prompt == "null"


DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        f"{TEXT}\n",
        base64.encodebytes(DATA).decode(),
        base64.encodebytes(DATA).decode().replace("\n", "\r\n"),
        f" \t{TEXT} ",
        TEXT.replace("+", "-").replace("/", "_"),
        TEXT.rstrip("="),
        TEXT.rstrip("=") + "\n",
    ],
    ids=range(8),
)
@pytest.mark.parametrize("chunk", [1, 3, 64, 1 << 20])
def test_base64_has_any_lines_alphabet_and_padding(
    monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setattr("clowder_aimage.pictures.input_file._CHUNK", chunk)
    assert decode_base64(text.encode()) == DATA


@pytest.mark.parametrize("text", ["a", "aGk=aGk=", "aGk" + "=" * 9, "a!bc", "aGkä", "=aGk"])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_what_is_not_base64_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setattr("clowder_aimage.pictures.input_file._CHUNK", chunk)
    with pytest.raises(ValueError, match=r"."):
        decode_base64(text.encode())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"prompt=a+dog&n=1", "is a form"),
        (b"--x\r\nContent-Disposition: form-data", "is a form"),
        ('{"a": 1}'.encode("utf-16"), "is in UTF-16"),
        (b"--", "is not valid JSON"),
        (b'"a=b"', "must be a JSON object"),
    ],
)
def test_bodies_of_other_types_are_named(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=f"the request body {message}") as caught:
        read_object(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_byte_order_mark_is_not_part_of_a_body() -> None:
    assert read_object(BOM_UTF8 + b'{"a": 1}') == {"a": 1}
    line = {"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "a"}}
    assert read_line(BOM_UTF8 + json.dumps(line).encode()).custom_id == "1"
    with pytest.raises(FormatError, match=r"UTF-16.*save it in UTF-8"):
        read_line(json.dumps(line).encode("utf-16"))
