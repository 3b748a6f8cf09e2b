"""The language model in an image model: shared blobs, a damaged last layer, other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.process import Aimage
from tests.text.tiny_text import write_model

LAST = "model.layers.1.mlp."
DAMAGED = (f"{LAST}down_proj.weight", f"{LAST}up_proj.weight")
Models = Callable[..., Aimage]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "qwen3")


@pytest.fixture
def models(aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path, whole: Path) -> Models:
    """Return a command line with the image model z, whose text encoder is ``whole``, or damaged."""

    def make(zeros: float = 0.5, **config: Any) -> Aimage:
        model = tmp_path / "z"
        shutil.copytree(tiny, model)
        encoder, tokenizer = model / "text_encoder", model / "tokenizer"
        for file in (*encoder.iterdir(), *tokenizer.iterdir()):
            file.unlink()
        tensors = load_file(whole / "model.safetensors")
        for name in DAMAGED if zeros else ():
            values = tensors[name].copy()
            values.reshape(-1)[: int(zeros * values.size)] = 0
            tensors[name] = values
        save_file(tensors, encoder / "model.safetensors")
        fields = json.loads((whole / "config.json").read_text()) | config
        if config:
            (encoder / "config.json").write_text(json.dumps(fields))
        else:
            shutil.copy(whole / "config.json", encoder)
        shutil.copy(whole / "generation_config.json", encoder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(whole / name, tokenizer)
        here = aimage()
        here("create", "-q", "z", model)
        return here

    return make


def layers(here: Aimage, name: str) -> dict[str, str]:
    """Return the digests of an AImage by the names of its layers."""
    found = read_aimage(ImageLayout(here.store), Reference.parse(name)).aimage.layers
    return {layer.name: str(layer.descriptor.digest) for layer in found}


@pytest.mark.parametrize("donor", ["directory", "aimage", "image model"])
def test_blobs_are_shared_but_those_that_differ(
    models: Models, whole: Path, tmp_path: Path, donor: str
) -> None:
    here, weights = models(), str(whole)
    if donor == "aimage":
        here("create", "-q", "qwen3", whole)
        weights = "qwen3"
    elif donor == "image model":
        other = tmp_path / "other"
        shutil.copytree(tmp_path / "z", other)
        shutil.copy(whole / "model.safetensors", other / "text_encoder")
        here("create", "-q", "klein", other)
        weights = "klein"
    made = here("create", "e", "--enhancer", "--from", "z", "--weights", weights, "--json").value
    assert sorted(made["replaced"]) == sorted(DAMAGED)
    base, own = layers(here, "z"), layers(here, "e")
    tensors = [name for name in own if name.endswith(".weight")]
    same = [name for name in tensors if own[name] == base[f"text_encoder/{name}"]]
    assert len(tensors) - len(same) == 2 and len(same) == made["tensors"] - 2
    assert own["config.json"] == base["text_encoder/config.json"]
    assert own["tokenizer.json"] == base["tokenizer/tokenizer.json"]
    here("create", "-q", "qwen3", whole)
    assert own == layers(here, "qwen3")
    shown = here("show", "e", "--json").value["config"]
    assert shown.pop("license") == "apache-2.0"  # of the image model
    assert shown == here("show", "qwen3", "--json").value["config"]
    assert not [name for name in here("ls").out.split() if "enhancer-weights" in name]


def test_a_whole_text_encoder_needs_no_other_weights(models: Models) -> None:
    here = models(0, architectures=["Qwen3Model"])
    assert here("create", "e", "--enhancer", "--from", "z", "--json").value["replaced"] == []
    assert here("show", "e", "--json").value["config"]["architecture"] == "Qwen3ForCausalLM"


def test_a_damaged_text_encoder_is_refused(models: Models, whole: Path, tmp_path: Path) -> None:
    here = models(0.2)
    said = here("create", "e", "--enhancer", "--from", "z", code=2).err
    assert "the last layer of the text encoder of z:latest is damaged" in said
    assert "--weights" in said
    tensors = load_file(whole / "model.safetensors")
    tensors[DAMAGED[0]] = np.zeros_like(tensors[DAMAGED[0]])
    shutil.copytree(whole, tmp_path / "damaged")
    save_file(tensors, tmp_path / "damaged" / "model.safetensors")
    how = ("create", "e", "--enhancer", "--from", "z", "--weights", tmp_path / "damaged")
    assert "is damaged, or missing" in here(*how, code=2).err
    assert not [name for name in here("ls").out.split() if name.startswith(("e:", "enhancer"))]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "is of another model: 2"),
        ({"num_hidden_layers": 1}, "is of another model: only one of them has model.layers.1."),
        ({"intermediate_size": 64}, "has another shape or type"),
    ],
)
def test_weights_of_another_model_are_refused(
    models: Models, tmp_path: Path, other: dict[str, int], message: str
) -> None:
    here = models()
    path = write_model(tmp_path / "other", **other)  # type: ignore[arg-type]
    how = ("create", "e", "--enhancer", "--from", "z", "--weights", path)
    assert message in here(*how, code=2).err


def test_wrong_combinations_of_options_are_refused(models: Models, tiny: Path) -> None:
    here = models()
    here("create", "-q", "plain", tiny)
    for words, message in (
        (("--enhancer",), "--enhancer requires --from"),
        (("--weights", "z", "--from", "z"), "--weights requires --enhancer"),
        (("path", "--enhancer", "--from", "z"), "PATH cannot be combined with --enhancer"),
        (("--enhancer", "--from", "z", "--dtype", "f16"), "--dtype cannot be combined"),
        (("--enhancer", "--from", "plain"), "has no text encoder that is a language model"),
    ):
        assert message in here("create", "e", *words, code=2).err
