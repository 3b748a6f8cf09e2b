"""Experts as transformers saves them: packed by layer, quantized or not, and read back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from safetensors.torch import load_file
    from transformers import MixtralConfig, MixtralModel, Qwen3MoeConfig, Qwen3MoeModel

    from tests.parity.make_model import make

from clowder_aimage.create import create
from clowder_aimage.importer import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
from clowder_aimage.tensor import Quantization

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

NAME = Reference.parse("experts")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def qwen() -> torch.nn.Module:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeModel(Qwen3MoeConfig(**SMALL, **more))


def mixtral() -> torch.nn.Module:
    return MixtralModel(MixtralConfig(**SMALL, num_local_experts=4))


@pytest.fixture(params=[qwen, mixtral], ids=["Qwen3-MoE", "Mixtral"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a model whose text encoder has experts, as transformers writes it."""
    place = tmp_path / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(place, 5)
        torch.manual_seed(5)
        network = request.param()
        for path in (place / "text_encoder").iterdir():
            path.unlink()
        network.to(torch.bfloat16).save_pretrained(place / "text_encoder")
    index = json.loads((place / "model_index.json").read_text("utf-8"))
    index["text_encoder"] = ["transformers", type(network).__name__]
    (place / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return place


@pytest.mark.parametrize("quantize", [None, "text_encoder=int8"])
def test_experts_that_transformers_saved(directory: Path, tmp_path: Path, quantize: str) -> None:
    store = ImageLayout(tmp_path / "store")
    create(store, NAME, directory, recipe=Recipe.parse(quantize=quantize))
    saved = {
        name: tensor.float().numpy()
        for path in (directory / "text_encoder").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    aimage = read_aimage(store, NAME).aimage
    layers = [layer.name for layer in aimage.list_layers("text_encoder")]
    groups = [name for name in layers if name.endswith(".experts")]
    assert len(groups) == 2
    assert not [name for name in layers if ".experts." in name]
    weights = ModelWeights.open(store, aimage, "text_encoder")
    assert set(weights.keys()) == set(saved)
    experts = [name for name in saved if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name, value in saved.items():
        read = weights.read_numpy(name).astype(np.float32)
        if quantize and name in experts:
            assert weights.get_quantization(name) == Quantization.parse("int8")
            step = np.ptp(value, axis=-1).max() / 255
            assert np.abs(read - value).max() < 2 * step
            assert not np.array_equal(read, value)
        elif weights.get_quantization(name) is None:
            assert np.array_equal(read, value)
