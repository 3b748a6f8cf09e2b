"""export --as: adapters in the names of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.reader import read_adapter
from tests.adapter.vectors import tiny_shapes, vectors
from tests.process import Aimage

VECTORS = {vector.name: vector for vector in vectors()}


@pytest.fixture
def here(stocked: Callable[[], Aimage]) -> Aimage:
    return stocked()


def deltas(path: Path) -> dict[str, np.ndarray]:
    """Return the change of each tensor of tiny."""
    shapes = tiny_shapes()
    found = read_adapter(path, shapes, label=str(path), base="tiny").changes
    zero = {name: np.zeros(shapes[name], np.float32) for name in found}
    return {
        name: dense.apply_changes(zero[name], [(change, 1.0) for change in changes])
        for name, changes in found.items()
    }


def assert_same(one: Path, other: Path) -> None:
    first, second = deltas(one), deltas(other)
    assert first.keys() <= second.keys()  # a stacked layer has zeros for those that are not changed
    for name, values in second.items():
        np.testing.assert_allclose(values, first.get(name, 0.0), atol=1e-6)


@pytest.mark.parametrize(
    ("vector", "dialect"),
    [
        ("ai-toolkit-alpha", "peft"),
        ("ai-toolkit-alpha", "comfyui"),
        ("comfyui-down", "diffusers"),
        ("peft-config", "kohya"),
    ],
)
def test_an_adapter_in_another_dialect_is_the_same(here: Aimage, vector: str, dialect: str) -> None:
    source = VECTORS[vector].write(here.home / "in")
    here("create", "style:v1", source.parent if VECTORS[vector].config else source)
    name = "out" if dialect == "peft" else "out.safetensors"
    done = here("export", "style:v1", name, "--as", dialect)
    assert done.line == name
    written = here.home / name
    assert_same(source, written / "adapter_model.safetensors" if dialect == "peft" else written)
    here("create", "again", name)
    if dialect == "peft":
        assert json.loads((written / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_what_cannot_be_written(here: Aimage) -> None:
    here("create", "style", VECTORS["dora-rows"].write(here.home / "in"))
    done = here("export", "style", "out.safetensors", "--as", "diffusers", code=2)
    assert "DoRA of kohya-ss" in done.err
    assert not (here.home / "out.safetensors").exists()
    done = here("export", "x", "out.safetensors", "--as", "kohya", code=2)
    assert "x:latest is not an image model that kohya has a layout for" in done.err
    assert "omit --as" in done.err
    (here.home / "there").write_text("mine")
    done = here("export", "style", "there", "--as", "kohya", code=2)
    assert "there exists already" in done.err
    assert (here.home / "there").read_text() == "mine"
    here("export", "gone", "out.safetensors", "--as", "kohya", code=3)
    done = here("export", "style", "out", "--as", "kohya", "--links", code=2)
    assert "--links cannot be combined with --as" in done.err
