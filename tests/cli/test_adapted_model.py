"""create --from --lora, and convert --lora: models with adapters, and fused ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
from tests.importer.valued import as_dtype, file_of
from tests.process import Aimage

LAYERS = {
    "layers.0.attention.to_q": (48, 48),
    "layers.1.feed_forward.w2": (48, 128),
    "all_x_embedder.2-1": (48, 64),
    "context_refiner.0.attention.to_out.0": (48, 48),
}
DRAWN = ("a fox", "--steps", 1, "--seed", 1, "--size", "32x32", "-o")
SCALE = 0.5


@pytest.fixture
def here(stocked: Callable[[], Aimage]) -> Aimage:
    """Return a store with tiny as ``x``, and the adapter files ink and wash."""
    here = stocked()
    for number, name in enumerate(("ink", "wash")):
        random = np.random.default_rng(number)
        tensors = {}
        for layer, (rows, columns) in LAYERS.items():
            stem = f"transformer.{layer}"
            tensors[f"{stem}.lora_A.weight"] = random.standard_normal((2, columns)) * 0.3
            tensors[f"{stem}.lora_B.weight"] = random.standard_normal((rows, 2)) * 0.3
            tensors[f"{stem}.alpha"] = np.array(2 * SCALE)
        (here.home / f"{name}.safetensors").write_bytes(file_of(as_dtype(tensors, "F32")))
    return here


def change(here: Aimage, name: str, layer: str) -> np.ndarray:
    """Return the change of a layer by one of the files."""
    random = np.random.default_rng(("ink", "wash").index(name))
    for known, (rows, columns) in LAYERS.items():
        down = (random.standard_normal((2, columns)) * 0.3).astype(np.float32)
        up = (random.standard_normal((rows, 2)) * 0.3).astype(np.float32)
        if known == layer:
            return np.float32(SCALE) * (up @ down)
    raise KeyError(layer)


def draw(here: Aimage, *words: object) -> bytes:
    """Return the pixels of a picture by ``run``."""
    from PIL import Image

    here("run", *words, *DRAWN, "drawn.png", "-q")
    with Image.open(here.home / "drawn.png") as picture:
        return picture.tobytes()


def aimage_of(here: Aimage, name: str) -> AImage:
    return read_aimage(ImageLayout(here.store), Reference.parse(name)).aimage


def values(here: Aimage, name: str, layer: str) -> np.ndarray:
    weights = ModelWeights.open(ImageLayout(here.store), aimage_of(here, name), "transformer")
    return np.asarray(weights.read_numpy(f"{layer}.weight"), np.float32)


def rounded(array: np.ndarray) -> np.ndarray:
    """Return the nearest BF16 values, ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def test_a_model_with_adapters_draws_as_with_the_options(here: Aimage) -> None:
    plain = draw(here, "x")
    uses = ("--lora", "ink.safetensors:0.8", "--lora", "wash.safetensors:-0.4")
    expected = draw(here, "x", *uses)
    assert expected != plain
    done = here("create", "y", "--from", "x", *uses)
    assert "y:latest: 284 tensors (" in done.err
    assert draw(here, "y") == expected
    assert draw(here, "x") == plain
    config = aimage_of(here, "y").properties
    assert config["loras"] == [
        {"adapter": "ink", "strength": 0.8},
        {"adapter": "wash", "strength": -0.4},
    ]
    assert set(config["adapters"]) == {"ink", "wash"}
    shown = here("show", "y").out
    assert "\nuses " in shown
    assert "ink 0.8, wash -0.4" in shown
    assert "\nfused " not in shown


def test_a_model_with_adapters_shares_all_blobs_of_its_base(here: Aimage) -> None:
    blobs = {one.name: one.descriptor for one in aimage_of(here, "x").layers}
    before = {path.name for path in (here.store / "blobs/sha256").iterdir()}
    here("create", "y", "--from", "x", "--lora", "ink.safetensors:1.0")
    there = {one.name: one.descriptor for one in aimage_of(here, "y").layers}
    assert {name: there[name] for name in blobs} == blobs
    assert set(there) - set(blobs) == {"adapters/ink/adapter_model.safetensors"}
    after = {path.name for path in (here.store / "blobs/sha256").iterdir()}
    # The adapter, the config, the manifest, and three of the statement of the derivation
    assert len(after - before) == 6
    difference = here("diff", "x", "y").out
    assert "adapters/ink/adapter_model.safetensors" in difference
    assert "loras" in difference


def test_adapters_from_the_store_and_of_a_model_with_adapters(here: Aimage) -> None:
    here("create", "styles/ink:v1", "ink.safetensors")
    here("create", "y", "--from", "x", "--lora", "styles/ink:v1:0.5")
    here("create", "z", "--from", "y", "--lora", "wash.safetensors", "--lora", "styles/ink:v1")
    config = aimage_of(here, "z").properties
    assert [one["adapter"] for one in config["loras"]] == ["ink", "wash", "ink-2"]
    assert config["loras"][1]["strength"] == 1.0
    uses = ("--lora", "styles/ink:v1:1.5", "--lora", "wash.safetensors")
    assert draw(here, "z") == draw(here, "x", *uses)


def test_the_adapters_of_a_model_and_of_a_request_are_added(here: Aimage) -> None:
    here("create", "y", "--from", "x", "--lora", "ink.safetensors:0.8")
    both = draw(here, "y", "--lora", "wash.safetensors:0.3")
    uses = ("--lora", "ink.safetensors:0.8", "--lora", "wash.safetensors:0.3")
    assert both == draw(here, "x", *uses)


def test_fused_weights_are_summed_and_rounded_once(here: Aimage) -> None:
    uses = ("--lora", "ink.safetensors:0.8", "--lora", "wash.safetensors:-0.4")
    here("convert", "x", "f", *uses)
    for layer in LAYERS:
        total = np.float32(0.8) * change(here, "ink", layer)
        total += np.float32(-0.4) * change(here, "wash", layer)
        expected = rounded(values(here, "x", layer) + total)
        np.testing.assert_array_equal(values(here, "f", layer), expected)
    old = {one.name: one.descriptor for one in aimage_of(here, "x").layers}
    new = {one.name: one.descriptor for one in aimage_of(here, "f").layers}
    changed = {name for name in old if new[name] != old[name]}
    assert changed == {f"transformer/{layer}.weight" for layer in LAYERS}
    assert set(new) - set(old) == {"lora_fusion_info.json"}
    fused = aimage_of(here, "f").properties["fused"]
    assert [(one["name"], one["strength"]) for one in fused] == [
        ("ink.safetensors", 0.8),
        ("wash.safetensors", -0.4),
    ]
    here("export", "f", "out")
    told = json.loads((here.home / "out/lora_fusion_info.json").read_text())
    assert told["adapters"] == fused
    here("create", "again", "out")
    assert draw(here, "again") == draw(here, "f")


def test_a_fused_float32_model_draws_as_with_the_adapter(here: Aimage) -> None:
    here("convert", "x", "wide", "--dtype", "f32")
    here("convert", "wide", "f", "--lora", "ink.safetensors:0.8")
    fused = np.frombuffer(draw(here, "f"), np.uint8).astype(int)
    beside = np.frombuffer(draw(here, "wide", "--lora", "ink.safetensors:0.8"), np.uint8)
    assert np.abs(fused - beside).max() <= 1
    assert draw(here, "wide") != draw(here, "f")


def test_fusing_into_quantized_weights(here: Aimage) -> None:
    layer = "layers.1.feed_forward.w2"
    here("convert", "x", "q", "--quantize", "int8")
    done = here("convert", "q", "f", "--lora", "ink.safetensors")
    assert "q:latest is quantized: the adapters were added to its dequantized values" in done.err
    expected = values(here, "q", layer) + change(here, "ink", layer)
    step = np.ptp(expected, axis=1).max() / 255
    assert np.abs(values(here, "f", layer) - expected).max() <= step
    assert aimage_of(here, "f").get_layer(f"transformer/{layer}.weight").dtype == "int8"
    here("run", "f", *DRAWN, "f.png")


def test_fusing_into_fp8_keeps_one_scale_for_each_row(here: Aimage) -> None:
    layer = "context_refiner.0.feed_forward.w2"
    random, stem = np.random.default_rng(3), f"transformer.{layer}"
    tensors = {f"{stem}.lora_A.weight": random.standard_normal((2, 128)).astype(np.float32)}
    tensors[f"{stem}.lora_B.weight"] = random.standard_normal((48, 2)).astype(np.float32)
    (here.home / "refined.safetensors").write_bytes(file_of(as_dtype(tensors, "F32")))
    for kind in ("fp8", "mxfp8"):
        here("convert", "x", kind, "--quantize", kind)
        here("convert", kind, f"{kind}-fused", "--lora", "refined.safetensors")
        before, after = (values(here, name, layer) for name in (kind, f"{kind}-fused"))
        assert np.abs(after - before).max() > 0.5
        aimage = aimage_of(here, f"{kind}-fused")
        weights = ModelWeights.open(ImageLayout(here.store), aimage, "transformer")
        scales = weights.read_parts(f"{layer}.weight")[".scale"]
        assert (scales == scales[:, :1]).all() == (kind == "fp8")


def test_fusing_into_a_variant_uses_its_full_precision(here: Aimage) -> None:
    here("convert", "x", "q", "--quantize", "int4", "--attach")
    done = here("convert", "q", "f", "--lora", "ink.safetensors")
    assert "the values of the AImage that it is a variant of, sha256:" in done.err
    here("convert", "x", "whole", "--lora", "ink.safetensors")
    here("convert", "whole", "expected", "--quantize", "int4")
    layer = "transformer/layers.1.feed_forward.w2.weight"
    found, expected = (values(here, name, layer[12:-7]) for name in ("f", "expected"))
    # here the sum is not rounded to BF16 before it is quantized
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert aimage_of(here, "f").subject is None


def test_a_conversion_of_a_model_with_adapters_keeps_them(here: Aimage) -> None:
    here("create", "y", "--from", "x", "--lora", "ink.safetensors:0.8")
    here("convert", "y", "wide", "--dtype", "f32")
    assert aimage_of(here, "wide").properties["loras"] == aimage_of(here, "y").properties["loras"]
    assert draw(here, "wide") == draw(here, "y")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("create", "y", "--from", "x"), 2, "--from and --lora require each other"),
        (("create", "y", "--lora", "ink.safetensors"), 2, "--from and --lora require each other"),
        (
            ("create", "y", ".", "--from", "x", "--lora", "ink.safetensors", "--dtype", "f32"),
            2,
            "--dtype cannot be combined with --from",
        ),
        (("create", "y", "--from", "no", "--lora", "ink.safetensors"), 3, "no:latest"),
        (("create", "y", "--from", "x", "--lora", "gone.safetensors"), 3, "gone.safetensors"),
        (("create", "y", "--from", "x", "--lora", "x"), 2, "is not an adapter"),
        (("convert", "x", "y", "--lora", "other.safetensors"), 5, "does not match x"),
        (("create", "y", "--from", "x", "--lora", "other.safetensors"), 5, "does not match x"),
        (
            ("convert", "x", "y", "--lora", "ink.safetensors", "--quantize", "int8"),
            2,
            "--lora cannot be combined with --quantize",
        ),
        (
            ("convert", "x", "y", "--lora", "ink.safetensors", "--attach"),
            2,
            "--lora cannot be combined with --attach",
        ),
    ],
)
def test_mistakes(here: Aimage, words: tuple[str, ...], code: int, message: str) -> None:
    stem = "transformer.layers.0.attention.to_q"
    other = {f"{stem}.lora_A.weight": np.ones((2, 64)), f"{stem}.lora_B.weight": np.ones((64, 2))}
    (here.home / "other.safetensors").write_bytes(file_of(as_dtype(other, "F32")))
    done = here(*words, code=code)
    assert message in done.err
    assert "y" not in here("ls").out.split()
    assert not Path(here.home / "y").exists()
