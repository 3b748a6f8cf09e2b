"""Pictures that begin with a picture, compared with diffusers, on models drawn anew."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import ZImageImg2ImgPipeline, ZImageInpaintPipeline, ZImagePipeline

    from tests.parity.compare import check, run
    from tests.parity.make_model import draw, make

from PIL import Image as Picture

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import MLX, TORCH
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
FILE = f"sha256:{'0' * 64}"  # the pipeline is given the picture itself


class Both:
    """A model in diffusers and in this program."""

    def __init__(self, directory: Path, store: Path, seed: int, backend: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(directory, seed, draw(seed))
            parts = ZImagePipeline.from_pretrained(directory, dtype=torch.float32).components
        self.image, self.inpaint = ZImageImg2ImgPipeline(**parts), ZImageInpaintPipeline(**parts)
        self.text = ZImagePipeline(**parts)
        stored = import_directory(directory, store)
        self.ours = load_pipeline(*stored, dtype="float32", backend=backend)
        for one in (self.image, self.inpaint, self.text):
            one.set_progress_bar_config(disable=True)


@pytest.fixture(scope="module", params=(MLX, TORCH))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    model, blobs = (tmp_path_factory.mktemp(name) for name in ("model", "blobs"))
    return Both(model, blobs, SEED, request.param)


def random_picture(rng: random.Random, width: int, height: int) -> Picture.Image:
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (6, 8, 3), np.uint8)
    return Picture.fromarray(values).resize((width, height), Picture.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("strength", "steps"), [(0.6, 8), (0.3, 9), (0.05, 28), (0.875, 8), (1.0, 3), (0.55, 7)]
)
def test_a_picture_from_a_picture(both: Both, strength: float, steps: int) -> None:
    rng = random.Random(f"{SEED} {strength}")
    width, height = 16 * rng.randrange(2, 8), 16 * rng.randrange(2, 8)
    start = random_picture(rng, width, height)
    request = GenerateRequest.of(
        "a red fox",
        width=width,
        height=height,
        steps=steps,
        seed=rng.randrange(1 << 32),
        guidance=rng.choice((0.0, 2.5)),
        image=FILE,
        strength=strength,
    )
    given = PictureInput(np.asarray(start))
    check(both.ours, both.image, request, given, image=start, strength=strength)


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 8), (0.5, 6)])
def test_painting_a_part(both: Both, strength: float, steps: int) -> None:
    rng = random.Random(f"{SEED} mask {strength}")
    start = random_picture(rng, 96, 64)
    mask = np.zeros((64, 96), np.uint8)
    mask[10:40, 21:70] = 255
    mask[44:52, :30] = 128
    request = GenerateRequest.of(
        "a hare", width=96, height=64, steps=steps, seed=7, image=FILE, mask=FILE, strength=strength
    )
    given = PictureInput(np.asarray(start), mask)
    more = {"image": start, "mask_image": Picture.fromarray(mask), "strength": strength}
    check(both.ours, both.inpaint, request, given, **more)


def test_several_seeds_are_what_each_makes_alone(both: Both) -> None:
    start = random_picture(random.Random(SEED), 64, 64)
    given = PictureInput(np.asarray(start))
    request = GenerateRequest.of("a fox", width=64, height=64, steps=5, seed=11, image=FILE, n=2)
    made = [one for one in both.ours.generate(request, given) if isinstance(one, Image)]
    for image in made:
        one = GenerateRequest.of("a fox", width=64, height=64, steps=5, seed=image.seed, image=FILE)
        _, expected = run(both.image, one, image=start, strength=0.6)
        assert np.abs(image.pixels.astype(int) - expected).max() <= 1
    assert len(made) == 2


@pytest.mark.parametrize("normalization", [1.0, 0.5])
@pytest.mark.parametrize("end", [1.0, 0.6])
def test_normalized_guidance(both: Both, normalization: float, end: float) -> None:
    request = GenerateRequest.of(
        "a fox",
        width=64,
        height=48,
        steps=6,
        seed=SEED % 1000,
        negative="blurred",
        guidance=4.0,
        guidance_end=end,
        cfg_normalization=normalization,
    )
    check(both.ours, both.text, request, None)
