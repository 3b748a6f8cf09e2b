"""The main job compared with diffusers: the same directory gives the same picture.

The directory is saved by diffusers and goes through create, push, a real registry, pull and run.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.process import Aimage

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from tests.parity.compare import run
    from tests.parity.make_model import draw, make
from PIL import Image

from clowder_aimage.generation.request import GenerateRequest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
WORDS = "a red fox jumps over blue water at dawn ß 霧 near the old mill".split()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "bfloat16 shards"])
def test_the_picture_that_diffusers_makes(
    sharded: bool, aimage: Callable[..., Aimage], repository: str, tmp_path: Path
) -> None:
    rng = random.Random(SEED + sharded)
    fixed = {"max_shard_size": "50KB", "dtype": torch.bfloat16} if sharded else {}
    directory = tmp_path / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make(directory, SEED + sharded, draw(SEED + sharded, **fixed))
    here, there = aimage("here"), aimage("there")
    created = here("create", repository, directory).line
    assert here("push", repository).line == created
    assert there("pull", repository).line == created
    for index in range(1 if sharded else 2):
        request = GenerateRequest.of(
            " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 45)))),
            width=16 * rng.randrange(2, 9),
            height=16 * rng.randrange(2, 9),
            steps=rng.randrange(1, 7),
            seed=rng.randrange(1 << 40),
            guidance=(0.0, 2.5, 0.0)[index],
            guidance_end=(1.0, rng.random(), 1.0)[index],
            negative=(None, "grey mist", None)[index],
        )
        options = [("--negative", request.guidance.negative)] if request.guidance.negative else []
        options += [
            (f"--{name.replace('_', '-')}", str(request.collect_values()[name]))
            for name in ("width", "height", "steps", "seed", "guidance", "guidance_end")
        ]
        flat = [part for option in options for part in option]
        path = there("run", repository, request.prompt, *flat, "-o", f"{index}.png").line
        with Image.open(there.home / path) as picture:
            ours = np.asarray(picture).astype(int)
        theirs = run(reference, request)[1].astype(int)
        assert ours.shape == theirs.shape == (request.sampling.height, request.sampling.width, 3)
        assert np.abs(ours - theirs).max() <= 1, f"AIMAGE_PARITY_SEED={SEED}: {request}"
