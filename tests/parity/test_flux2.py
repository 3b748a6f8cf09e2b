"""FLUX.2 [klein] compared with diffusers, on models drawn anew.

One run of the reference gives the latents after each step and the picture.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from tests.parity.compare import made
    from tests.parity.make_flux2 import make_flux2

from PIL import Image as Picture

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flux2.family import Flux2
from clowder_aimage.model.library_choice import MLX, TORCH
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import PictureInput
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
LONG = "an owl over a mill, " * 60  # over 512 tokens: cut


class Both:
    """A model in diffusers and in this program."""

    def __init__(self, root: Path, seed: int, backend: str, is_distilled: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.theirs = make_flux2(root / "files", seed, is_distilled=is_distilled)
        store, aimage = import_directory(root / "files", root / "blobs")
        self.ours = load_pipeline(store, aimage, dtype="float32", backend=backend)

    def compare(self, request: GenerateRequest, *pictures: Picture.Image) -> None:
        """Compare the last latents, and the picture."""
        latents, expected = self._reference(request, list(pictures))
        given = PictureInput(references=tuple(np.asarray(one) for one in pictures))
        states, (image,) = made(self.ours, request, given)
        found = states[-1]
        assert found.shape == latents.shape
        bound = 1e-4 * max(1.0, float(np.abs(latents).max()))
        assert np.abs(found - latents).max() <= bound, f"AIMAGE_PARITY_SEED={SEED}: {request}"
        away = np.abs(image.astype(int) - expected)
        assert away.max() <= 1, f"AIMAGE_PARITY_SEED={SEED}: {request}"

    def _reference(
        self, request: GenerateRequest, pictures: list[Picture.Image]
    ) -> tuple[np.ndarray, np.ndarray]:
        seen: list[torch.Tensor] = []

        def note(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
            seen.append(values["latents"])
            return values

        made = self.theirs(
            prompt=request.prompt,
            image=pictures or None,
            height=request.sampling.height,
            width=request.sampling.width,
            num_inference_steps=request.sampling.steps,
            guidance_scale=request.guidance.scale,
            generator=torch.Generator().manual_seed(request.sampling.seed),
            callback_on_step_end=note,
            output_type="pil",
        ).images[0]
        rows = request.sampling.height // self.ours.family.sides.multiple
        latents = seen[-1][0].T.reshape(-1, rows, seen[-1].shape[1] // rows)
        return latents.numpy(), np.asarray(made).astype(int)


@pytest.fixture(scope="module", params=itertools.product((MLX, TORCH), (True, False)))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    backend, is_distilled = request.param
    return Both(tmp_path_factory.mktemp("model"), SEED + is_distilled, backend, is_distilled)


def drawn(rng: random.Random, width: int, height: int) -> Picture.Image:
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (6, 8, 3), np.uint8)
    return Picture.fromarray(values).resize((width, height), Picture.Resampling.BICUBIC)


def text_request(both: Both, rng: random.Random) -> GenerateRequest:
    """Return a request with another size, and with guidance if the model has it."""
    family = both.ours.family
    assert isinstance(family, Flux2)
    multiple, guidance = family.sides.multiple, 1.0 if family.is_distilled else 4.0
    width, height = (multiple * rng.randrange(2, 8) for _ in range(2))
    seed = rng.randrange(1 << 32)
    return GenerateRequest.of(
        "a red fox", width=width, height=height, steps=4, seed=seed, guidance=guidance
    )


@pytest.mark.parametrize("prompt", ["", "a red fox ß 霧", LONG], ids=["empty", "short", "long"])
def test_a_picture_from_a_text(both: Both, prompt: str) -> None:
    request = text_request(both, random.Random(f"{SEED} {prompt}"))
    both.compare(request.change(prompt=prompt))


@pytest.mark.parametrize("count", [1, 3])
def test_pictures_from_references(both: Both, count: int) -> None:
    rng = random.Random(f"{SEED} {count}")
    sizes = [(rng.randrange(64, 150), rng.randrange(64, 150)) for _ in range(count)]
    both.compare(text_request(both, rng), *(drawn(rng, *size) for size in sizes))


@pytest.mark.parametrize("both", [(MLX, True), (TORCH, True)], indirect=True)
def test_a_reference_of_more_than_a_megapixel_is_scaled_down(both: Both) -> None:
    rng = random.Random(SEED)
    picture = drawn(rng, 3000, 400)
    multiple = both.ours.family.sides.multiple
    request = text_request(both, rng).change(width=2 * multiple, height=multiple, steps=1)
    both.compare(request, picture)
