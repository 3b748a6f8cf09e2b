"""Adapters compared with diffusers: its picture, for all rows that it reads."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import ZImagePipeline as Reference

    from tests.parity.compare import run

from clowder_aimage.adapter import peft_config
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.errors import FormatError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.library_choice import MLX, TORCH
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from tests.adapter.vectors import AdapterVector, vectors
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

TINY = Path(__file__).parents[2] / "examples" / "tiny"
REQUEST = GenerateRequest.of("a red fox", width=64, height=64, steps=4, seed=42)
READ = [vector for vector in vectors() if vector.diffusers]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return Reference.from_pretrained(TINY, dtype=torch.float32)


@pytest.fixture(scope="module", params=(MLX, TORCH))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FlowPipeline:
    stored = import_directory(TINY, tmp_path_factory.mktemp("blobs"))
    return load_pipeline(*stored, dtype="float32", backend=request.param)


@pytest.fixture
def clean(theirs: Any, ours: FlowPipeline) -> Iterator[None]:
    yield
    theirs.unload_lora_weights()
    ours.use_adapters([])


def picture(ours: FlowPipeline, *uses: tuple[LoadedAdapter, float]) -> np.ndarray:
    ours.use_adapters(uses)
    images = [event for event in ours.generate(REQUEST) if isinstance(event, Image)]
    return images[0].pixels.astype(int)


def load_adapter(ours: FlowPipeline, vector: AdapterVector, directory: Path) -> LoadedAdapter:
    path = vector.write(directory)
    return LoadedAdapter(vector.name, read_adapter(path, ours.shapes, label="it", base="tiny"))


def test_the_rows_that_diffusers_reads() -> None:
    assert len(READ) >= 6


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("vector", READ, ids=str)
def test_the_picture_of_diffusers(
    theirs: Any, ours: FlowPipeline, vector: AdapterVector, tmp_path: Path
) -> None:
    loaded, plain = load_adapter(ours, vector, tmp_path), picture(ours)
    theirs.load_lora_weights(tmp_path, weight_name=f"{vector.name}.safetensors", adapter_name="it")
    for strength in (1.0, 0.6):
        theirs.set_adapters(["it"], [strength])
        expected = run(theirs, REQUEST)[1].astype(int)
        found = picture(ours, (loaded, strength))
        assert np.abs(found - expected).max() <= 1
        assert np.abs(found - plain).max() > 1


@pytest.mark.usefixtures("clean")
def test_two_adapters_as_in_diffusers(theirs: Any, ours: FlowPipeline, tmp_path: Path) -> None:
    names, strengths = ("ai-toolkit-alpha", "diffusers-metadata"), [0.8, -0.5]
    chosen = [vector for name in names for vector in READ if vector.name == name]
    loaded = [load_adapter(ours, vector, tmp_path) for vector in chosen]
    keys = []
    for number, vector in enumerate(chosen):
        keys.append(f"a{number}")
        file = f"{vector.name}.safetensors"
        theirs.load_lora_weights(tmp_path, weight_name=file, adapter_name=keys[-1])
    theirs.set_adapters(keys, strengths)
    expected = run(theirs, REQUEST)[1].astype(int)
    found = picture(ours, *zip(loaded, strengths, strict=True))
    assert np.abs(found - expected).max() <= 1


def test_settings_and_initializations_of_peft_are_known() -> None:
    import peft

    fields = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    variants = [name for name, field in fields.items() if field.metadata.get("is_lora_variant")]
    assert variants and all(peft_config._VARIANT.fullmatch(name) for name in variants)
    stated = typing.get_type_hints(peft.LoraConfig)["init_lora_weights"]
    (listed,) = (part for part in typing.get_args(stated) if part is not bool)
    for name in (*typing.get_args(listed), "lora_ga", True, False):
        value = {"peft_type": "LORA", "init_lora_weights": name}
        is_changed = str(name).lower().startswith(peft_config._CHANGED_BASES)
        with pytest.raises(FormatError, match="changes") if is_changed else nullcontext():
            peft_config.PeftConfig.parse(value, "c")
