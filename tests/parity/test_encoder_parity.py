"""Encoders against transformers, in float32 on a CPU; the pooling is written in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.model.text.language_model import EmbeddingRequest
from tests.parity.encoder_vectors import FILE, compute_means
from tests.text.mlx_models import load
from tests.text.tiny_encoder import (
    KINDS,
    TEXTS,
    WIDTH,
    write_dense,
    write_encoder,
    write_json,
    write_modules,
)

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
# Of the cosine
MOST = 1e-5


def pool_by_torch(directory: Path) -> Any:
    """Return the mean of the last states of each text, cut at 40 tokens."""
    import transformers

    network = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer([*TEXTS], padding=True, truncation=True, max_length=40, return_tensors="pt")
    with torch.no_grad():
        states = network(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].float()
    return (states * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_embeddings_of_each_kind(tmp_path: Path, kind: str, activation: str) -> None:
    name = "activation" if kind == "distilbert" else "hidden_act"
    directory = write_encoder(tmp_path / "model", kind, seed=7, **{name: activation})
    compare(directory)


@pytest.mark.parametrize("fields", [{"do_lower_case": False}, {"strip_accents": False}, {}])
def test_case_and_accents_of_word_piece(tmp_path: Path, fields: dict[str, Any]) -> None:
    directory = write_encoder(tmp_path / "model")
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **fields})
    compare(directory, context=40)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("activation.Tanh", {}),
        ("activation.GELU", {}),
        ("activation.SiLU", {}),
        ("activation.Sigmoid", {"use_residual": True}),
        ("linear.Identity", {"bias": False}),
    ],
)
def test_dense_layers(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    directory = write_encoder(tmp_path / "model")
    write_modules(directory, "mean", "Dense", "Normalize")
    write_dense(directory / "2_Dense", WIDTH, 10, name, **options)
    weights = safetensors_torch.load_file(directory / "2_Dense/model.safetensors")
    activation = getattr(torch.nn, name.rpartition(".")[2])()

    def apply(x: Any) -> Any:
        linear = torch.nn.functional.linear
        result = activation(linear(x, weights["linear.weight"], weights.get("linear.bias")))
        is_residual = "residual.weight" in weights
        return result + linear(x, weights["residual.weight"]) if is_residual else result

    compare(directory, apply)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "distilbert"])
def test_words_of_a_vocabulary(tmp_path: Path, kind: str) -> None:
    directory = write_encoder(tmp_path / "model", kind)
    words = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.txt").write_text("\n".join(sorted(words, key=words.get)) + "\n", "utf-8")
    compare(directory)


def compare(directory: Path, after: Any = lambda x: x, **options: Any) -> None:
    theirs = torch.nn.functional.normalize(after(pool_by_torch(directory)), dim=-1)
    found = load(directory, **options).embed(EmbeddingRequest(TEXTS))
    cosines = (theirs * torch.tensor(found.vectors, dtype=torch.float32)).sum(1)
    assert cosines.min() > 1 - MOST, cosines


@pytest.mark.parametrize("kind", KINDS)
def test_the_vectors_of_the_fast_tests_are_those_of_transformers(kind: str) -> None:
    recorded = json.loads(FILE.read_text("utf-8"))[kind]
    assert (torch.tensor(recorded) - torch.tensor(compute_means(kind))).abs().max() < 2e-6
