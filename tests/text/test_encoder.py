"""Encoders: the states of each kind, tokens, poolings, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.backend import mx
from clowder_aimage.model.encoder.network import Encoder
from clowder_aimage.model.text.embedding_recipe import DenseLayer, EmbeddingRecipe, read_recipe
from clowder_aimage.model.text.encoder_config import EncoderConfig
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextRequest,
    join_embeddings,
)
from clowder_aimage.model.text.sentence_pooling import DenseModule, SentencePooling
from tests.parity.encoder_vectors import FILE, VOCABULARY
from tests.parity.encoder_vectors import POSITIONS as VECTOR_POSITIONS
from tests.parity.encoder_vectors import TEXTS as TOKENS
from tests.text.mlx_models import load
from tests.text.tiny_encoder import (
    KINDS,
    TEXTS,
    WIDTH,
    make_config,
    make_weights,
    write_dense,
    write_encoder,
    write_json,
    write_modules,
)

VECTORS = json.loads(FILE.read_text("utf-8"))


def embed(model: Any, *texts: str, prompt: str | None = None) -> Any:
    return np.array(model.embed(EmbeddingRequest(texts, prompt)).vectors)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


@pytest.fixture
def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "model"))


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(kind: str) -> None:
    fields = make_config(kind, VOCABULARY) | {"max_position_embeddings": VECTOR_POSITIONS}
    network = Encoder(EncoderConfig.read(fields))
    weights = make_weights(kind, fields, 0)
    network.load_weights([(network.sanitize(name), mx.array(it)) for name, it in weights.items()])
    together = network(TOKENS)
    for text, states, mean in zip(TOKENS, together, VECTORS[kind], strict=True):
        assert np.abs(np.array(states).mean(0) - mean).max() < 1e-5
        assert np.abs(np.array(network([text])[0]) - np.array(states)).max() < 1e-5


def test_a_text_has_the_same_embedding_among_others(model: Any) -> None:
    together = embed(model, *TEXTS)
    assert np.allclose(np.linalg.norm(together, axis=1), 1)
    for text, vector in zip(TEXTS, together, strict=True):
        assert embed(model, text)[0] @ vector > 1 - 1e-6


def test_the_facts_of_a_model(model: Any) -> None:
    assert (model.capabilities, model.context, model.dtype) == ({"embedding"}, 40, "float32")
    with pytest.raises(UsageError, match="it computes embeddings only"):
        model.generate(TextRequest(prompt="the red ball"))


def test_texts_beyond_the_context_are_cut_and_told(model: Any) -> None:
    found = model.embed(EmbeddingRequest(("the red ball", "ball " * 400)))
    assert (found.cut, found.limit) == (1, 40)
    assert found.list_warnings() == ["1 of 2 texts were cut: the model reads 40 tokens of a text"]
    assert embed(model, "ball " * 400)[0] @ embed(model, "ball " * 40)[0] > 1 - 1e-6
    joined = join_embeddings([found, Embeddings(found.vectors, 3, 2, 40), found])
    assert (len(joined.vectors), joined.cut, joined.limit) == (6, 4, 40)


@pytest.mark.parametrize(
    ("name", "fields", "context"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 12}, 12),
        ("sentence_roberta_config.json", {"max_seq_length": 13}, 13),
        ("sentence_bert_config.json", {"max_seq_length": 500}, 60),
        ("sentence_bert_config.json", {"max_seq_length": None}, 40),
        ("tokenizer_config.json", {"model_max_length": 1e30}, 60),
        ("tokenizer_config.json", {}, 60),
    ],
    ids=str,
)
def test_the_context_is_what_the_files_state(
    copied: Path, name: str, fields: dict[str, Any], context: int
) -> None:
    write_json(copied / name, fields)
    assert load(copied).context == context
    assert load(copied, context=11).context == 11


def test_texts_are_cut_at_the_stated_side(copied: Path, model: Any) -> None:
    config = {"model_max_length": 12, "truncation_side": "left"}
    write_json(copied / "tokenizer_config.json", config)
    long, end = embed(load(copied), "chair " * 50 + "ball " * 10), embed(model, "ball " * 10)
    assert long[0] @ end[0] > 1 - 1e-6


def test_positions_after_the_padding_have_no_text() -> None:
    """RoBERTa's first positions are those of padding."""
    assert EncoderConfig.read(make_config("roberta", 9)).context == 60 - 2
    assert EncoderConfig.read(make_config("bert", 9)).context == 60


def test_prompts_come_before_texts(copied: Path) -> None:
    prompts = {"query": "the red: ", "plain": ""}
    write_json(
        copied / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": "query"},
    )
    usual = load(copied)
    assert np.array_equal(embed(usual, "ball"), embed(usual, "ball", prompt="query"))
    assert np.array_equal(embed(usual, "the red: ball", prompt="plain"), embed(usual, "ball"))
    with pytest.raises(UsageError, match="no prompt 'x'; its prompts: plain, query"):
        embed(usual, "ball", prompt="x")
    write_json(copied / "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    assert not np.allclose(embed(load(copied), "ball"), embed(usual, "ball"), atol=1e-3)


def test_words_without_a_file_of_the_tokenizer(copied: Path, model: Any) -> None:
    """vocab.txt gives the tokens of tokenizer.json."""
    config = (copied / "tokenizer_config.json").read_bytes()
    name_class(copied, "BertTokenizer")
    (copied / "tokenizer_config.json").write_bytes(config)
    words = (copied / "vocab.txt").read_text("utf-8").splitlines()
    assert (embed(load(copied), *TEXTS) * embed(model, *TEXTS)).sum(1).min() > 1 - 1e-6
    (copied / "vocab.txt").write_text("\n".join(words[4:]) + "\n", "utf-8")
    with pytest.raises(ModelError, match=r"vocab\.txt has no tokens"):
        load(copied)


def test_a_class_of_transformers_decides_over_case(copied: Path, model: Any) -> None:
    write_json(
        copied / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 40},
    )
    cased = load(copied)
    assert embed(cased, "ball")[0] @ embed(model, "ball")[0] > 1 - 1e-6
    assert embed(cased, "BALL")[0] @ embed(model, "BALL")[0] < 0.999
    write_json(copied / "sentence_bert_config.json", {"do_lower_case": True})
    assert embed(load(copied), "BALL")[0] @ embed(model, "BALL")[0] > 1 - 1e-6


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.bert."])
def test_names_of_wrappers(copied: Path, model: Any, prefix: str) -> None:
    weights = load_file(copied / "model.safetensors")
    save_file({prefix + name: it for name, it in weights.items()}, copied / "model.safetensors")
    assert embed(load(copied), TEXTS[1])[0] @ embed(model, TEXTS[1])[0] > 1 - 1e-6


def test_heads_and_older_names_of_tensors(copied: Path, model: Any) -> None:
    weights = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma"): value
        for name, value in load_file(copied / "model.safetensors").items()
    }
    weights |= {"cls.predictions.bias": np.zeros(3, np.float32)}
    weights |= {"bert.pooler.dense.weight": np.zeros((3, 3), np.float32)}
    save_file(
        weights | {"bert.embeddings.position_ids": np.arange(60)}, copied / "model.safetensors"
    )
    assert embed(load(copied), TEXTS[1])[0] @ embed(model, TEXTS[1])[0] > 1 - 1e-6


REFUSED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a classifier without a pooling": (
        "computes no embeddings",
        lambda path: make_classifier(path),
    ),
    "relative positions": ("absolute", lambda path: change(path, position_embedding_type="x")),
    "a decoder": ("is_decoder", lambda path: change(path, is_decoder=True)),
    "an activation": ("hidden_act", lambda path: change(path, hidden_act="sin")),
    "heads": ("5 heads", lambda path: change(path, num_attention_heads=5)),
    "a missing layer": ("missing tensors", lambda path: change(path, num_hidden_layers=3)),
    "no pooling": ("is missing", lambda path: (path / "1_Pooling/config.json").unlink()),
    "a pooling": (
        "pooling_mode",
        lambda path: write_json(path / "1_Pooling/config.json", {"pooling_mode": "sum"}),
    ),
    "an older pooling": (
        "pooling_mode_sum_tokens",
        lambda path: write_json(path / "1_Pooling/config.json", {"pooling_mode_sum_tokens": True}),
    ),
    "a module": ("module LSTM is not", lambda path: write_modules(path, "mean", "LSTM")),
    "an order of modules": (
        "must begin with",
        lambda path: write_json(path / "modules.json", [{"type": "a.Pooling", "path": ""}]),
    ),
    "a tokenizer": ("no tokenizer", lambda path: (path / "tokenizer.json").unlink()),
    "words of a class": ("no tokenizer", lambda path: name_class(path, "BertJapaneseTokenizer")),
    "few words": (
        "more tokens than the network",
        lambda path: shrink(path),
    ),
}


def change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text("utf-8"))
    write_json(path / "config.json", config | fields)


def name_class(path: Path, name: str) -> None:
    """Leave only the words of the tokenizer, and name its class."""
    value = json.loads((path / "tokenizer.json").read_text("utf-8"))
    words = sorted(value["model"]["vocab"], key=value["model"]["vocab"].get)
    (path / "tokenizer.json").unlink()
    (path / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    write_json(path / "tokenizer_config.json", {"tokenizer_class": name})


def make_classifier(path: Path) -> None:
    (path / "modules.json").unlink()
    shutil.rmtree(path / "1_Pooling")
    change(path, architectures=["BertForSequenceClassification"])


def shrink(path: Path) -> None:
    """Leave only the first rows of the table of tokens."""
    weights = load_file(path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][:9]
    save_file(weights, path / "model.safetensors")
    change(path, vocab_size=9)


@pytest.mark.parametrize(("reason", "damage"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_refused(
    copied: Path, reason: str, damage: Callable[[Path], None]
) -> None:
    damage(copied)
    with pytest.raises(ModelError, match=reason):
        embed(load(copied), "the red ball")


def test_no_memory(copied: Path) -> None:
    with pytest.raises(ModelError, match="the limit is 0 MiB"):
        load(copied, memory=1000)


STATES = np.arange(12, dtype=np.float32).reshape(4, 3) - 5


@pytest.mark.parametrize(
    ("mode", "skipped", "expected"),
    [
        ("cls", 0, STATES[0]),
        ("cls", 2, STATES[2]),
        ("lasttoken", 1, STATES[3]),
        ("max", 0, STATES[3]),
        ("mean", 0, STATES.mean(0)),
        ("mean", 2, STATES[2:].mean(0)),
        ("mean_sqrt_len_tokens", 1, STATES[1:].sum(0) / 3**0.5),
        ("weightedmean", 0, (STATES * [[1], [2], [3], [4]]).sum(0) / 10),
        ("weightedmean", 2, (STATES[2:] * [[3], [4]]).sum(0) / 7),
    ],
)
def test_modes_of_pooling(mode: str, skipped: int, expected: Any) -> None:
    pooled = SentencePooling(EmbeddingRecipe((mode,))).pool(STATES, skipped)
    assert np.allclose(pooled, expected / np.linalg.norm(expected))


def test_joined_modes_dense_layers_and_fewer_dimensions() -> None:
    draw = np.random.default_rng(0)
    weight, bias = (draw.standard_normal(shape).astype(np.float32) for shape in ((6, 6), (6,)))
    layer = DenseLayer("2_Dense", 6, 6, True, "Tanh", True)
    recipe = EmbeddingRecipe(("cls", "mean"), (layer,), dimensions=4)
    joined = np.concatenate([STATES[0], STATES.mean(0)])
    expected = (np.tanh(weight @ joined + bias) + joined)[:4]
    modules = (DenseModule(layer, weight, bias, None),)
    pooled = SentencePooling(recipe, modules).pool(STATES)
    assert np.allclose(pooled, expected / np.linalg.norm(expected), atol=1e-6)
    with pytest.raises(ModelError, match="in_features is 6, the vectors have 3"):
        narrow = SentencePooling(
            replace(recipe, modes=("cls",)), (DenseModule(layer, weight, bias, None),)
        )
        narrow.pool(STATES)


def test_dense_layers_of_a_directory(copied: Path, model: Any) -> None:
    write_modules(copied, "mean", "Dense", "Normalize")
    write_dense(copied / "2_Dense", WIDTH, 10, use_residual=True)
    assert embed(load(copied), "the red ball").shape == (1, 10)
    write_dense(copied / "2_Dense", WIDTH, 10, "linear.Identity", bias=False)
    weights = load_file(copied / "2_Dense/model.safetensors")
    expected = weights["linear.weight"] @ embed(model, "the red ball")[0]
    found = embed(load(copied), "the red ball")[0]
    assert found @ expected / np.linalg.norm(expected) > 1 - 1e-6
    shutil.rmtree(copied / "2_Dense")
    write_modules(copied, "mean", "Normalize", "Dense", "Normalize")
    write_dense(copied / "3_Dense", WIDTH, 10)
    weights = load_file(copied / "3_Dense/model.safetensors")
    unit = embed(model, "the red ball")[0]
    expected = np.tanh(weights["linear.weight"] @ unit + weights["linear.bias"])
    found = embed(load(copied), "the red ball")[0]
    assert found @ expected / np.linalg.norm(expected) > 1 - 1e-6
    shutil.rmtree(copied / "3_Dense")
    write_modules(copied, "mean", "Dense")
    write_dense(copied / "2_Dense", WIDTH + 1, 10)
    with pytest.raises(ModelError, match="in_features is 25, the vectors have 24"):
        embed(load(copied), "the red ball")
    save_file({"linear.weight": weights["linear.weight"]}, copied / "2_Dense/model.safetensors")
    with pytest.raises(ModelError, match="2_Dense: the configuration requires"):
        load(copied)


def test_the_recipe_of_a_directory() -> None:
    files = {
        "modules.json": [
            {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
            {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": WIDTH,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": True,
        },
        "2_Dense/config.json": {"in_features": 48, "out_features": 8},
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "truncate_dim": 4},
    }
    encoded = {name: json.dumps(value).encode() for name, value in files.items()}
    recipe = read_recipe(lambda name: encoded.get(name))
    assert recipe.modes == ("cls", "mean") and recipe.has_pooling and recipe.dimensions == 4
    assert recipe.dense == (DenseLayer("2_Dense", 48, 8, True, "Tanh", False),)
    assert read_recipe(lambda _: None) == EmbeddingRecipe()
