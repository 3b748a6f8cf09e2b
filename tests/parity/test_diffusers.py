"""diffusers is the judge: random small models, module by module and the whole picture.

Dimensions are drawn anew on each run; AIMAGE_PARITY_SEED repeats one. The seed is in the name of
every test and in every failure. Skipped where torch and diffusers are not installed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from tests.parity.compare import theirs
    from tests.parity.make_model import OTHER_TEMPLATE, draw, make

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from tests.model.model_blobs import import_directory
from tests.model.model_oracle import CASES, differences, excess, ours

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "drawn": {},
    "drawn again": {"layers": 4, "refiners": 2, "text_layers": 4, "heads": 4},
    "in shards, bfloat16": {"max_shard_size": "40KB", "dtype": torch.bfloat16},
    "qwen2": {"text_type": "qwen2"},
    "another template, language head": {"template": OTHER_TEMPLATE, "text_type": "qwen3-lm"},
    "shallow vae": {
        "vae_channels": (12, 6, 18),
        "vae_groups": 3,
        "vae_layers": 2,
        "vae_quant": True,
        "vae_attention": False,
        "latents": 4,
    },
    "five vae blocks, no qk norm": {
        "vae_channels": (8, 4, 4, 12, 8),
        "vae_groups": 4,
        "vae_quant": False,
        "vae_attention": True,
        "qk_norm": False,
    },
    "one text layer, attention bias": {"text_layers": 1, "text_extra": {"attention_bias": True}},
    "sliding window, yarn": {
        "text_layers": 4,
        "text_extra": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    },
    "linear rope, shift by size": {
        "text_extra": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}
        },
        "scheduler": {"use_dynamic_shifting": True, "shift_terminal": 0.02},
    },
}


@dataclass
class Pair:
    """One model, loaded on both sides, and the cases that are tried with it."""

    cases: Sequence[str]
    reference: Any
    pipeline: FlowPipeline


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: f"{name} (seed {SEED})")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory: Path = tmp_path_factory.mktemp("model")
    number = list(MODELS).index(request.param)
    seed, every = SEED + number, list(CASES)
    cases = every if not number else [every[number % len(every)]]
    dims = draw(seed, **MODELS[request.param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make(directory / "files", seed, dims)
    store, aimage = import_directory(directory / "files", directory / "blobs")
    pipeline = load_pipeline(store, aimage, dtype="float32")
    yield Pair(cases, reference, pipeline)


def test_same_as_diffusers(pair: Pair) -> None:
    for case in pair.cases:
        request = fitting(CASES[case], pair.pipeline.family.sides.multiple)
        found = differences(theirs(pair.reference, request), ours(pair.pipeline, request))
        assert len(found) == 6
        assert not excess(found), f"AIMAGE_PARITY_SEED={SEED}, {case}, {request}: {found}"


def fitting(request: GenerateRequest, multiple: int) -> GenerateRequest:
    """Return the request with supported sides: five VAE blocks need multiples of 32."""
    width, height = (
        side // multiple * multiple for side in (request.sampling.width, request.sampling.height)
    )
    return request.change(width=width, height=height)


@pytest.mark.parametrize("pair", ["drawn"], indirect=True)
def test_several_pictures_take_consecutive_seeds(pair: Pair) -> None:
    ask = GenerateRequest.of("a fox", width=64, height=64, steps=2, seed=5, n=2)
    _, _, first, _, _, second = pair.pipeline.generate(ask)
    for image, seed in ((first, 5), (second, 6)):
        single = GenerateRequest.of("a fox", width=64, height=64, steps=2, seed=seed)
        assert isinstance(image, Image) and image.seed == seed
        found = differences(
            {"picture": image.pixels}, {"picture": theirs(pair.reference, single)["picture"]}
        )
        assert not excess(found), f"AIMAGE_PARITY_SEED={SEED}: {found}"
