"""The two backends with the same AImages, prompts and seeds, in float32 on a CPU."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from clowder_aimage.model.torch.library import TorchLibrary
    from tests.parity.compare import made
    from tests.parity.make_flux2 import make_flux2
    from tests.parity.make_model import Dims, draw, make
    from tests.parity.test_controlnet_parity import FORMS, make_controlnet, use

from clowder_aimage.adapter.adapter import Adapter, LowRank
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.create import create
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.library_choice import BACKENDS
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import PictureInput
from clowder_aimage.oci import Reference
from tests.adapter.vectors import TINY, AdapterVector, vectors
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
TEXTS = ("qwen3", "qwen2", "qwen3-lm")
FILE = f"sha256:{'0' * 64}"  # the pipeline is given the picture itself
SMALL: dict[str, Any] = {"width": 64, "height": 96, "steps": 4}
# One file of each kind of change, of a matrix, its parts, a vector and a text encoder; files of
# other dialects are read as the same changes
KINDS = (
    *("checkpoint-fused", "text-peft", "lora-bias", "lora-bias-without-bias"),
    *("diff", "diff-fused", "norms", "set-weight", "modules-to-save", "loha"),
    *("lokr", "lokr-decomposed-fused", "dora-rows", "dora-columns", "dora-lokr"),
)


@dataclass
class Both:
    """One model on MLX and on PyTorch."""

    mlx: Any
    torch: Any

    def compare(self, request: GenerateRequest, given: PictureInput | None = None) -> None:
        """Compare the latents of all steps, and all pictures."""
        (states, pictures), (expected, others) = (
            made(one, request, given) for one in (self.mlx, self.torch)
        )
        assert len(states) == len(expected) > 0
        for state, other in zip(states, expected, strict=True):
            bound = 1e-4 * max(1.0, float(np.abs(state).max()))
            assert np.abs(state - other).max() <= bound, f"AIMAGE_PARITY_SEED={SEED}"
        assert len(pictures) == len(others) >= request.output.n
        for picture, other in zip(pictures, others, strict=True):
            assert np.abs(picture.astype(int) - other).max() <= 1, f"AIMAGE_PARITY_SEED={SEED}"


def load(directory: Path, blobs: Path) -> Both:
    found = import_directory(directory, blobs)
    pipelines = [load_pipeline(*found, dtype="float32", backend=one) for one in ("mlx", "torch")]
    return Both(*pipelines)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=TEXTS[:1])
def zimage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("model")
    make(root / "files", SEED, draw(SEED, text_type=request.param))
    return load(root / "files", root / "blobs")


@pytest.fixture(scope="module", params=[True, False], ids=["distilled", "base"])
def flux2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("model")
    make_flux2(root / "files", SEED, is_distilled=request.param)
    return load(root / "files", root / "blobs")


def picture(seed: int, width: int, height: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return values.repeat(8, axis=0).repeat(8, axis=1)


@pytest.mark.parametrize("zimage", TEXTS, indirect=True)
def test_a_text_to_pictures_and_previews(zimage: Both) -> None:
    zimage.compare(GenerateRequest.of("a red fox", seed=SEED % 999, n=2, previews=1, **SMALL))


def test_guidance_with_an_end_and_a_limit(zimage: Both) -> None:
    options: dict[str, Any] = {"negative": "blurred", "guidance": 3.0, "guidance_end": 0.7}
    zimage.compare(GenerateRequest.of("a fox", cfg_normalization=0.8, **options, **SMALL))


@pytest.mark.parametrize("threshold", [1e-9, 10.0])
def test_a_cache_of_steps(zimage: Both, threshold: float) -> None:
    """Of which none is skipped, or all between the first and the last: both change the result."""
    sizes = {**SMALL, "steps": 5}
    request = GenerateRequest.of("a fox", guidance=2.0, cache_threshold=threshold, **sizes)
    zimage.compare(request)
    cached, exact = (
        made(zimage.torch, one, None)[0][-1]
        for one in (request, request.change(cache_threshold=0.0))
    )
    has_others = len(zimage.torch.networks.transformer.get().module.layers) > 1
    assert np.array_equal(cached, exact) == (threshold < 1 or not has_others)


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_a_picture_and_a_mask(zimage: Both, strength: float) -> None:
    start, mask = picture(SEED, 64, 96), np.zeros((96, 64), np.uint8)
    mask[16:50, 8:40] = 255
    zimage.compare(
        GenerateRequest.of("a hare", image=FILE, strength=strength, **SMALL), PictureInput(start)
    )
    request = GenerateRequest.of("a hare", image=FILE, mask=FILE, strength=strength, **SMALL)
    zimage.compare(request, PictureInput(start, mask))


def test_flux2(flux2: Both) -> None:
    rng = random.Random(SEED)
    guidance = 0.0 if flux2.mlx.family.is_distilled else 3.0
    multiple = max(16, flux2.mlx.family.sides.multiple)
    size = {"width": 4 * multiple, "height": 3 * multiple, "steps": 3}
    request = GenerateRequest.of("an owl", seed=rng.randrange(99), guidance=guidance, **size)
    flux2.compare(request.change(n=2, previews=1))
    cached = request.change(cache_threshold=10.0)
    flux2.compare(cached)
    exact, other = (made(flux2.torch, one, None)[0][-1] for one in (request, cached))
    assert not np.array_equal(exact, other)
    pictures = picture(SEED, 96, 64), picture(SEED + 1, 128, 128)
    request = GenerateRequest.of("the same owl", references=(FILE, FILE), **size)
    flux2.compare(request, PictureInput(references=pictures))


def test_adapters_of_flux2(flux2: Both) -> None:
    """Of low rank, in layers of two streams and of one, with two strengths, and undone."""
    multiple = max(16, flux2.mlx.family.sides.multiple)
    request = GenerateRequest.of("an owl", width=4 * multiple, height=3 * multiple, steps=2, seed=3)
    plain, _ = made(flux2.torch, request, None)
    names = "transformer_blocks.0.attn.add_k_proj", "single_transformer_blocks.0.attn.to_out"
    rng, changes = np.random.default_rng(SEED), {}
    for name in (f"transformer/{one}.weight" for one in names):
        rows, columns = flux2.mlx.shapes[name]
        down, up = rng.standard_normal((2, columns)), rng.standard_normal((rows, 2))
        changes[name] = (LowRank(down.astype(np.float32), up.astype(np.float32), 0.05),)
    adapters = [LoadedAdapter("it", Adapter("it", changes)) for _ in range(2)]
    for strength in (0.9, -0.5):
        for one, adapter in zip((flux2.mlx, flux2.torch), adapters, strict=True):
            one.use_adapters([(adapter, strength)])
        flux2.compare(request)
        assert not np.array_equal(made(flux2.torch, request, None)[0], plain)
    for one in (flux2.mlx, flux2.torch):
        one.use_adapters([])
    assert np.array_equal(made(flux2.torch, request, None)[0], plain)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return load(TINY, tmp_path_factory.mktemp("blobs"))


@pytest.mark.parametrize("vector", [one for one in vectors() if one.name in KINDS], ids=str)
def test_every_kind_of_adapter(tiny: Both, vector: AdapterVector, tmp_path: Path) -> None:
    """With two strengths, beside another adapter, and undone."""
    request, path = (
        GenerateRequest.of("a fox", width=32, height=32, steps=2, seed=3),
        vector.write(tmp_path),
    )
    plain, _ = made(tiny.torch, request, None)
    for strengths in ((0.8, 0.0), (-0.4, 0.5)):
        for one in (tiny.mlx, tiny.torch):
            adapter = read_adapter(path, one.shapes, label="it", base="tiny")
            name = "transformer/layers.0.attention.to_v.weight"
            rows, columns = one.shapes[name]
            values = np.random.default_rng(1)
            down, up = values.standard_normal((2, columns)), values.standard_normal((rows, 2))
            pair = LowRank(down.astype(np.float32), up.astype(np.float32), 0.05)
            other = Adapter("other", {name: (pair,)})
            both = LoadedAdapter(vector.name, adapter), LoadedAdapter("other", other)
            one.use_adapters(list(zip(both, strengths, strict=True)))
        tiny.compare(request)
        assert not np.array_equal(made(tiny.torch, request, None)[0], plain)
    for one in (tiny.mlx, tiny.torch):
        one.use_adapters([])
    assert np.array_equal(made(tiny.torch, request, None)[0], plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_control_network(form: str, tmp_path: Path) -> None:
    dims = draw(SEED, layers=3, refiners=2)
    theirs = make(tmp_path / "files", SEED, dims)
    both = load(tmp_path / "files", tmp_path / "blobs")
    make_controlnet(tmp_path / "net", form, theirs.transformer, SEED)
    for one in ("mlx", "torch"):
        use(getattr(both, one), tmp_path / "net", tmp_path / f"net-{one}")
    control = picture(SEED, 64, 96)
    request = GenerateRequest.of("a fox", control=FILE, controlnet="net", **SMALL)
    both.compare(request, PictureInput(control=control))
    if FORMS[form][1]:
        mask = np.zeros((96, 64), np.uint8)
        mask[16:50, 8:40] = 255
        both.compare(request.change(cache_threshold=10.0), PictureInput(control=control))
        painted = request.change(image=FILE, mask=FILE, strength=1.0)
        both.compare(painted, PictureInput(picture(SEED + 1, 64, 96), mask, control))


@pytest.mark.parametrize("family", ["zimage", "flux2"])
def test_layers_one_by_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is too small for a network, with a cache of steps, and a control network."""
    monkeypatch.setattr(TorchLibrary, "can_offload", lambda *_: True)
    if family == "zimage":
        theirs = make(tmp_path / "files", SEED, draw(SEED, layers=3, refiners=2))
    else:
        make_flux2(tmp_path / "files", SEED, is_distilled=True)
    both = load(tmp_path / "files", tmp_path / "blobs")
    both.torch.set_memory("auto", 1)
    multiple = max(16, both.mlx.family.sides.multiple)
    size = {"width": 4 * multiple, "height": 3 * multiple, "steps": 4}
    plain = GenerateRequest.of("a fox", cache_threshold=10.0, **size)
    both.compare(plain)
    if family == "zimage":
        make_controlnet(tmp_path / "net", "2.1", theirs.transformer, SEED)
        for one in ("mlx", "torch"):
            use(getattr(both, one), tmp_path / "net", tmp_path / f"net-{one}")
        control = picture(SEED, size["width"], size["height"])
        asked = plain.change(control=FILE, controlnet="net")
        both.compare(asked, PictureInput(control=control))
    both.torch.networks.budget.use(
        both.torch.list_stages(plain)[1]
    )  # it was released for the decoder
    assert both.torch.networks.transformer._is_in_layers


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp8"])
def test_quantized_weights(tmp_path: Path, form: str) -> None:
    """Codes are dequantized: the values of both are the same, in float32, and near in bfloat16.

    Measured: latents differ by 0.4 to 0.6 % of the largest, pictures by 1/255 on average.
    """
    make(tmp_path / "files", SEED, Dims(text_hidden=64, text_inter=64, heads=2, axes=(16, 8, 8)))
    layout = ImageLayout(tmp_path / "store")
    recipe = Recipe.parse(quantize=form)
    aimage = create(layout, Reference.parse("m"), tmp_path / "files", recipe=recipe).aimage
    assert any(layer.dtype == form for layer in aimage.layers)
    pipelines = [load_pipeline(layout, aimage, dtype="float32", backend=b) for b in BACKENDS[1:]]
    request = GenerateRequest.of("a fox", **SMALL)
    Both(*pipelines).compare(request)
    half = load_pipeline(layout, aimage, dtype="bfloat16", backend="torch")
    (states, pictures), (exact, others) = (made(one, request, None) for one in (half, pipelines[1]))
    assert 0 < np.abs(states[-1] - exact[-1]).max() <= 0.02 * np.abs(exact[-1]).max()
    assert np.abs(pictures[-1].astype(int) - others[-1]).mean() <= 4
