"""Adapters of FLUX.2 [klein] in each dialect: the latents of weights that were changed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.adapter.writer import convert_adapter
from clowder_aimage.create import create
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.oci import Reference
from tests.family.flux2_layout import transformer
from tests.model.denoise import denoise
from tests.model.random_flux2 import write_flux2

Arrays = dict[str, np.ndarray]
REQUEST = GenerateRequest.of("a fox", width=32, height=32, steps=2, seed=5)
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
RANK, ALPHA = 2, 3.0
BLOCK, SINGLE = "transformer_blocks.1", "single_transformer_blocks.0"
MODULES = (
    *(f"{BLOCK}.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
    *(f"{BLOCK}.attn.add_{part}_proj" for part in "qkv"),
    *(f"{BLOCK}.ff.linear_in", f"{BLOCK}.ff_context.linear_out"),
    *(f"{SINGLE}.attn.to_qkv_mlp_proj", f"{SINGLE}.attn.to_out"),
    *("x_embedder", "norm_out.linear", "proj_out", "double_stream_modulation_img.linear"),
    "time_guidance_embed.timestep_embedder.linear_1",
)


def load(root: Path, store: Path) -> FlowPipeline:
    layout, name = ImageLayout(store), Reference.parse("flux")
    create(layout, name, root)
    return load_pipeline(layout, read_aimage(layout, name).aimage, dtype="float32")


def latents(pipeline: FlowPipeline) -> np.ndarray:
    noise = pipeline.denoiser.draw_noise(REQUEST, REQUEST.sampling.seed)
    guide = pipeline.build_conditioning(REQUEST)
    *_, final = denoise(pipeline, noise, pipeline.schedule(REQUEST), guide)
    return np.array(final)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_flux2(root)
    return root


@pytest.fixture(scope="module")
def pipeline(source: Path, tmp_path_factory: pytest.TempPathFactory) -> FlowPipeline:
    return load(source, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def pairs(source: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A and B of each layer; A of layers that are stacked elsewhere is shared."""
    random, weights, shared = np.random.default_rng(7), load_file(source / WEIGHTS), Arrays()
    made = {}
    for module in MODULES:
        rows, columns = weights[f"{module}.weight"].shape
        key = re.sub(r"(to_|add_)[qkv](_proj)?$", r"\1qkv", module)
        a = shared.setdefault(key, random.normal(size=(RANK, columns)).astype(np.float32))
        made[module] = (a, random.normal(size=(rows, RANK)).astype(np.float32) * 0.05)
    return made


def original(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Return the pairs by the layers of the original code."""
    ups = transformer({f"{name}.weight": b for name, (_, b) in pairs.items()} | _block_zero(pairs))
    downs = {f"{name}.weight": np.tile(a, (2, 1)) for name, (a, _) in pairs.items()}
    names = transformer(downs | _block_zero(pairs))
    found = {}
    for name, b in ups.items():
        if not name.startswith("double_blocks.0."):
            module = name.removesuffix(".weight")
            found[module], found[f"{module}/A"] = b, names[name][:RANK]
    return found


def _block_zero(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    parts = [name.removeprefix(BLOCK) for name in pairs if re.search(r"(to_|add_)[qkv]", name)]
    return {
        f"transformer_blocks.0{part}.weight": np.ones((2, 2), np.float32)
        for part in parts
        if "single" not in part
    }


def diffusers(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    tensors = Arrays()
    for name, (a, b) in pairs.items():
        tensors[f"transformer.{name}.lora_A.weight"] = a
        tensors[f"transformer.{name}.lora_B.weight"] = b * np.float32(ALPHA / RANK)
    return tensors


def ai_toolkit(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    tensors, own = Arrays(), original(pairs)
    for name in [name for name in own if not name.endswith("/A")]:
        tensors[f"diffusion_model.{name}.lora_A.weight"] = own[f"{name}/A"]
        tensors[f"diffusion_model.{name}.lora_B.weight"] = own[name] * np.float32(ALPHA / RANK)
    return tensors


def kohya(pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    tensors, own = Arrays(), original(pairs)
    for name in [name for name in own if not name.endswith("/A")]:
        stem = f"lora_unet_{name.replace('.', '_')}"
        tensors[f"{stem}.lora_down.weight"] = own[f"{name}/A"]
        tensors[f"{stem}.lora_up.weight"] = own[name]
        tensors[f"{stem}.alpha"] = np.array(ALPHA, np.float32)
    return tensors


def test_every_spelling_gives_the_latents_of_changed_weights(
    pipeline: FlowPipeline,
    source: Path,
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
    strength: float = -0.7,
) -> None:
    root = tmp_path / "changed"
    write_flux2(root)
    weights = load_file(source / WEIGHTS)
    for name, (a, b) in pairs.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + np.float32(
            strength * ALPHA / RANK
        ) * (b @ a)
    save_file(weights, root / WEIGHTS)
    expected, plain = latents(load(root, tmp_path / "store")), latents(pipeline)
    assert np.abs(expected - plain).max() > 1e-2
    spellings: tuple[Callable[..., Arrays], ...] = (diffusers, ai_toolkit, kohya)
    for spell in spellings:
        path = tmp_path / f"{spell.__name__}.safetensors"
        save_file(spell(pairs), path)
        adapter = read_adapter(path, pipeline.shapes, label="it", base="flux")
        pipeline.use_adapters([(LoadedAdapter("it", adapter), strength)])
        found = latents(pipeline)
        pipeline.use_adapters([])
        assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max()), spell


@pytest.mark.parametrize("is_known", [True, False], ids=["base", "no base"])
def test_adapters_of_flux2_are_written_in_each_dialect(
    pipeline: FlowPipeline,
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
    is_known: bool,
) -> None:
    save_file(kohya(pairs), tmp_path / "it.safetensors")
    shapes = pipeline.shapes if is_known else None
    whole = convert_adapter(tmp_path / "it.safetensors", "diffusers", label="it", shapes=shapes)
    (tmp_path / "split.safetensors").write_bytes(b"".join(whole.encode()))
    split = load_file(tmp_path / "split.safetensors")
    for module, (a, b) in pairs.items():
        assert (split[f"transformer.{module}.lora_A.weight"] == a).all()
        assert (split[f"transformer.{module}.lora_B.weight"] == b).all()
    back = convert_adapter(tmp_path / "split.safetensors", "kohya", label="it", shapes=shapes)
    (tmp_path / "back.safetensors").write_bytes(b"".join(back.encode()))
    again, expected = load_file(tmp_path / "back.safetensors"), kohya(pairs)
    assert again.keys() == expected.keys()
    assert all((again[name] == value).all() for name, value in expected.items())
