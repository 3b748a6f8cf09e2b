"""Small model directories: real JSON files, and weights written by our header codec."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from clowder_aimage.content import ContentStore
from clowder_aimage.create import create
from clowder_aimage.importer import PackedModel
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.tensor import compute_nbytes, encode_header
from tests.memory_store import MemoryStore

Tensor = tuple[str, str, tuple[int, ...]]
WEIGHTS: dict[str, list[Tensor]] = {
    "text_encoder": [
        ("model.embed_tokens.weight", "BF16", (5, 4)),
        ("model.layers.0.mlp.up_proj.weight", "F16", (4, 4)),
        ("model.norm.weight", "F32", (4,)),
    ],
    "transformer": [
        ("layers.0.attention.to_q.weight", "BF16", (4, 4)),
        ("pad_token", "F32", (1, 4)),
        ("scale", "F32", ()),
        ("unused.weight", "F16", (0, 4)),
    ],
    "vae": [("decoder.conv_in.weight", "F32", (2, 2, 3, 3))],
}
CLASSES = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3Model"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FILES: dict[str, Any] = {
    "model_index.json": {
        "_class_name": "ZImagePipeline",
        "_diffusers_version": "0.42.1",
        **CLASSES,
    },
    "scheduler/scheduler_config.json": {"_class_name": CLASSES["scheduler"][1], "shift": 3.0},
    "text_encoder/config.json": {"architectures": ["Qwen3Model"], "hidden_size": 4},
    "text_encoder/generation_config.json": {"do_sample": True},
    "tokenizer/tokenizer.json": {"version": "1.0", "model": {"type": "BPE"}},
    "tokenizer/tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"},
    "tokenizer/chat_template.jinja": "{{ messages[0].content }}\n",
    "transformer/config.json": {"_class_name": CLASSES["transformer"][1], "dim": 4},
    "vae/config.json": {"_class_name": CLASSES["vae"][1], "sample_size": 64},
}


def in_memory() -> ContentStore:
    """Return a store in memory with all methods that create and convert use."""
    return cast(ContentStore, MemoryStore())


def weights_name(component: str) -> str:
    """Return the weight file name that the library of a component uses."""
    return "model" if component == "text_encoder" else "diffusion_pytorch_model"


def data_of(tensor: Tensor, seed: str) -> bytes:
    """Return bytes of the right length, derived from the tensor's name and ``seed``."""
    name, dtype, shape = tensor
    pattern = f"{seed}:{name}:".encode()
    size = compute_nbytes(dtype, shape)
    return (pattern * (size // len(pattern) + 1))[:size]


def safetensors(tensors: Iterable[Tensor], seed: str = "", **metadata: str) -> bytes:
    """Return a whole safetensors file."""
    tensors = list(tensors)
    return encode_header(tensors, metadata) + b"".join(data_of(t, seed) for t in tensors)


@dataclass
class Model:
    """A model directory that tests modify and pack."""

    directory: Path
    store: Path
    seeds: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, value: Any) -> Path:
        """Write a file: bytes and text unchanged, other values as JSON."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(value, bytes | str):
            value = json.dumps(value, indent=2)
        path.write_bytes(value if isinstance(value, bytes) else value.encode())
        return path

    def read(self, name: str) -> Any:
        return json.loads((self.directory / name).read_bytes())

    def fill(self) -> Model:
        """Write the whole directory."""
        for name, value in FILES.items():
            self.write(name, value)
        for component, tensors in WEIGHTS.items():
            seed = self.seeds.get(component, component)
            data = safetensors(tensors, seed, format="pt")
            self.write(f"{component}/{weights_name(component)}.safetensors", data)
        return self

    def weights(self, component: str) -> Path:
        return self.directory / component / f"{weights_name(component)}.safetensors"

    def shard(self, component: str, *shards: list[Tensor]) -> Path:
        """Split the weight file of a component into shards and return their index."""
        self.weights(component).unlink()
        seed = self.seeds.get(component, component)
        stem = weights_name(component)
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(shards, 1):
            name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
            self.write(f"{component}/{name}", safetensors(tensors, seed, format="pt"))
            weight_map |= {tensor[0]: name for tensor in tensors}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        return self.write(f"{component}/{stem}.safetensors.index.json", index)

    def create(self, name: str = "model", **options: Any) -> PackedModel:
        """Pack it into the store on disk."""
        return create(ImageLayout(self.store), Reference.parse(name), self.directory, **options)

    def digest(self, **options: Any) -> str:
        """Return the digest of the model packed into a fresh store."""
        return str(
            create(in_memory(), Reference.parse("m"), self.directory, **options).descriptor.digest
        )


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Model]:
    """Return ``make_model(name, component=seed)``: a model directory of that name."""

    def make(name: str = "model", **seeds: str) -> Model:
        return Model(tmp_path / name, tmp_path / "store", seeds).fill()

    return make


@pytest.fixture
def model(make_model: Callable[..., Model]) -> Model:
    """Return a valid model."""
    return make_model()
