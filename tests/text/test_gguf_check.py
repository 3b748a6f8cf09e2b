"""Checks of GGUF language models before llama.cpp reads them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ContentError, FormatError, ModelError
from clowder_aimage.formats.gguf_header import FLOAT32, STRING, GgufList, GgufTensor, read_header
from clowder_aimage.model.llama.gguf_check import GgufFacts, check_adapter, check_model
from tests.text.gguf_mutant import mutants
from tests.text.tiny_gguf import write_gguf, write_lora
from tests.text.tiny_text import write_model

Metadata = dict[str, Any]
Tensors = dict[str, GgufTensor]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = write_model(tmp_path_factory.mktemp("llama") / "model", "llama")
    model = write_gguf(directory.with_name("model.gguf"), directory)
    return model, write_lora(directory.with_name("lora.gguf"), directory)


def read_gguf(path: Path) -> tuple[Metadata, Tensors]:
    return read_bytes(path.read_bytes())


def read_bytes(data: bytes) -> tuple[Metadata, Tensors]:
    header = read_header(io.BytesIO(data), len(data), is_whole=True)
    return dict(header.metadata), {tensor.name: tensor for tensor in header.tensors}


def check(metadata: Metadata, tensors: Tensors) -> GgufFacts:
    return check_model(metadata, tensors.values())


def test_facts_are_read(paths: tuple[Path, Path]) -> None:
    metadata, tensors = read_gguf(paths[0])
    facts = check(metadata, tensors)
    assert (facts.architecture, facts.context, facts.layers) == ("llama", 512, 2)
    assert (facts.width, facts.inner, len(facts.tokens)) == (64, 128, 400)
    assert facts.cache == 2 * 2 * (2 * 16) * 2  # bytes, layers, keys and values of 2 heads
    assert facts.decode_special_token(metadata, "bos") == "<|begin_of_text|>"
    assert facts.decode_special_token(metadata, "sep") == ""


def items(change: Callable[[tuple[Any, ...]], Any], key: str) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        found = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = GgufList(found.kind, tuple(change(found.items)))

    return edit


def key(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.update({name: value})


def forget_bos(metadata: Metadata) -> None:
    del metadata["tokenizer.ggml.bos_token_id"]
    metadata["tokenizer.ggml.model"] = "rwkv"  # has none by default


LIES: dict[str, Callable[[Metadata], None]] = {
    "general.architecture is not a name": key("general.architecture", "../llama"),
    "llama.block_count must be": key("llama.block_count", 0),
    "llama.block_count must be an integer from 1 to 512": key("llama.block_count", 513),
    "llama.embedding_length must be": key("llama.embedding_length", "64"),
    "llama.context_length must be": key("llama.context_length", 1 << 30),
    "4 heads cannot share 3 heads": key("llama.attention.head_count_kv", 3),
    "heads do not fit in a width": key("llama.attention.head_count", 128),
    "has 1 values for 2 layers": key("llama.attention.head_count", GgufList(4, (4,))),
    "rope.dimension_count is 18": key("llama.rope.dimension_count", 18),
    "rope.freq_base is not": key("llama.rope.freq_base", -1.0),
    "is not a finite number": key("llama.attention.layer_norm_rms_epsilon", float("nan")),
    "is too large": key("llama.expert_shared_count", 1 << 40),
    "2 of 0 experts": key("llama.expert_used_count", 2),
    "pooling_type is not one": key("llama.pooling_type", 9),
    "must have 1 to": items(lambda _: (), "tokens"),
    "contains a token twice": items(lambda all_: (*all_[:-1], all_[0]), "tokens"),
    "token_type has 399 values": items(lambda all_: all_[:-1], "token_type"),
    "an unknown type of token": items(lambda all_: (*all_[:-1], 7), "token_type"),
    "not two parts": items(lambda all_: (*all_[:-1], b"ab"), "merges"),
    "scores has 1 values": key("tokenizer.ggml.scores", GgufList(FLOAT32, (1.0,))),
    "is not a list of the expected type": key("tokenizer.ggml.token_type", GgufList(STRING, ())),
    "not one of 400 tokens": key("tokenizer.ggml.eos_token_id", 400),
    "bos_token_id is missing": forget_bos,
    "400 tokens of width 32": key("llama.embedding_length", 32),
}


@pytest.mark.parametrize("message", LIES)
def test_metadata_that_lie_are_refused(paths: tuple[Path, Path], message: str) -> None:
    metadata, tensors = read_gguf(paths[0])
    LIES[message](metadata)
    with pytest.raises(FormatError, match=message):
        check(metadata, tensors)


def test_model_without_a_tokenizer_is_refused(paths: tuple[Path, Path]) -> None:
    metadata, tensors = read_gguf(paths[0])
    del metadata["tokenizer.ggml.model"]
    with pytest.raises(ModelError, match="no tokenizer"):
        check(metadata, tensors)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "message"),
    [
        ("token_embd.weight", "F32", (64, 401), "400 tokens of width 64 require"),
        ("output.weight", "F32", (64, 399), "400 tokens of width 64 require"),
        ("blk.2.attn_q.weight", "F32", (64, 64), "not in one of the 2 layers"),
        ("output_norm.weight", "F16", (64,), "has the type F16"),
        ("blk.0.attn_q.weight", "F64", (64, 64), "has the type F64"),
        ("blk.0.attn_q.weight", "F32", (64, 0), "has the shape"),
    ],
)
def test_tensors_that_lie_are_refused(
    paths: tuple[Path, Path], name: str, kind: str, shape: tuple[int, ...], message: str
) -> None:
    metadata, tensors = read_gguf(paths[0])
    tensors[name] = GgufTensor(name, kind, shape, 0, 0)
    with pytest.raises(ContentError, match=message):
        check(metadata, tensors)
    del (
        tensors["token_embd.weight"],
        tensors[name if name != "token_embd.weight" else "output.weight"],
    )
    with pytest.raises(ContentError):
        check(metadata, tensors)


def test_adapter_that_lies_is_refused(paths: tuple[Path, Path]) -> None:
    _, base = read_gguf(paths[0])
    metadata, tensors = read_gguf(paths[1])
    check_adapter(metadata, tensors.values(), "llama", base)
    name = "blk.0.attn_q.weight.lora_a"
    changes: tuple[tuple[str, Metadata, Tensors], ...] = (
        ("is not a LoRA adapter", {"adapter.type": "control"}, {}),
        ("alpha is not a number", {"adapter.lora.alpha": float("inf")}, {}),
        ("has the type I32", {}, {name: GgufTensor(name, "I32", (64, 4), 0, 0)}),
        ("have the shapes", {}, {name: GgufTensor(name, "F32", (64, 5), 0, 0)}),
        (
            "not one of a pair",
            {},
            {"k": GgufTensor("blk.0.attn_k.weight.lora_a", "F32", (64, 4), 0, 0)},
        ),
    )
    for message, keys, others in changes:
        with pytest.raises(ContentError, match=message):
            check_adapter(metadata | keys, (tensors | others).values(), "llama", base)
    del base["blk.0.attn_q.weight"]
    with pytest.raises(ModelError, match="which the model does not have"):
        check_adapter(metadata, tensors.values(), "llama", base)


def test_changed_headers_are_accepted_or_refused_with_a_sentence(
    paths: tuple[Path, Path],
) -> None:
    accepted = refused = 0
    for _, data in mutants(paths[0], 150):
        try:
            check(*read_bytes(data))
            accepted += 1
        except ContentError as error:
            assert error.message
            refused += 1
    assert accepted > 20 < refused
