"""Small adapters of the tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

TARGET = "layers.0.attention.to_q"


def write_lora(path: Path, seed: int = 0, *, width: int = 48, **metadata: str) -> Path:
    """Write an adapter of rank 2 for a layer of the tiny model, whose width is 48."""
    random = np.random.default_rng(seed)
    tensors = {
        f"diffusion_model.{TARGET}.lora_A.weight": random.normal(size=(2, width)),
        f"diffusion_model.{TARGET}.lora_B.weight": random.normal(size=(width, 2)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {name: value.astype(np.float32) for name, value in tensors.items()}
    path.write_bytes(safetensors.numpy.save(values, metadata or None))
    return path
