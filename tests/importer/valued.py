"""Model directories with real tensor values, to be cast, quantized and read back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.create import create
from clowder_aimage.dialect import AImage
from clowder_aimage.importer import PackedModel, Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from clowder_aimage.tensor import encode_header
from tests.importer.conftest import FILES, Model, in_memory, weights_name

Array = npt.NDArray[Any]
Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes

BLOCK = (  # of a Z-Image transformer: quantized tensors and others
    *("attention.to_q.weight", "attention.to_k.weight", "attention.to_v.weight"),
    *("attention.to_out.0.weight", "feed_forward.w1.weight", "feed_forward.w2.weight"),
    "feed_forward.w3.weight",
)
KEPT = {
    "all_x_embedder.2-1.weight": (64, 64),
    "all_final_layer.2-1.linear.weight": (64, 64),
    "all_final_layer.2-1.adaLN_modulation.1.weight": (64, 64),
    "cap_embedder.1.weight": (64, 64),
    "t_embedder.mlp.0.weight": (64, 64),
    "x_pad_token": (1, 64),
    "layers.0.attention_norm1.weight": (64,),
    "layers.0.attention.norm_q.weight": (64,),
    "layers.0.feed_forward.w1.bias": (64,),
    "layers.0.narrow.weight": (64, 24),
    "layers.0.small.weight": (2, 64),
}
ENCODER = {
    "embed_tokens.weight": (64, 64),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.input_layernorm.weight": (64,),
    "norm.weight": (64,),
}
VAE = {"decoder.mid.weight": (64, 64)}


def bf16_values(name: str, shape: tuple[int, ...], scale: float = 0.05) -> Array:
    """Return float32 values derived from the name that are exact in BF16."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * scale
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def transformer() -> dict[str, Array]:
    """Return the tensors of a small transformer: one block of each kind, and other layers."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{block}.0.{name}": (64, 64)
        for block in ("layers", "noise_refiner", "context_refiner")
        for name in BLOCK
    }
    shapes |= {
        f"{block}.0.adaLN_modulation.0.weight": (256, 64) for block in ("layers", "noise_refiner")
    }
    return {name: bf16_values(name, shape) for name, shape in (shapes | KEPT).items()}


def stored(values: Array, dtype: str) -> Stored:
    """Return values in the encoding of a file."""
    if dtype == "BF16":
        data = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        data = values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()
    return dtype, values.shape, data


def as_dtype(values: Mapping[str, Array], dtype: str) -> dict[str, Stored]:
    return {name: stored(value, dtype) for name, value in values.items()}


def file_of(tensors: Mapping[str, Stored]) -> bytes:
    """Return a whole safetensors file."""
    header = encode_header([(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
    return header + b"".join(data for _, _, data in tensors.values())


def encoder() -> dict[str, Array]:
    return {name: bf16_values(name, shape) for name, shape in ENCODER.items()}


def vae() -> dict[str, Array]:
    return {name: bf16_values(name, shape) for name, shape in VAE.items()}


def make_valued(
    directory: Path, dtype: str = "BF16", **components: Mapping[str, Stored]
) -> ValuedModel:
    """Write a model to ``directory``.

    A component has the given weights, else the default ones as ``dtype``.
    """
    model = ValuedModel(directory, directory.parent / "store")
    for name, value in FILES.items():
        model.write(name, value)
    usual = {"transformer": transformer, "text_encoder": encoder, "vae": vae}
    for name, make in usual.items():
        tensors = components.get(name) or as_dtype(make(), dtype)
        model.write(f"{name}/{weights_name(name)}.safetensors", file_of(tensors))
    return model


@dataclass
class ValuedModel(Model):
    """A model directory that is packed with a recipe."""

    def make(
        self, name: str = "m", *, store: Any = None, jobs: int | None = None, **recipe: Any
    ) -> PackedModel:
        """Pack it into the store on disk or ``store``."""
        return create(
            store or ImageLayout(self.store),
            Reference.parse(name),
            self.directory,
            recipe=Recipe.parse(**recipe),
            threads=jobs,
        )

    def recipe_digest(self, *, jobs: int | None = None, **recipe: Any) -> str:
        """Return the digest of the model packed into a fresh store."""
        return str(self.make(store=in_memory(), jobs=jobs, **recipe).descriptor.digest)


def read_back(store: Path, name: str = "m") -> AImage:
    return read_aimage(ImageLayout(store), Reference.parse(name)).aimage


def blob_of(store: Path, aimage: AImage, layer: str) -> bytes:
    return ImageLayout(store).find_path(aimage.get_layer(layer).descriptor).read_bytes()
