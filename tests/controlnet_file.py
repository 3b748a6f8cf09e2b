"""Small control networks of the tiny model, with the names of alibaba-pai's files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

Arrays = dict[str, np.ndarray]
# The published forms: those of 2.0 have a refiner that is not used
V1, V20, V21 = "1.0", "2.0", "2.1"
REFINERS = {V1: None, V20: "control_layers", V21: "control_noise_refiner"}


def tensors(form: str = V21, *, seed: int = 0, dim: int = 48, layers: int = 2) -> Arrays:
    """Return random tensors for a width of ``dim`` in two heads, and one refiner layer."""
    random = np.random.default_rng(seed)
    channels = 16 if form == V1 else 33
    found = {"control_all_x_embedder.2-1.weight": random.normal(size=(dim, 4 * channels))}
    found["control_all_x_embedder.2-1.bias"] = random.normal(size=dim)
    for index in range(layers):
        found |= _block(f"control_layers.{index}.", dim, random)
        found |= _projections(f"control_layers.{index}.", dim, random, is_first=not index)
    found |= _block("control_noise_refiner.0.", dim, random)
    if form == V21:
        found |= _projections("control_noise_refiner.0.", dim, random, is_first=True)
    return {
        name: (value / (np.sqrt(value.shape[-1]) if value.ndim == 2 else 10)).astype(np.float32)
        for name, value in found.items()
    }


def _block(prefix: str, dim: int, random: np.random.Generator) -> Arrays:
    hidden, head, time = int(dim / 3 * 8), dim // 2, min(dim, 256)
    shapes: dict[str, tuple[int, ...]] = {
        **{f"attention.{name}.weight": (dim, dim) for name in ("to_q", "to_k", "to_v", "to_out.0")},
        **{f"attention.{name}.weight": (head,) for name in ("norm_q", "norm_k")},
        **{f"feed_forward.{name}.weight": (hidden, dim) for name in ("w1", "w3")},
        "feed_forward.w2.weight": (dim, hidden),
        **{
            f"{name}_norm{index}.weight": (dim,)
            for name in ("attention", "ffn")
            for index in (1, 2)
        },
        "adaLN_modulation.0.weight": (4 * dim, time),
        "adaLN_modulation.0.bias": (4 * dim,),
    }
    return {
        prefix + name: random.normal(size=shape) + (10 if "norm" in name else 0)
        for name, shape in shapes.items()
    }


def _projections(prefix: str, dim: int, random: np.random.Generator, *, is_first: bool) -> Arrays:
    names = ("before_proj", "after_proj") if is_first else ("after_proj",)
    made = {f"{prefix}{name}.weight": random.normal(size=(dim, dim)) for name in names}
    return made | {f"{prefix}{name}.bias": random.normal(size=dim) for name in names}


def config(form: str, *, layers: int = 2) -> dict[str, object]:
    """Return the configuration that diffusers writes."""
    refiner = REFINERS[form]
    return {
        "_class_name": "ZImageControlNetModel",
        "_diffusers_version": "0.42.1",
        "add_control_noise_refiner": refiner,
        "all_f_patch_size": [1],
        "all_patch_size": [2],
        "control_in_dim": 16 if form == V1 else 33,
        "control_layers_places": list(range(layers)),
        "control_refiner_layers_places": [0] if refiner else [],
        "dim": 48,
        "n_heads": 2,
        "n_kv_heads": 2,
        "n_refiner_layers": 1,
        "norm_eps": 1e-05,
        "qk_norm": True,
    }


def write_file(path: Path, values: Arrays) -> Path:
    """Write a file of tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors.numpy.save(values))
    return path


def write_directory(path: Path, form: str = V21) -> Path:
    """Write a directory as diffusers does, without the refiner that is not used."""
    values = tensors(form)
    if form == V20:
        values = {name: one for name, one in values.items() if "noise_refiner" not in name}
    write_file(path / "diffusion_pytorch_model.safetensors", values)
    (path / "config.json").write_text(json.dumps(config(form)))
    return path
