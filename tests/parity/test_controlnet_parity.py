"""Pictures guided by a control network, compared with diffusers, on models drawn anew."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import (
        ZImageControlNetInpaintPipeline,
        ZImageControlNetModel,
        ZImageControlNetPipeline,
        ZImagePipeline,
    )

    from tests.parity.compare import check
    from tests.parity.make_model import draw, make

from PIL import Image as Picture

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.library_choice import MLX, TORCH
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput, StoredControlNet
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
FILE = f"sha256:{'0' * 64}"  # the pipeline is given the picture itself
# The three published forms: what makes hints for the noise refiner, and whether there is a mask
FORMS: dict[str, tuple[str | None, bool]] = {
    "1.0": (None, False),
    "2.0": ("control_layers", True),
    "2.1": ("control_noise_refiner", True),
}


@dataclass
class Controlled:
    """A model with a control network, in diffusers and in this program."""

    theirs: Any
    inpaint: Any
    ours: FlowPipeline


def make_controlnet(directory: Path, form: str, transformer: Any, seed: int) -> Any:
    """Write a control network with random values for a transformer, and return it."""
    refiner, has_mask = FORMS[form]
    config, rng = transformer.config, random.Random(seed)
    places = sorted({0, *rng.sample(range(config.n_layers), rng.randrange(1, config.n_layers))})
    # version 2.0 uses the hints of the layers, of which there may be fewer
    count = len(places) if form == "2.0" else config.n_refiner_layers
    within = list(range(min(count, config.n_refiner_layers))) if refiner else []
    torch.manual_seed(seed)
    network = ZImageControlNetModel(
        control_layers_places=places,
        control_refiner_layers_places=within,
        control_in_dim=2 * config.in_channels + 1 if has_mask else config.in_channels,
        add_control_noise_refiner=refiner,
        dim=config.dim,
        n_refiner_layers=config.n_refiner_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_heads,
        norm_eps=config.norm_eps,
        qk_norm=config.qk_norm,
    )
    with torch.no_grad():
        for name, value in network.named_parameters():
            noise = torch.randn_like(value)
            size = 0.1 if name.endswith("bias") else value[0].numel() ** -0.5
            value.copy_(1 + 0.2 * noise if "norm" in name else size * noise)
    network.save_pretrained(directory)
    return network


def use(ours: FlowPipeline, directory: Path, blobs: Path) -> None:
    """Use the control network of a directory."""
    store, aimage = import_directory(directory, blobs)
    layers = [replace(one, name=one.name.rpartition("/")[2]) for one in aimage.layers]
    ours.use_control(StoredControlNet(store, AImage(aimage.config, tuple(layers)), "the net"))


@pytest.fixture(scope="module", params=itertools.product((MLX, TORCH), FORMS))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Controlled:
    directory, (backend, form) = tmp_path_factory.mktemp("model"), request.param
    seed = SEED + list(FORMS).index(form)
    dims = draw(seed, layers=3, refiners=2)
    make(directory / "files", seed, dims)
    parts = ZImagePipeline.from_pretrained(directory / "files", dtype=torch.float32).components
    network = make_controlnet(directory / "net", form, parts["transformer"], seed)
    theirs = ZImageControlNetPipeline(**parts, controlnet=network)
    has_mask = FORMS[form][1]
    inpaint = ZImageControlNetInpaintPipeline(**parts, controlnet=network) if has_mask else None
    stored = import_directory(directory / "files", directory / "blobs")
    ours = load_pipeline(*stored, dtype="float32", backend=backend)
    use(ours, directory / "net", directory / "net_blobs")
    for one in filter(None, (theirs, inpaint)):
        one.set_progress_bar_config(disable=True)
    return Controlled(theirs, inpaint, ours)


def random_picture(seed: str, width: int, height: int) -> Picture.Image:
    rng = random.Random(f"{SEED} {seed}")
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (6, 8, 3), np.uint8)
    return Picture.fromarray(values).resize((width, height), Picture.Resampling.BICUBIC)


def compare(
    ours: FlowPipeline, theirs: Any, request: GenerateRequest, given: PictureInput, **more: Any
) -> np.ndarray:
    assert given.control is not None
    more["control_image"] = Picture.fromarray(given.control)
    more["controlnet_conditioning_scale"] = request.control.strength
    return check(ours, theirs, request, given, **more)


@pytest.mark.parametrize(("strength", "guidance"), [(1.3, 0.0), (0.5, 2.5), (0.0, 0)])
def test_a_control_picture_guides(both: Controlled, strength: float, guidance: float) -> None:
    width, height = (96, 48) if guidance else (64, 80)
    request = GenerateRequest.of(
        "a red fox",
        width=width,
        height=height,
        steps=3,
        seed=SEED % 999,
        negative="fog" if guidance else None,
        guidance=guidance,
        control=FILE,
        controlnet="net",
        control_strength=strength,
    )
    picture = random_picture(f"{strength}", width, height)
    compare(both.ours, both.theirs, request, PictureInput(control=np.asarray(picture)))


@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_a_control_picture_guides_painting(both: Controlled, guidance: float) -> None:
    if both.inpaint is None:
        pytest.skip("1.0 has no inputs for a mask")
    start, picture = random_picture("start", 96, 64), random_picture("control", 96, 64)
    mask = np.zeros((64, 96), np.uint8)
    mask[10:40, 21:70] = 255
    mask[44:52, :30] = 128
    request = GenerateRequest.of(
        "a hare",
        width=96,
        height=64,
        steps=4,
        seed=7,
        guidance=guidance,
        image=FILE,
        mask=FILE,
        control=FILE,
        controlnet="net",
    )
    given = PictureInput(np.asarray(start), mask, np.asarray(picture))
    more = {"image": start, "mask_image": Picture.fromarray(mask)}
    painted = compare(both.ours, both.inpaint, request, given, **more)
    without = request.change(image=None, mask=None, strength=None)
    alone = PictureInput(control=given.control)
    (other,) = [one for one in both.ours.generate(without, alone) if isinstance(one, Image)]
    assert not np.array_equal(painted, other.pixels)
