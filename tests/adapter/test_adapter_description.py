"""Facts of adapters, which are read without their matrices and without numpy."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import clowder_aimage.adapter
from clowder_aimage.adapter.description import describe
from clowder_aimage.document.schema import validate
from clowder_aimage.formats import lora
from clowder_aimage.formats.detection import LORA, detect
from clowder_aimage.formats.shard_index import read_file
from tests.adapter.vectors import AdapterVector, pair_of, random, safetensors, tiny_shapes, vectors

PAIR = pair_of("transformer.layers.0.attention.to_q", random(4, 48), random(48, 4), "AB", True)
TYPES = {
    "diff": "full",
    "norms": "full",
    "loha-fused": "loha",
    "lokr": "lokr",
    "lokr-peft": "lokr",
    "dora-peft": "dora",
    "dora-rows": "dora",
    "dora-lokr": "dora",
    "distill-patch": "lora",
}
VECTORS = vectors()


def described(path: Path) -> dict[str, Any]:
    found = lora.take(path).facts["adapter"]
    assert isinstance(found, dict)
    validate("aimage-config", {"schemaVersion": 1, "components": {}, "adapter": found})
    return found


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_every_vector_is_described(vector: AdapterVector, tmp_path: Path) -> None:
    path = vector.write(tmp_path)
    source = path if vector.config is None else tmp_path
    if not {"modules_to_save", "bias"} & (vector.config or {}).keys():
        assert detect(path) == LORA
    found = described(source)
    assert found["type"] == TYPES.get(vector.name, found["type"])
    assert found["targets"]
    config = tmp_path / lora.CONFIG if vector.config is not None else None
    lora.check_fit(path, tiny_shapes(), "tiny", config)


def test_several_types_are_listed(tmp_path: Path) -> None:
    vector = next(one for one in VECTORS if one.name == "distill-patch")
    found = described(vector.write(tmp_path))
    assert (found["types"], found["rank"], found["alpha"]) == (["lora", "full"], 4, 6)
    assert "layers.0.attention.qkv" in found["targets"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"activation_text": "ohwx"}, {"triggerWords": ["ohwx"]}),
        ({"trigger_words": '["a", "b, c"]'}, {"triggerWords": ["a", "b, c"]}),
        ({"trigger_words": "[1"}, {}),
        *(
            ({key: "0.75"}, {"weight": 0.75})
            for key in ("preferred_weight", "strength", "default_strength", "multiplier", "scale")
        ),
        ({"scale": "2", "recommended_weight": "0.5"}, {"weight": 0.5}),
        ({"modelspec.title": " Outlines ", "ss_output_name": "x"}, {"title": "Outlines"}),
        ({"ss_output_name": "x"}, {"title": "x"}),
        ({"modelspec.architecture": "Z-Image/lora"}, {"base": "Z-Image/lora"}),
        (
            {"ss_base_model_version": "zimage", "modelspec.architecture": "Z-Image/lora"},
            {"base": "zimage"},
        ),
    ],
)
def test_stated_facts_are_read(
    metadata: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors(PAIR, metadata))
    found = described(path)
    plain = {"type": "lora", "rank": 4, "alpha": 6, "targets": ["layers.0.attention.to_q"]}
    assert found == plain | expected
    assert lora.read_facts(path) == found


def test_alpha_is_that_of_the_tensors_then_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    stated = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2.5})}
    path.write_bytes(safetensors(PAIR, stated))
    assert describe(path, read_file(path), {"lora_alpha": 3})["alpha"] == 6
    bare = {name: array for name, array in PAIR.items() if "lora" in name}
    path.write_bytes(safetensors(bare, stated))
    assert describe(path, read_file(path))["alpha"] == 2.5
    assert describe(path, read_file(path), {"lora_alpha": 3})["alpha"] == 3


def test_facts_are_read_without_numpy() -> None:
    """The install that pushes and pulls does not have it."""
    folder = Path(clowder_aimage.adapter.__file__ or "").parent
    for name in ("names", "peft_config", "target", "layer", "fit", "description"):
        text = (folder / f"{name}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("clowder_aimage.adapter.adapter", "numpy"), name
            elif isinstance(node, ast.Import):
                assert "numpy" not in {alias.name for alias in node.names}, name
