"""ollama's API of language models over a scripted one, by its unmodified client and by HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("ollama")

import ollama

from tests.conftest import TINY
from tests.process import Aimage
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.scripted_language_model import CONTEXT
from tests.worker.text_worker import add_models, scripted_worker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("words")
    here = Aimage(home, home / "store")
    add_models(here, home)
    here("create", "-q", "tiny", TINY, "--whole-files")
    with scripted_worker(here, "--default-model", "words") as found:
        yield found


@pytest.fixture
def client(worker: LocalWorker) -> Iterator[Any]:
    with ollama.Client(worker.url) as found:
        yield found


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(worker: LocalWorker, path: str, **body: Any) -> tuple[int, list[Any]]:
    """Return the status and the lines of a response."""
    asked = urllib.request.Request(worker.url + path, json.dumps(body).encode())
    status, _, answer = answer_to(asked)
    return status, [json.loads(line) for line in answer.splitlines()]


def test_a_chat_is_streamed_in_lines_with_counts(worker: LocalWorker) -> None:
    status, lines = ask(worker, "/api/chat", model="words", messages=said("hm one call two"))
    assert status == 200
    *parts, last = lines
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": "", "thinking": "hm "},
        {"role": "assistant", "content": "one "},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}],
        },
        {"role": "assistant", "content": "two "},
    ]
    assert not any(part["done"] for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 4)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (500_000_000, 250_000_000)
    assert last["total_duration"] > last["load_duration"] >= 0
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None


def test_the_client_reads_whole_chats_and_streams(client: Any) -> None:
    made = client.chat("words", said("hm one two"), think=True, options={"num_predict": 2})
    assert (made.message.content, made.message.thinking) == ("one ", "hm ")
    assert made.done_reason == "length"
    parts = list(client.chat("words", said("one two"), stream=True))
    assert "".join(part.message.content for part in parts) == "one two "
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    called = client.chat("words", said("call"), tools=[tool]).message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in called] == [("look", {"at": 1})]
    scored = client.chat("words", said("one"), logprobs=True, top_logprobs=1)
    assert scored.logprobs[0].token == "one"
    assert scored.logprobs[0].top_logprobs[0].token == "other"


def test_generate_answers_with_text_or_a_picture_as_the_model_does(client: Any) -> None:
    made = client.generate("words", "one two", system="be brief")
    assert (made.response, made.done_reason, made.eval_count) == ("one two ", "stop", 2)
    parts = list(client.generate("words", "one two", stream=True, raw=True))
    assert "".join(part.response for part in parts) == "one two "
    with pytest.raises(ollama.ResponseError, match="width"):  # a field of pictures
        client.generate("tiny", "a dog", width=99999, height=99999)


def test_embeddings_of_both_routes(client: Any, worker: LocalWorker) -> None:
    made = client.embed("vectors", ["abc", "de f"])
    assert made.embeddings == [[3.0, 0.5], [4.0, 0.5]]
    assert made.prompt_eval_count == 3
    assert client.embeddings("vectors", "abc").embedding == [3.0, 0.5]
    assert ask(worker, "/api/embed", model="vectors")[1][0]["embeddings"] == []
    assert ask(worker, "/api/embeddings", model="vectors")[1] == [{"embedding": []}]


def test_cut_texts_are_told_in_a_header(worker: LocalWorker) -> None:
    body = {"model": "vectors", "input": "is cut", "prompt_name": "query"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{worker.url}/api/embed", data)
    _, headers, _ = answer_to(request)
    assert headers["X-Aimage-Warning"] == "the text was cut: the model reads 9 tokens of a text"


def test_a_model_is_loaded_and_unloaded_without_a_prompt(client: Any) -> None:
    assert client.chat("words").done_reason == "load"
    # Those of other tests may be loaded too.
    loaded = {model.model: model.context_length for model in client.ps().models}
    assert loaded["words:latest"] == CONTEXT
    assert client.chat("words", keep_alive=0).done_reason == "unload"
    assert "words:latest" not in [model.model for model in client.ps().models]
    assert client.generate("words").done_reason == "load"
    assert client.generate("words", keep_alive=0).done_reason == "unload"


def test_models_are_described_as_ollama_does(client: Any, worker: LocalWorker) -> None:
    shown = client.show("words")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert "<|im_start|>" in shown.template
    assert shown.modelinfo["Qwen3ForCausalLM.context_length"] == 512
    assert shown.details.format == "transformers"
    assert client.show("plain").capabilities == ["completion"]
    assert client.show("vectors").capabilities == ["embedding"]
    found = {one["name"]: one["capabilities"] for one in worker.get("/api/tags")["models"]}
    assert found["words:latest"] == ["completion", "tools", "thinking"]
    assert found["tiny:latest"] == ["image"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/chat", {"model": "tiny"}, 422, "tiny:latest generates pictures; use /api/generate"),
        ("/api/chat", {"model": "vectors"}, 422, "computes embeddings; use /api/embed"),
        ("/api/embed", {"model": "tiny", "input": "a"}, 422, "use /api/generate"),
        ("/api/chat", {"model": "gone"}, 404, "gone"),
        ("/api/generate", {"model": "words", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"model": "words", "prompt": "a", "images": ["AA"]}, 400, "images"),
        ("/api/generate", {"model": "words", "prompt": "a " * 600}, 400, f"has {CONTEXT}"),
        ("/api/chat", {"options": {"temperature": -1}}, 400, "temperature"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
    ],
    ids=str,
)
def test_refusals(
    worker: LocalWorker, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    given = {"model": "words"} | ({"messages": said("a")} if path == "/api/chat" else {})
    found = ask(worker, path, **given | body)
    assert found[0] == status, found
    assert message in found[1][0]["error"]


def test_a_failure_in_a_stream_is_its_last_line(client: Any, worker: LocalWorker) -> None:
    status, lines = ask(worker, "/api/chat", model="words", messages=said("one fail"))
    assert (status, lines[-1]["status"]) == (200, 500)
    assert lines[-1]["error"].startswith("the model failed")
    with pytest.raises(ollama.ResponseError, match="the model failed"):
        client.chat("words", said("one fail"))


def test_only_admins_change_how_long_a_model_stays(worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"infer {'i' * 16}\n")
    tokens.chmod(0o600)
    other = ollama.Client(
        worker.start("--token-file", tokens).url, headers={"Authorization": f"Bearer {'i' * 16}"}
    )
    with other:
        assert other.chat("words", said("one")).message.content == "one "
        with pytest.raises(ollama.ResponseError, match="scope admin") as caught:
            other.chat("words", keep_alive=0)
    assert caught.value.status_code == 403


@pytest.mark.parametrize("stream", [False, True])
def test_remarks_of_a_model_are_headers(worker: LocalWorker, stream: bool) -> None:
    body = {"model": "words", "messages": said("notice one"), "stream": stream, "other": 1}
    asked = urllib.request.Request(f"{worker.url}/api/chat", json.dumps(body).encode())
    status, headers, answer = answer_to(asked)
    assert json.loads(answer.splitlines()[-1])["warnings"] == ["the template leaves out Ä"]
    assert (status, headers["X-Aimage-Ignored"]) == (200, "other, reasoning_effort")
    assert headers.get_all("X-Aimage-Warning") == ["the template leaves out \\xc4"]


def test_a_last_message_of_the_assistant_is_not_continued_with_tools(worker: LocalWorker) -> None:
    answered = [*said("one"), {"role": "assistant", "content": "two"}]
    tool = {"type": "function", "function": {"name": "look"}}
    body: dict[str, Any] = {"model": "words", "messages": answered}
    assert ask(worker, "/api/chat", **body)[0] == 200
    status, lines = ask(worker, "/api/chat", **body, tools=[tool])
    assert status == 400 and "cannot be continued with tools" in lines[0]["error"]
