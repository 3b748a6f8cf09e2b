"""OpenAI's text APIs over a scripted language model: as the SDK types them, and as it sees them."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("openai")

import openai
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from clowder_aimage.api import answer_stream
from clowder_aimage.config.token_file import read_tokens
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.scripted_language_model import CONTEXT
from tests.worker.test_promises_openai import check
from tests.worker.text_worker import add_models, events_of, scripted_worker

CHAT = "/v1/chat/completions"
SECRET = "zebra"
MORE = frozenset({"reasoning_content", "timings"})


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("words")
    here = Aimage(home, home / "store")
    add_models(here, home)
    here("create", "-q", "tiny", TINY, "--whole-files")
    with scripted_worker(here, "--alias", "gpt=words", "--max-models", "2") as found:
        yield found


@pytest.fixture
def client(worker: LocalWorker) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(worker: LocalWorker, path: str = CHAT, **body: Any) -> tuple[int, Any, bytes]:
    headers = {"Content-Type": "application/json"} | body.pop("headers", {})
    if path == CHAT and isinstance(body.get("messages", ""), str):
        body["messages"] = said(body.pop("messages", "one two"))
    data = json.dumps({"model": "words"} | body).encode()
    return answer_to(urllib.request.Request(worker.url + path, data, headers))


def test_a_chat_has_the_types_and_counts_of_the_sdk(worker: LocalWorker) -> None:
    status, headers, body = ask(worker, messages="hm one two", user=SECRET, other=1)
    assert status == 200, body
    found = json.loads(body)
    check(found, ChatCompletion, MORE)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "one two "
    assert choice["message"]["reasoning_content"] == "hm "
    assert choice["finish_reason"] == "stop"
    assert found["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    digest = headers["X-Aimage-Digest"]
    assert found["system_fingerprint"] == "fp_" + digest.removeprefix("sha256:")[:12]
    assert (headers["X-Aimage-Model"], found["model"]) == ("words:latest", "words:latest")
    assert headers["X-Aimage-Ignored"] == "other"


MESSAGES = [{"role": "system", "content": "Be brief."}, *said("one two")]
# Read in the sources of Open WebUI (routers/openai.py, routers/tasks.py) and Continue
# (core/llm/llms/OpenAI.ts), and in LibreChat's documentation ("Default Parameters"), 2026-11
PROGRAMS: dict[str, dict[str, Any]] = {
    "Open WebUI": {"stream": True, "stream_options": {"include_usage": True}},
    "Open WebUI, title": {"stream": False, "max_completion_tokens": 1000},
    "LibreChat": dict.fromkeys(("temperature", "top_p", "n"), 1)
    | dict.fromkeys(("presence_penalty", "frequency_penalty"), 0)
    | {"user": "65f2", "stream": True, "stream_options": {"include_usage": True}},
    "Continue": {"max_tokens": 4096, "temperature": 0.5, "stream": True, "stop": ["\n\n\n"]},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_requests_of_programs_are_served_whole(worker: LocalWorker, program: str) -> None:
    """With the settings of docs/clients.md; no field is refused or left out."""
    key = {"Authorization": "Bearer none", "api-key": "none"}
    status, headers, body = ask(worker, messages=MESSAGES, headers=key, **PROGRAMS[program])
    assert (status, headers["X-Aimage-Ignored"], headers["X-Aimage-Warning"]) == (200, None, None)
    if PROGRAMS[program]["stream"]:
        parts = [one["choices"][0]["delta"] for one in events_of(body)[:-1] if one["choices"]]
        assert "".join(part.get("content", "") for part in parts) == "one two "
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "one two "


def test_a_stream_has_the_types_of_the_sdk_and_ends_with_its_mark(worker: LocalWorker) -> None:
    usage = {"include_usage": True}
    status, headers, body = ask(worker, messages="hm one two", stream=True, stream_options=usage)
    assert (status, headers.get_content_type()) == (200, "text/event-stream")
    assert headers["X-Aimage-Digest"].startswith("sha256:")
    *chunks, done = events_of(body)
    assert done == "[DONE]"
    for chunk in chunks:
        check(chunk, ChatCompletionChunk, MORE)
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    first, thought, *answer, last = deltas
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    assert thought == {"reasoning_content": "hm "}
    assert "".join(delta["content"] for delta in answer) == "one two "  # pieces may be joined
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 10)
    assert chunks[-1]["timings"] == {"prompt_ms": 500, "predicted_ms": 250}
    assert "usage" not in events_of(ask(worker, stream=True)[2])[-2]


def test_several_choices_are_made_in_sequence(worker: LocalWorker) -> None:
    found = json.loads(ask(worker, messages="one two three", n=3, max_tokens=2)[2])
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert {one["message"]["content"] for one in found["choices"]} == {"one two "}
    assert {one["finish_reason"] for one in found["choices"]} == {"length"}
    assert found["usage"]["prompt_tokens"] == 7  # once
    assert found["usage"]["completion_tokens"] == 9


def test_log_probabilities_are_those_of_the_tokens(worker: LocalWorker, client: Any) -> None:
    made = client.chat.completions.create(
        model="words", messages=said("one"), logprobs=True, top_logprobs=1
    )
    (token,) = made.choices[0].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("one", -0.5, [111, 110, 101])
    assert [(one.token, one.logprob) for one in token.top_logprobs] == [("other", -2.5)]
    stream = client.chat.completions.create(
        model="words", messages=said("one"), logprobs=True, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
    assert [part.content[0].token for part in parts if part] == ["one"]
    old = json.loads(ask(worker, "/v1/completions", prompt="one two", logprobs=1)[2])
    check(old, Completion)
    assert old["choices"][0]["logprobs"] == {
        "tokens": ["one", "two"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"other": -2.5}] * 2,
        "text_offset": [0, 3],
    }


def test_calls_of_functions(client: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ask_for: dict[str, Any] = {"model": "words", "messages": said("call call"), "tools": tools}
    made = client.chat.completions.create(**ask_for).choices[0]
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    calls = made.message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in calls] == [
        ("look", '{"at": 1}')
    ] * 2
    assert len({one.id for one in calls}) == 2
    one = client.chat.completions.create(**ask_for, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1
    chunks = list(client.chat.completions.create(**ask_for, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [(part.index, part.function.name) for part in parts] == [(0, "look"), (1, "look")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_completions_continue_each_prompt(worker: LocalWorker) -> None:
    body: dict[str, Any] = {"prompt": ["one two", "three"], "n": 2, "echo": True}
    found = json.loads(ask(worker, "/v1/completions", **body)[2])
    check(found, Completion)
    assert [one["text"] for one in found["choices"]] == ["one twoone two "] * 2 + [
        "threethree "
    ] * 2
    assert found["usage"]["prompt_tokens"] == 14
    *chunks, _ = events_of(ask(worker, "/v1/completions", **body, stream=True)[2])
    for chunk in chunks:  # the SDK has one type for both; only the last chunks have a reason
        choices = [
            {**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]
        ]
        check(chunk | {"choices": choices}, Completion)
    texts = ["", "", "", ""]
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [one["text"] for one in found["choices"]]


def test_embeddings_are_numbers_or_packed(worker: LocalWorker, client: Any) -> None:
    status, headers, body = ask(worker, "/v1/embeddings", model="vectors", input=["abc", "de f"])
    assert status == 200, body
    found = json.loads(body)
    check(found, CreateEmbeddingResponse)
    assert [one["embedding"] for one in found["data"]] == [[3.0, 0.5], [4.0, 0.5]]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert headers["X-Aimage-Model"] == "vectors:latest"
    body = ask(worker, "/v1/embeddings", model="vectors", input="abc", encoding_format="base64")[2]
    packed = json.loads(body)["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(packed)) == (3.0, 0.5)
    made = client.embeddings.create(model="vectors", input="abc")  # asks for base64
    assert made.data[0].embedding == [3.0, 0.5]


def test_cut_texts_are_told_and_prompts_are_named(worker: LocalWorker) -> None:
    path, texts = "/v1/embeddings", ["abc", "is cut"]
    status, headers, body = ask(worker, path, model="vectors", input=texts, prompt_name="query")
    warning = "1 of 2 texts were cut: the model reads 9 tokens of a text"
    assert (status, headers["X-Aimage-Warning"]) == (200, warning)
    assert json.loads(body)["warnings"] == [warning]
    status, _, body = ask(worker, path, model="vectors", input="abc", prompt_name="x")
    assert (status, json.loads(body)["error"]["param"]) == (400, "prompt_name")
    assert "X-Aimage-Warning" not in ask(worker, path, model="vectors", input="abc")[1]


def test_models_have_capabilities(worker: LocalWorker) -> None:
    models = {one["id"]: one for one in worker.get("/v1/models")["data"]}
    assert models["words:latest"]["capabilities"] == ["chat", "completion", "tools", "thinking"]
    assert models["plain:latest"]["capabilities"] == ["completion"]
    assert models["vectors:latest"]["capabilities"] == ["embedding"]
    assert models["tiny:latest"]["capabilities"] == ["image"]
    assert models["words:latest"]["context_length"] == models["gpt"]["context_length"] == 512
    assert "context_length" not in models["tiny:latest"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"model": "tiny"}, "tiny:latest generates pictures; use /v1/images/generations"),
        (CHAT, {"model": "vectors"}, "vectors:latest computes embeddings; use /v1/embeddings"),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "a"},
            "tiny:latest generates pictures; use /v1/images/generations",
        ),
        (
            "/v1/embeddings",
            {"model": "tiny", "input": "a"},
            "tiny:latest generates pictures; use /v1/images/generations",
        ),
        (
            "/v1/images/generations",
            {"prompt": "a"},
            "words:latest is a language model; use /v1/chat/completions",
        ),
        (
            "/v1/images/generations",
            {"prompt": "a", "model": "vectors"},
            "vectors:latest computes embeddings; use /v1/embeddings",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused_with_its_route(
    worker: LocalWorker, path: str, body: dict[str, Any], message: str
) -> None:
    status, _, answer = ask(worker, path, **body)
    error = json.loads(answer)["error"]
    assert (status, error["message"]) == (422, f"model {message}")
    assert (error["code"], error["param"]) == ("model_not_supported", "model")


def test_a_missing_model_is_answered_with_those_that_could_serve(worker: LocalWorker) -> None:
    status, _, body = ask(worker, model="gone")
    message = json.loads(body)["error"]["message"]
    assert status == 404 and "words:latest" in message and "tiny" not in message
    status, _, body = ask(worker, "/v1/images/generations", model="gone", prompt="a")
    assert "tiny:latest" in (message := json.loads(body)["error"]["message"]), status
    assert "words" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(client: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="words", messages=said("a " * (CONTEXT + 1)), stream=stream
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert f"{CONTEXT + 1} tokens" in str(caught.value) and f"has {CONTEXT}" in str(caught.value)


def test_a_comment_begins_a_stream_after_a_long_silence(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes longer here than a proxy waits; a later error is an event then."""
    monkeypatch.setattr(answer_stream, "KEEP_ALIVE", 0.05)
    monkeypatch.setattr(answer_stream, "TICK", 0.02)
    unload = {"model": "words", "keep_alive": 0}
    raw = json.dumps(unload).encode()
    assert answer_to(urllib.request.Request(f"{worker.url}/api/chat", raw))[0] == 200
    status, _, body = ask(worker, messages="a " * (CONTEXT + 1), stream=True)
    assert status == 200 and body.startswith(b": keep-alive\n\n")
    assert b"event: error\n" in body and b"context_length_exceeded" in body
    assert b"[DONE]" not in body


def test_errors_name_the_field_before_a_model_is_loaded(worker: LocalWorker, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="words", messages=said("a"), temperature=-1)
    assert caught.value.param == "temperature"
    strict = f"{CHAT}?strict=1"
    body = {"messages": said("a"), "other": 1}
    assert json.loads(ask(worker, strict, **body)[2])["error"]["param"] == "other"


def test_a_failure_after_the_first_piece_is_an_event(client: Any, worker: LocalWorker) -> None:
    with pytest.raises(openai.APIError, match="the model failed"):
        list(client.chat.completions.create(model="words", messages=said("a fail"), stream=True))
    status, _, body = ask(worker, messages="a fail")
    assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
    assert json.loads(ask(worker)[2])["choices"][0]["message"]["content"] == "one two "


def test_a_client_that_leaves_ends_its_text(worker: LocalWorker) -> None:
    with closing(http.client.HTTPConnection(worker.host, timeout=30)) as connection:
        body = {"model": "words", "stream": True, "messages": said("slow " * CONTEXT)}
        connection.request("POST", CHAT, json.dumps(body))
        assert connection.getresponse().read1(10)
    engine = worker.service.engine
    for _ in range(1000):
        ask(worker, messages="one")  # takes a turn beside it, while it is served
        if not engine._requests:
            break
    assert not engine._requests


def test_no_prompt_or_answer_is_logged(
    worker: LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(worker, messages=f"{SECRET} fail", user=SECRET)
    ask(worker, messages=[{"role": "user", "content": [{"type": SECRET}]}])
    ask(worker, messages=SECRET, stream=True)
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    assert SECRET not in caplog.text + metrics
    assert "aimage_text_tokens_total" in metrics


def test_a_large_chat_is_accepted(worker: LocalWorker) -> None:
    """A chat may have more than the megabyte of other requests, but not more than four."""
    system = {"role": "system", "content": "x" * (1 << 21)}
    status, _, body = ask(worker, messages=[system, *said("one")])
    assert status == 200, body[:200]
    system["content"] *= 2
    assert ask(worker, messages=[system])[0] == 413


def test_scopes_are_those_of_pictures(worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"infer {'i' * 16}\n")
    tokens.chmod(0o600)
    assert read_tokens(tokens)
    other = worker.start("--token-file", tokens)
    assert ask(other)[0] == 401
    bearer = {"Authorization": f"Bearer {'i' * 16}"}
    assert ask(other, headers=bearer)[0] == 200
    pulled = ask(other, headers=bearer, model="registry.example.com/a/b:v1", pull="always")
    assert pulled[0] == 404


@pytest.mark.integration
def test_a_missing_language_model_is_pulled(
    worker: LocalWorker, registry: RealRegistry, repository: str
) -> None:
    texts, pictures = (Reference.parse(f"{repository}:{tag}") for tag in ("texts", "pictures"))
    store = LayeredStore([worker.store])
    for name, there in ("words", texts), ("tiny", pictures):
        store.tag(store.resolve(Reference.parse(name)), there)
        worker.aimage("push", "-q", there)
        worker.aimage("rm", "-q", there)
    assert registry and ask(worker, model=str(texts), pull="never")[0] == 404
    status, headers, body = ask(worker, model=str(texts))
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "one two ")
    assert headers["X-Aimage-Digest"] == str(store.resolve(texts).digest)
    *chunks, _ = events_of(ask(worker, model=str(texts), pull="always", stream=True)[2])
    assert chunks[0]["system_fingerprint"].startswith("fp_")
    status, _, body = ask(worker, model=str(pictures))
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (422, "model_not_supported", "model")


def test_a_list_that_is_too_long_is_refused_in_a_sentence(worker: LocalWorker) -> None:
    status, _, answer = ask(worker, stop=["x"] * 17)
    message = json.loads(answer)["error"]["message"]
    assert (status, message) == (400, "stop must have at most 16 items, not 17")


@pytest.mark.parametrize("stream", [False, True])
def test_remarks_of_a_model_are_headers(worker: LocalWorker, stream: bool) -> None:
    body: dict[str, Any] = {"messages": "notice one", "other": 1, "n": 2, "stream": stream}
    body["stream_options"] = {"include_usage": True}
    status, headers, answer = ask(worker, **body)
    assert (status, headers["X-Aimage-Ignored"]) == (200, "other, reasoning_effort")
    assert headers.get_all("X-Aimage-Warning") == ["the template leaves out \\xc4"]
    assert b"notice " in answer
    last = events_of(answer)[-2] if stream else json.loads(answer)
    assert last["warnings"] == ["the template leaves out Ä"]
    status, _, answer = ask(worker, f"{CHAT}?strict=1", messages=said("notice one"), stream=stream)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "messages"),
        ({"continue_final_message": True, "response_format": {"type": "json_object"}}, "messages"),
        ({"continue_final_message": True, "messages": said("a")}, "messages"),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused(worker: LocalWorker, body: Any, param: str) -> None:
    answered = [*said("one"), {"role": "assistant", "content": "two"}]
    status, _, answer = ask(worker, **{"messages": answered} | body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, param)
    fresh = {"continue_final_message": False, "messages": answered}
    assert ask(worker, **body | fresh)[0] == 200 or "response_format" in body
