"""Live language models as seen by unmodified clients: OpenAI's, ollama's, LiteLLM and LangChain.

``words`` gives one answer to every prompt, ``caller`` calls a function, ``vectors`` has a pooling,
``packed`` is a GGUF file. LiteLLM and LangChain are in the environment of AIMAGE_LITELLM_PYTHON,
other frameworks in that of AIMAGE_FRAMEWORKS_PYTHON, OpenAI's SDK for node in that of
AIMAGE_OPENAI_NODE.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")

import ollama
import openai

from tests.process import Aimage, spawn
from tests.program import lack
from tests.text.tiny_gguf import write_gguf
from tests.text.tiny_text import CONTEXT, add_pooling, write_model
from tests.worker.conftest import Worker, begin

pytestmark = pytest.mark.integration

PIECES = ("the ", "answer ", "is ", "nine")
ANSWER = "".join(PIECES)
CALL = ("<tool_call>", '{"name": "look", "arguments": {"at": 1}}', "</tool_call>")
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
HELLO = [{"role": "user", "content": "hello"}]
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    home = tmp_path_factory.mktemp("texts")
    here = Aimage(home, home / "store")
    words = write_model(home / "words", says=PIECES)
    here("create", "-q", "words", words)
    here("create", "-q", "caller", write_model(home / "caller", says=CALL))
    here("create", "-q", "vectors", add_pooling(write_model(home / "vectors", "qwen2")))
    here("create", "-q", "packed", write_gguf(home / "packed.gguf", words))
    found = begin(here, "--max-models", 4)
    yield found
    found.end()


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("model", ["words", "packed"])
def test_openai_chats_and_streams(client: Any, model: str) -> None:
    ask: dict[str, Any] = {"model": model, "messages": HELLO, "temperature": 0}
    made = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert made.choices[0].message.content == ANSWER
    assert made.choices[0].finish_reason == "stop"
    scored = made.choices[0].logprobs.content
    assert "".join(one.token for one in scored) == ANSWER
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in scored)
    assert made.usage.prompt_tokens > 5 and made.usage.completion_tokens >= len(PIECES)
    *chunks, counts = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert counts.usage.completion_tokens == made.usage.completion_tokens
    cut = client.chat.completions.create(**ask, max_completion_tokens=2).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("the answer ", "length")
    stopped = client.chat.completions.create(**ask, stop=" is").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("the answer", "stop")
    text = client.completions.create(model=model, prompt="a red ball", temperature=0)
    assert text.choices[0].text == ANSWER


def test_openai_tools(client: Any) -> None:
    ask: dict[str, Any] = {"model": "caller", "messages": HELLO, "tools": [LOOK]}
    (made,) = client.chat.completions.create(**ask).choices
    (call,) = made.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    assert made.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*HELLO, made.message, result]
    again = client.chat.completions.create(model="words", messages=messages, tools=[LOOK])
    assert again.choices[0].message.content == ANSWER


def test_openai_tools_that_are_forced(client: Any) -> None:
    look = {"type": "function", "function": {"name": "look"}}
    ask: dict[str, Any] = {"messages": HELLO, "tools": [LOOK], "max_tokens": 200}
    for choice in ("required", look):
        (made,) = client.chat.completions.create(
            model="packed", tool_choice=choice, parallel_tool_calls=False, **ask
        ).choices
        if made.finish_reason == "tool_calls":  # a scripted model may not end a number
            (call,) = made.message.tool_calls
            assert call.function.name == "look" and {*json.loads(call.function.arguments)} <= {"at"}
        with pytest.raises(openai.BadRequestError, match="GGUF") as caught:
            client.chat.completions.create(model="words", tool_choice=choice, **ask)
        assert caught.value.param == "tool_choice"


def test_openai_embeddings(client: Any) -> None:
    made = client.embeddings.create(model="vectors", input=["a red ball", "a blue cube"])
    first, second = (one.embedding for one in made.data)
    assert first != second and len(first) == 64
    assert math.isclose(sum(value * value for value in first), 1, rel_tol=1e-3)
    with pytest.raises(openai.BadRequestError, match="embedding"):
        client.embeddings.create(model="words", input="a")


def test_openai_schemas_where_the_runtime_has_grammars(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ask: dict[str, Any] = {"messages": HELLO, "response_format": shape, "max_tokens": 200}
    made = client.chat.completions.create(model="packed", **ask).choices[0]
    if made.finish_reason == "stop":  # a random model may not end a number
        assert type(json.loads(made.message.content)["a"]) is int
    assert made.message.content.lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="words", **ask)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("model", ["words", "packed"])
def test_openai_errors(client: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        long = [{"role": "user", "content": "a " * CONTEXT * 2}]
        client.chat.completions.create(model=model, messages=long, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in str(caught.value)
    with pytest.raises(openai.UnprocessableEntityError, match="language model"):
        client.images.generate(model=model, prompt="a dog")
    with pytest.raises(openai.NotFoundError, match="words:latest"):
        client.chat.completions.create(model="gone", messages=HELLO)


@pytest.mark.parametrize("model", ["words", "packed"])
def test_ollama(worker: Worker, model: str) -> None:
    with ollama.Client(worker.url) as found:
        options = {"temperature": 0, "num_ctx": 2048}
        made = found.chat(model, HELLO, options=options)
        assert (made.message.content, made.done_reason) == (ANSWER, "stop")
        assert made.eval_count >= len(PIECES) and made.eval_duration > 0
        parts = found.chat(model, HELLO, options=options, stream=True)
        assert "".join(part.message.content for part in parts) == ANSWER
        assert found.generate(model, "hello", options=options).response == ANSWER
        assert found.show(model).capabilities == ["completion", "tools", "thinking"]
        (loaded,) = (one for one in found.ps().models if one.model == f"{model}:latest")
        assert loaded.context_length == CONTEXT and loaded.size > 0


def test_ollama_tools_and_embeddings(worker: Worker) -> None:
    with ollama.Client(worker.url) as found:
        (call,) = found.chat("caller", HELLO, tools=[LOOK]).message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", {"at": 1})
        (vector,) = found.embed("vectors", "a red ball").embeddings
        assert len(vector) == 64
        assert found.embeddings("vectors", "a red ball").embedding == vector


def test_the_command_line_uses_a_worker(worker: Worker) -> None:
    here = Aimage(worker.aimage.home, worker.store, {"AIMAGE_HOST": worker.host})
    said = here.process("run", "--remote", "words", "hello")
    assert said.out.strip() == ANSWER


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "count"), [("directory", 400), ("gguf", 1500)])
def test_streams_go_on_after_a_crash_of_their_process(
    worker: Worker, client: Any, tmp_path: Path, kind: str, count: int
) -> None:
    """Nothing is missing or sent twice, with both runtimes, of texts that are drawn.

    llama.cpp rounds otherwise when it computes two texts at once, so only its tokens are counted.
    """
    made = write_model(tmp_path / kind, max_position_embeddings=1 << 12)
    path = made if kind == "directory" else write_gguf(tmp_path / "a.gguf", made)
    worker.aimage("create", "-q", kind, path)
    both = threading.Barrier(2)  # a crash with one text is its error

    def write(seed: int, crash: Callable[[], None] | None = None) -> str:
        body = {"model": kind, "prompt": "the red ball", "max_tokens": count, "seed": seed}
        options = {"extra_body": {"top_k": 9}, "stream_options": {"include_usage": True}}
        with client.completions.create(**body, **options, temperature=1, stream=True) as parts:
            found = next(parts).choices[0].text
            if crash is not None:
                both.wait(20)
                crash()
            *others, last, end = parts
        assert (last.choices[0].finish_reason, end.usage.completion_tokens) == ("length", count)
        return found + "".join(part.choices[0].text for part in (*others, last))

    def crash() -> None:
        children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSEGV)

    known = [write(seed) for seed in (1, 2)] if kind == "directory" else None
    with ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(write, (1, 2), (crash, lambda: None))]
    assert texts == (known or texts) and texts[0] != texts[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["words", "packed"])
def test_memory_is_flat_over_many_requests(
    worker: Worker, client: Any, model: str, count: int
) -> None:
    """Prompts differ, streams are left in the middle, and what is kept of prompts is bounded."""
    with ollama.Client(worker.url) as loaded:

        def resident() -> list[int]:
            """Return the bytes of the worker and of the model's process."""
            pages = int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1])
            sizes = [one.size for one in loaded.ps().models if one.model == f"{model}:latest"]
            return [pages * os.sysconf("SC_PAGE_SIZE"), *sizes]

        def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"{number} red balls " * (number % 20 + 1)}]
            with client.chat.completions.create(
                model=model, messages=messages, max_tokens=8, stream=True
            ) as parts:
                next(iter(parts))
                if number % 5:
                    assert [*parts][-1].choices[0].finish_reason == "stop"

        for number in range(50):  # caches of prompts and of the allocators fill
            ask(number)
        before = resident()
        for number in range(count):
            ask(number + 50)
        after = resident()
        assert len(after) == 2
        grown = [late - early for early, late in zip(before, after, strict=True)]
        assert max(grown) < 4 << 20, (before, after)


# -- clients in environments of their own


def _conversation(command: list[Any], **environment: str) -> Iterator[Call]:
    """Yield a function that sends a line of JSON to a process and returns its next line."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    known = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"} | environment
    with spawn(command, **pipes, stderr=subprocess.DEVNULL, env=known) as process:

        def ask(**message: Any) -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.communicate(timeout=30)
    assert process.returncode == 0


def _python(package: str) -> str:
    """Return the interpreter with LiteLLM and LangChain."""
    python = os.environ.get("AIMAGE_LITELLM_PYTHON")
    return python or lack(f"AIMAGE_LITELLM_PYTHON names no Python that has {package}")


@pytest.fixture(scope="module")
def litellm(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    home = str(tmp_path_factory.mktemp("litellm"))
    script = Path(__file__).with_name("litellm_client.py")
    settings = {"HOME": home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    yield from _conversation([_python("litellm"), script], **settings)


@pytest.fixture(scope="module")
def langchain(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    home = str(tmp_path_factory.mktemp("langchain"))
    script = Path(__file__).with_name("langchain_client.py")
    yield from _conversation([_python("langchain"), script], HOME=home)


@pytest.mark.parametrize(
    ("prefix", "end"), [("openai", "/v1"), ("ollama_chat", "")], ids=["openai", "ollama"]
)
def test_litellm(litellm: Call, worker: Worker, prefix: str, end: str) -> None:
    base = {"api_base": worker.url + end, "api_key": "none", "messages": HELLO, "max_retries": 0}
    said = litellm(function="completion", arguments={"model": f"{prefix}/words", **base})
    assert "made" in said, said
    assert said["made"]["choices"][0]["message"]["content"] == ANSWER, said
    assert said["made"]["usage"]["prompt_tokens"] > 5
    tools = {"model": f"{prefix}/caller", "tools": [LOOK], **base}
    said = litellm(function="completion", arguments=tools)
    assert "made" in said, said
    (call,) = said["made"]["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": 1}
    gone = litellm(function="completion", arguments={"model": f"{prefix}/gone", **base})
    assert gone["status"] in (404, 500) and "gone" in gone["message"]


def test_litellm_embeddings(litellm: Call, worker: Worker) -> None:
    arguments = {"model": "openai/vectors", "input": ["a red ball"], "api_key": "none"}
    said = litellm(function="embedding", arguments=arguments | {"api_base": f"{worker.url}/v1"})
    assert len(said["made"]["data"][0]["embedding"]) == 64, said


@pytest.mark.parametrize("kind", ["openai", "ollama"])
def test_langchain(langchain: Call, worker: Worker, kind: str) -> None:
    where: dict[str, Any] = (
        {"base_url": f"{worker.url}/v1", "api_key": "none", "max_retries": 0}
        if kind == "openai"
        else {"base_url": worker.url}
    )
    said = langchain(kind=kind, do="invoke", arguments={"model": "words", **where})
    assert said["made"]["content"] == ANSWER, said
    assert said["made"]["usage"]["output_tokens"] >= len(PIECES)
    parts = langchain(kind=kind, do="stream", arguments={"model": "words", **where})
    assert "".join(parts["made"]) == ANSWER
    assert len([part for part in parts["made"] if part]) > 1
    (call,) = langchain(kind=kind, do="tools", arguments={"model": "caller", **where})["made"]
    assert (call["name"], call["args"]) == ("look", {"at": 1})
    more = {"check_embedding_ctx_length": False} if kind == "openai" else {}
    found = langchain(kind=kind, do="embed", arguments={"model": "vectors", **where, **more})
    assert [len(vector) for vector in found["made"]] == [64, 64], found


@pytest.fixture(scope="module")
def framework(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    python = os.environ.get("AIMAGE_FRAMEWORKS_PYTHON")
    if not python:
        pytest.skip("AIMAGE_FRAMEWORKS_PYTHON names no Python with LlamaIndex and Haystack")
    script = Path(__file__).with_name("framework_client.py")
    yield from _conversation([python, script], HOME=str(tmp_path_factory.mktemp("frameworks")))


FRAMEWORKS = ("langchain", "llama-index ollama", "llama-index openai", "haystack")


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_frameworks(framework: Call, worker: Worker, kind: str) -> None:
    def ask(do: str, model: str) -> Any:
        said = framework(kind=kind, do=do, url=worker.url, model=model)
        assert "made" in said, said
        return said["made"]

    assert ask("chat", "words") == ANSWER
    parts = ask("stream", "words")
    assert "".join(parts) == ANSWER and len([part for part in parts if part]) > 1
    assert ask("json", "packed").startswith("{")
    if kind == "langchain":
        assert ask("stop", "words") == "the answer"
    else:
        assert ask("tools", "caller") == [["look", {"at": 1}]]
    if kind == "llama-index openai":
        assert {name for name, _ in ask("required", "packed")} == {"look"}


def test_openai_for_node(worker: Worker) -> None:
    place = os.environ.get("AIMAGE_OPENAI_NODE")
    if not place:
        pytest.skip("AIMAGE_OPENAI_NODE names no directory with OpenAI's SDK for node")
    script = Path(__file__).with_name("openai_node.mjs")
    for call in _conversation([shutil.which("node") or "node", script, place, worker.url]):
        chat: dict[str, Any] = {"model": "words", "messages": HELLO}
        (choice,) = call(name="chat", arguments=chat)["made"]["choices"]
        assert choice["message"]["content"] == ANSWER
        chunks = call(name="chat", arguments=chat | {"stream": True})["made"]
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == ANSWER
        said = call(name="embeddings", arguments={"model": "vectors", "input": "a red ball"})
        assert len(said["made"]["data"][0]["embedding"]) == 64
        failed = call(name="chat", arguments=chat | {"temperature": -1})
        assert (failed["status"], failed["param"]) == (400, "temperature")
