"""GGUF models in llama.cpp: texts, embeddings, adapters, and what remains of its server."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xllamacpp

from clowder_aimage.create import create
from clowder_aimage.errors import FormatError, ModelError, NoMemoryError, UsageError
from clowder_aimage.importer.model_source import ModelForm, parse_adapter
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.llama import model as llama_model
from clowder_aimage.model.llama import params as llama_params
from clowder_aimage.model.llama import server as llama_server
from clowder_aimage.model.llama.model import LlamaModel
from clowder_aimage.model.llama.server import LlamaServer
from clowder_aimage.model.text.language_model import (
    LENGTH,
    STOP,
    ContextError,
    EmbeddingRequest,
    Sampling,
    TextDelta,
    TextEnd,
    TextRequest,
)
from clowder_aimage.oci import Reference
from tests.process import run
from tests.text.file_aimage import gguf_aimage
from tests.text.llama_models import GREEDY, complete, load, write, write_plain
from tests.text.tiny_gguf import split_gguf, write_bert, write_gguf, write_lora, write_projector
from tests.text.tiny_text import write_model

PROMPTS = ("the red ball", "what is the weather", "a small green circle", "Größe, été")
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def path(directory: Path) -> Path:
    return write_gguf(directory.with_name("model.gguf"), directory)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LlamaModel]:
    loaded = load(path)
    yield loaded
    loaded._server.close()


def end_of(model: LlamaModel, request: TextRequest) -> TextEnd:
    *_, end = model.generate(request)
    assert isinstance(end, TextEnd)
    return end


# -- texts


@pytest.mark.parametrize("quantized", [False, True])
def test_text_is_that_of_the_library(directory: Path, tmp_path: Path, quantized: bool) -> None:
    path = write_gguf(tmp_path / "model.gguf", directory, quantized=quantized)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.hostnames = str(path), 512, [str(tmp_path / "a.sock")]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    body = {"prompt": PROMPTS[0], "max_tokens": 64, "temperature": 0}
    expected = server.handle_completions(body)["choices"][0]["text"]
    del server
    loaded = load(path)
    assert loaded.dtype == ("Q8_0" if quantized else "F32")
    assert write(loaded, complete(PROMPTS[0], 64)) == expected
    assert len(expected) > 64


def test_end_counts_tokens_and_what_was_cached(path: Path) -> None:
    model = load(path)
    first, again = (end_of(model, complete(PROMPTS[1], 8)) for _ in range(2))
    assert (first.reason, first.tokens, first.cached_tokens) == (LENGTH, 8, 0)
    assert again.prompt_tokens == first.prompt_tokens > 4
    assert again.cached_tokens == first.prompt_tokens - 1  # the last one gives the first token
    assert first.seconds > 0 < first.prompt_seconds


def test_prompts_of_another_client_are_computed_anew(path: Path) -> None:
    model = load(path, parallel=4)
    prompt = "a prompt of clients that do not know each other, and of no other test"
    for owner, is_cached in (("a", False), ("b", False), ("a", True), ("b", True), ("c", False)):
        found = end_of(model, complete(prompt, 4, owner=owner))
        assert (found.cached_tokens > 0) == is_cached, owner


def test_log_probabilities_are_those_before_sampling(model: LlamaModel) -> None:
    pieces = [*model.generate(complete("the", 6, alternatives=3))]
    tokens = [token for p in pieces if isinstance(p, TextDelta) for token in p.tokens]
    assert len(tokens) == 6
    for token in tokens:
        assert len(token.alternatives) == 3
        best, *others = token.alternatives
        assert best.logprob == token.logprob <= 0
        assert all(other.logprob <= best.logprob for other in others)
        assert sum(math.exp(one.logprob) for one in token.alternatives) < 1
    first = next(p for p in model.generate(complete("the", 6, alternatives=0)) if p.text)  # type: ignore[union-attr]
    assert isinstance(first, TextDelta) and first.tokens[0].alternatives == ()


def test_seed_decides_a_text(model: LlamaModel) -> None:
    texts = [
        write(model, complete("the", sampling=Sampling(temperature=1.5, seed=seed)))
        for seed in (7, 7, 8, (1 << 64) - 1)
    ]
    assert texts[0] == texts[1] != texts[2] != texts[3]


def test_stop_ends_a_text_and_is_not_in_it(model: LlamaModel) -> None:
    whole = write(model, complete("the", 32))
    stop = whole[8:10]
    request = complete("the", 32, stop=(stop,))
    assert write(model, request) == whole[: whole.index(stop)]
    assert end_of(model, request).reason == STOP


def test_answer_matches_a_schema(model: LlamaModel) -> None:
    for seed in range(3):
        request = complete("the", 64, schema=SCHEMA, sampling=Sampling(seed=seed))
        assert 0 <= json.loads(write(model, request))["size"] <= 9
    assert write(model, complete("the", 64, schema={})).lstrip().startswith("{")


def test_number_without_end_ends_the_text(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.model.llama.digit_bound._MOST", 3)
    request = complete("the", 64, schema={"type": "integer", "minimum": 10**9})
    assert len(write(model, request)) == 4 and end_of(model, request).reason == LENGTH


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "nope"},
        {"not": {}},
        {"type": "string", "pattern": "((("},
        {"$ref": "#/absent"},
    ],
)
def test_schema_that_the_library_would_ignore_is_refused(
    model: LlamaModel, schema: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="JSON Schema") as caught:
        model.generate(complete("the", schema=schema))
    assert caught.value.facts["field"] == "response_format"


@pytest.mark.parametrize("prompt", ["the \ud800 ball", "\udcff"])
def test_prompt_that_is_not_text_is_refused(model: LlamaModel, prompt: str) -> None:
    with pytest.raises(UsageError, match="not characters") as caught:
        model.generate(complete(prompt))
    assert caught.value.facts["field"] == "prompt" and "ball" not in caught.value.message


def test_failure_of_the_library_does_not_repeat_the_prompt(model: LlamaModel) -> None:
    with pytest.raises(ModelError, match=r"llama\.cpp failed") as caught:
        [*model._server.stream({"prompt": "a secret \ud800", "stream": True})]
    assert "secret" not in str(caught.value)


def test_deep_schema_is_refused(model: LlamaModel) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="JSON Schema"):
        model.generate(complete("the", schema=schema))


# -- the context


def test_prompt_beyond_the_context_is_refused_with_its_numbers(path: Path) -> None:
    model = load(path, context=40)  # less than llama.cpp's step
    assert model.context == 40
    with pytest.raises(ContextError) as caught:
        [*model.generate(complete("the red ball " * 20))]
    assert int(caught.value.facts["tokens"]) > 40 == int(caught.value.facts["context"])
    with pytest.raises(ContextError):
        [*model.generate(complete("the red ball " * 500))]


def test_text_ends_where_the_context_does(path: Path) -> None:
    model = load(path, context=40)
    end = end_of(model, TextRequest(prompt="the red ball", sampling=GREEDY))
    assert (end.reason, end.prompt_tokens + end.tokens) == (LENGTH, 40)


def test_memory_limits_the_context(path: Path) -> None:
    weights = path.stat().st_size
    small = load(path, memory=weights + (49 << 20) + (1 << 20))
    assert small.context == 512  # all of it
    assert small.parallel == 1
    cache = 2 * 2 * (2 * 16) * 2 * 512  # bytes: layers, keys and values of 2 heads, context
    several = load(path, memory=weights + (51 << 20), parallel=1000)
    assert several.context == 512
    assert (1 << 20) // cache <= several.parallel < (3 << 20) // cache
    with pytest.raises(UsageError, match="MiB of memory are insufficient"):
        load(path, memory=weights)


def test_threads_that_would_only_wait_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine several threads compute a tiny model fifty times slower than one."""
    monkeypatch.setattr(llama_params, "count_limited_cores", lambda: 3)
    how: dict[str, Any] = {"context": 256, "parallel": 1, "pooling": None}
    for weights, count in ((1 << 20, 1), (1 << 30, 3)):
        params = llama_params.make_params(Path("m.gguf"), (), weights=weights, **how)
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == count


@pytest.mark.integration
def test_requests_at_once_have_their_whole_contexts(path: Path) -> None:
    model = load(path, parallel=3)
    requests = [TextRequest(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS[:3]]
    texts = [model.generate(request) for request in requests]
    ends = [[*events][-1] for events in texts]
    for end in ends:
        assert isinstance(end, TextEnd)
        assert (end.reason, end.prompt_tokens + end.tokens) == (LENGTH, 512)


# -- several requests


def test_requests_at_once_give_what_each_gives_alone(path: Path) -> None:
    model = load(path, parallel=4)
    assert model.context == 512
    alone = [write(model, complete(prompt, 24)) for prompt in PROMPTS]
    open_texts = [model.generate(complete(prompt, 24)) for prompt in PROMPTS]
    texts = [""] * 4
    turns = list(range(4))
    while turns:
        for index in list(turns):
            event = next(open_texts[index], None)
            if event is None:
                turns.remove(index)
            elif isinstance(event, TextDelta):
                texts[index] += event.text
    assert texts == alone


class Blocking:
    """A server that answers no request before ``count`` of them have arrived."""

    def __init__(self, server: Any, count: int) -> None:
        self.server, self.barrier = server, threading.Barrier(count)

    def handle_completions(self, *arguments: Any) -> None:
        self.barrier.wait(60)
        self.server.handle_completions(*arguments)


def test_a_request_is_handed_over_before_the_one_before_it_is_accepted(path: Path) -> None:
    model = load(path, parallel=4)
    blocking = Blocking(model._server._server[0], 4)
    model._server._server[0] = blocking
    texts = [model.generate(complete(prompt, 8)) for prompt in PROMPTS]
    for events in texts:
        *_, end = events
        assert isinstance(end, TextEnd) and end.tokens == 8
    assert not blocking.barrier.broken


def test_a_wait_for_answers_ends_when_other_work_arrives(path: Path) -> None:
    server = load(path)._server
    blocking = Blocking(server._server[0], 2)
    server._server[0] = blocking
    answers = server.stream({"prompt": "the", "n_predict": 1, "stream": True})
    assert next(answers) == next(answers) == []
    server.wake()
    assert next(answers) == []  # would wait for ever
    blocking.barrier.wait(60)
    assert [*answers]


class Script:
    """A request in progress whose answers come together in given numbers."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.waits = [*counts], list[float]()
        self.thread = self.answers = self

    def __call__(self, *_: object) -> Script:
        return self

    def start(self) -> None: ...

    def join(self, _: float) -> None: ...

    def empty(self) -> bool:
        return True

    @property
    def is_ended(self) -> bool:
        return not self.counts

    def wait(self, seconds: float) -> None:
        self.waits.append(round(seconds, 3))

    def take(self) -> list[dict[str, Any]]:
        return [{}] * self.counts.pop(0)


def test_answers_of_fast_texts_are_looked_at_less_often(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(1, 1, 1, 2, 9, 3)
    monkeypatch.setattr(llama_server, "_Call", script)
    monkeypatch.setattr(llama_server, "time", SimpleNamespace(monotonic=lambda: 1e9))
    monkeypatch.setattr(model._server, "_news", script)
    assert [len(one) for one in model._server.stream({})] == [0, 1, 1, 1, 2, 9, 3]
    assert script.waits[1:] == [0.03, 0.03, 0.06, 0.06]


def test_closing_ends_the_work(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "long", max_position_embeddings=1 << 16)
    model = load(write_gguf(tmp_path / "long.gguf", directory))
    events = model.generate(complete("the red", 60_000))
    next(events)
    (call,) = model._server._calls
    events.close()
    call.thread.join(20)
    assert not call.thread.is_alive()
    assert call.answers.qsize() < 30_000
    assert len(write(model, complete("the red", 8))) > 4  # the only place is free again


def test_process_exits_with_an_open_text(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.text.llama_models import *\n"
        "model = load(Path(sys.argv[1]))\n"
        "events = model.generate(complete('the', 400)); next(events); print('read')"
    )
    done = run([sys.executable, "-c", program, path])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"read\n", b"")


# -- the server of the library


@pytest.mark.skipif(not Path("/proc/self/net").exists(), reason="sockets are listed by Linux")
def test_nothing_can_connect_to_the_server(path: Path) -> None:
    def sockets() -> set[str]:
        links = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
        return {link.partition("[")[2][:-1] for link in links if "socket:[" in link}

    before = sockets()
    model = load(path)
    opened = sockets() - before
    assert len(opened) == 1
    rows = [
        row.split()
        for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    assert not opened & {row[9] for row in rows}
    (row,) = (
        row.split()
        for row in Path("/proc/self/net/unix").read_text().splitlines()
        if row.split()[6:7] == list(opened)
    )
    assert not os.path.lexists(row[7])
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(OSError):
        client.connect(row[7])
    assert write(model, complete("the", 4))


def test_library_states_why_it_cannot_load(tmp_path: Path, directory: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", directory)
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"quark"))
    with pytest.raises(ModelError, match="unknown model architecture: 'quark'"):
        load(path)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("unknown model architecture: 'quark'", ModelError),
        ("unable to allocate CPU buffer", NoMemoryError),
        ("", NoMemoryError),
    ],
)
def test_a_load_that_may_succeed_later_is_not_refused_for_good(
    reason: str, kind: type[ModelError]
) -> None:
    assert type(llama_server._build_load_error(reason)) is kind


def test_errors_of_the_library_are_sentences(model: LlamaModel) -> None:
    server: LlamaServer = model._server
    with pytest.raises(UsageError, match=r"llama\.cpp refuses the request"):
        [*server.stream({"prompt": 3.5})]


def test_template_of_a_file_does_not_run_when_it_is_loaded(tmp_path: Path, directory: Path) -> None:
    templates = (
        "{% for a in range(60000) %}{% for b in range(60000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 2) }}{% endmacro %}{{ m(1) }}",
    )
    code = "import sys; from pathlib import Path; from tests.text.llama_models import load\n"
    code += "for name in sys.argv[1:]: load(Path(name))"
    paths = []
    for number, (template, end) in enumerate(product(templates, ("", "__tool_use"))):
        metadata: dict[str, Any] = {f"tokenizer__chat_template{end}": template}
        paths.append(write_gguf(tmp_path / f"{number}.gguf", directory, **metadata))
    run([sys.executable, "-c", code, *paths], timeout=60, check=True)


# -- files


def test_parts_of_a_split_model_are_one(path: Path, model: LlamaModel) -> None:
    parts = split_gguf(path, 3)
    whole = load(*parts)
    assert write(whole, complete("the")) == write(model, complete("the"))
    for some in (parts[:2], parts[1:]):
        with pytest.raises(FormatError, match="do not belong together"):
            load(*some)


def test_several_models_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="several GGUF models"):
        load(path, other)
    with pytest.raises(ModelError, match="no GGUF model"):
        load()


def test_projector_of_pictures_is_left_out(
    path: Path, tmp_path: Path, model: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(path, write_projector(tmp_path / "mmproj.gguf"))
    assert caplog.messages == ["not used by llama.cpp here: mmproj.gguf"]
    assert write(loaded, complete("the")) == write(model, complete("the"))


def test_compressed_model_is_refused(path: Path) -> None:
    kind = "application/vnd.clowder.aimage.model.gguf.layer.v1+zstd"
    files, aimage = gguf_aimage(path, types={path.name: kind})
    from clowder_aimage.model.text.runtime import load_language_model

    with pytest.raises(ModelError, match="compressed and cannot be mapped"):
        load_language_model(files, aimage)


def test_adapter_changes_texts_by_its_scale(
    path: Path, directory: Path, tmp_path: Path, model: LlamaModel
) -> None:
    adapter = write_lora(tmp_path / "adapter.gguf", directory)
    request = complete("the red", 24)
    plain = write(model, request)
    assert write(load(path, adapter), request) != plain
    names = {"adapter.gguf": "adapters/style/adapter.gguf"}
    for strength, is_plain in ((0.0, True), (1.0, False)):
        loras = [{"adapter": "style", "strength": strength}]
        loaded = load(path, adapter, config={"names": names, "loras": loras})
        assert (write(loaded, request) == plain) == is_plain


def test_adapter_that_is_packed_with_a_model_is_used(
    path: Path, directory: Path, tmp_path: Path
) -> None:
    adapter = write_lora(tmp_path / "style.gguf", directory)
    store, given = ImageLayout(tmp_path / "store"), parse_adapter(str(adapter))
    made = create(store, Reference.parse("m"), path, form=ModelForm(adapters=(given,))).aimage
    assert made.properties["adapters"]["style"]["rank"] == 4
    asked = complete("the red", 24)
    assert write(llama_model.load(store, made), asked) == write(load(path, adapter), asked)
    written = tmp_path / "written"  # as an export has it
    (written / "adapters/style").mkdir(parents=True)
    shutil.copy(path, written)
    shutil.copy(adapter, written / "adapters/style")
    again = create(store, Reference.parse("n"), written).aimage
    assert {layer.name for layer in again.layers} == {layer.name for layer in made.layers}


def test_file_that_is_not_an_adapter_for_a_model_is_not_packed_with_it(
    path: Path, directory: Path, tmp_path: Path
) -> None:
    store, adapter = ImageLayout(tmp_path / "store"), write_lora(tmp_path / "a.gguf", directory)
    for model, beside, message in ((path, path, "not an adapter"), (directory, adapter, "in GGUF")):
        form = ModelForm(adapters=(("style", beside),))
        with pytest.raises((ModelError, UsageError), match=message):
            create(store, Reference.parse("m"), model, form=form)


def test_adapter_of_another_model_is_refused(path: Path, directory: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ModelError, match="have the shapes"):
        load(path, write_lora(tmp_path / "adapter.gguf", other))
    llama = write_model(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match="the adapter is for 'llama'"):
        load(path, write_lora(tmp_path / "adapter.gguf", llama))


def test_defaults_of_ollama_are_used(path: Path, tmp_path: Path, model: LlamaModel) -> None:
    params = tmp_path / "params.json"
    params.write_text(json.dumps({"temperature": 0, "num_predict": 5, "num_ctx": 300}))
    loaded = load(path, params)
    assert loaded.context == 300
    assert write(loaded, TextRequest(prompt="the")) == write(model, complete("the", 5))
    messages = tmp_path / "messages.json"
    for file, value, reason in (
        (params, {"temperature": -1}, r"params\.json: temperature"),
        (params, {"stop": 5}, r"params\.json: stop"),
        (messages, ["hi"], r"messages\.json has a message that is not an object"),
    ):
        file.write_text(json.dumps(value))
        with pytest.raises(FormatError, match=reason):
            load(path, file)


# -- embeddings


def test_embeddings_have_unit_length(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", directory, arch__pooling_type=3)
    model = load(path, parallel=2)
    assert model.capabilities == {"embedding"}
    found = model.embed(EmbeddingRequest(PROMPTS))
    assert [len(vector) for vector in found.vectors] == [64] * 4
    assert found.tokens > 16
    for vector in found.vectors:
        assert sum(one * one for one in vector) == pytest.approx(1)
    again = model.embed(EmbeddingRequest(PROMPTS[1:2])).vectors[0]
    assert again == pytest.approx(found.vectors[1], abs=1e-4)
    assert found.vectors[0] != pytest.approx(found.vectors[1], abs=1e-2)
    for text in ("the red ball " * 110, "the red ball " * 4000):  # the second exceeds a batch
        with pytest.raises(ContextError) as caught:
            model.embed(EmbeddingRequest((text,)))
        assert int(caught.value.facts["tokens"]) > model.context
        assert caught.value.facts["context"] == str(model.context)
    with pytest.raises(UsageError, match="computes embeddings only"):
        model.generate(complete("the"))


def test_embeddings_of_other_models_are_refused(model: LlamaModel) -> None:
    with pytest.raises(UsageError, match="does not support embedding"):
        model.embed(EmbeddingRequest(("the",)))


def test_encoder_embeds(tmp_path: Path) -> None:
    words = "the red ball is on table small green circle"
    path = write_bert(tmp_path / "bert.gguf", words, arch__pooling_type=1)
    model = load(path)
    assert model.capabilities == {"embedding"}
    assert model.context == 128
    found = model.embed(EmbeddingRequest(("the red ball", "the red ball", "small green circle")))
    assert found.tokens == 3 * 5  # with [CLS] and [SEP]
    assert found.vectors[0] == pytest.approx(found.vectors[1], abs=1e-5)
    assert found.vectors[0] != pytest.approx(found.vectors[2], abs=1e-2)
    unstated = write_bert(tmp_path / "unstated.gguf", words)
    assert len(load(unstated).embed(EmbeddingRequest(("red",))).vectors[0]) == 32
    with pytest.raises(ModelError, match="ranks documents"):
        load(write_bert(tmp_path / "rank.gguf", words, arch__pooling_type=4))
