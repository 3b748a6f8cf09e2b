"""Quantized tensors as blobs, in every supported layout. Created by ``mx.quantize``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.model.backend import Embedding, Linear, Network, RMSNorm, mx
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor import QUANT_TYPES, Quantization, encode_header
from tests.model.model_blobs import FolderStore

Part = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data
COMPONENT = "net"
NAME = "model.fc.weight"
KINDS = tuple(QUANT_TYPES)
LAYOUTS = (
    "combined",
    "combined, unsized",
    "component's name",
    "legacy key",
    "mlx keys",
    "mlx keys, configured",
    "group",
    "group of mixed kinds",
    "layers of the first generation",
    "layers of the first generation, unsized",
    "layers of mlx",
)


def bits(array: mx.array) -> Part:
    """Return an MLX array as stored in safetensors."""
    words = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint32": "U32", "uint8": "U8"}
    name = str(array.dtype).removeprefix("mlx.core.")
    plain = array.view(mx.uint16) if name == "bfloat16" else array
    return words[name], tuple(array.shape), np.array(plain).tobytes()


def quantize(
    values: np.ndarray, kind: str, group_size: int | None = None, dtype: mx.Dtype = mx.bfloat16
) -> dict[str, mx.array]:
    """Return codes at "", scales and biases at ".scale" and ".bias", from values in ``dtype``."""
    quantization = Quantization.parse(kind, group_size)
    found = mx.quantize(mx.array(values).astype(dtype), **words(quantization))
    return dict(zip(("", ".scale", ".bias"), found, strict=False))


def words(quantization: Quantization) -> dict[str, Any]:
    kind = quantization.type
    return {"group_size": quantization.group_size, "bits": kind.bits, "mode": kind.mode}


def judge(
    values: np.ndarray,
    kind: str,
    group_size: int | None = None,
    dtype: mx.Dtype = mx.bfloat16,
) -> np.ndarray:
    """Return ``values`` quantized from ``dtype`` and dequantized by MLX, in float32."""
    parts = quantize(values, kind, group_size, dtype)
    scales, biases = parts[".scale"], parts.get(".bias")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = words(Quantization.parse(kind, group_size))
    return np.array(mx.dequantize(parts[""], scales, biases, dtype=mx.float32, **how))


def blob(parts: Mapping[str, Part], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file."""
    header = encode_header([(key, *part[:2]) for key, part in parts.items()], metadata)
    return header + b"".join(data for _, _, data in parts.values())


@dataclass
class Maker:
    """A builder of an AImage with one component, or none."""

    store: FolderStore
    component: str = field(default=COMPONENT, kw_only=True)
    layers: list[Layer] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)

    def add(
        self, name: str, data: bytes, dtype: str | None = None, shape: tuple[int, ...] | None = None
    ) -> None:
        """Add the layer of a tensor or a group."""
        descriptor = self.store.add(mediatype.AIMAGE_SAFETENSORS, data)
        self.layers.append(Layer(descriptor, self.whole(name), dtype, shape))

    def whole(self, name: str) -> str:
        """Return the name of a layer."""
        return f"{self.component}/{name}" if self.component else name

    def plain(self, name: str, array: mx.array | np.ndarray) -> None:
        """Add an unquantized tensor."""
        part = bits(mx.array(array))
        self.add(name, blob({name: part}), *part[:2])

    def quantized(  # noqa: C901 - one case per layout
        self,
        name: str,
        values: np.ndarray,
        kind: str,
        layout: str = "combined",
        group_size: int | None = None,
    ) -> None:
        """Add a quantized tensor with its blobs in ``layout``."""
        parts = {part: bits(value) for part, value in quantize(values, kind, group_size).items()}
        how = Quantization.parse(kind, group_size)
        own = {f"{name}.{key}": text for key, text in how.metadata.items()}
        stem = name.removesuffix(".weight")
        mlx = {"": name, ".scale": f"{stem}.scales", ".bias": f"{stem}.biases"}
        mlx_parts = {mlx[part]: value for part, value in parts.items()}
        promise = (kind, values.shape)

        def keyed(key: str) -> dict[str, Part]:
            return {key + part: value for part, value in parts.items()}

        match layout:
            case "combined":
                self.add(name, blob(keyed(name), how.metadata), *promise)
            case "combined, unsized":
                self.add(name, blob(keyed(name), {"quant_type": kind}), *promise)
            case "component's name":
                self.add(name, blob(keyed(self.whole(name)), how.metadata))
            case "legacy key":
                self.add(name, blob(keyed("data"), how.metadata))
            case "mlx keys":
                self.add(name, blob(mlx_parts, how.metadata), "U32", parts[""][1])
            case "mlx keys, configured":
                self.config["quantization"] = words(how)
                self.add(name, blob(mlx_parts))
            case "group":
                self.add(name.rpartition(".")[0], blob(keyed(name), how.metadata))
            case "group of mixed kinds":
                other = bits(mx.ones((2, 2)))
                self.add(stem, blob({**keyed(name), f"{stem}.other": other}, own))
            case "layers of mlx":
                self.config["quantization"] = words(how)
                for key, part in mlx_parts.items():
                    self.add(key, blob({key: part}), *part[:2])
            case _:
                self.index["quantization"] = kind.upper()
                if not layout.endswith("unsized"):
                    self.index["group_size"] = how.group_size
                suffixes = {"": "", ".scale": "_scale", ".bias": "_qbias"}
                for key, part in parts.items():
                    self.add(name + suffixes[key], blob({"data": part}))

    def aimage(self) -> AImage:
        """Return the AImage, with the files that describe it."""
        files = {self.whole("config.json"): self.config, "model_index.json": self.index}
        layers = [
            Layer(self.store.add(mediatype.AIMAGE_FILE, json.dumps(value).encode()), name)
            for name, value in files.items()
        ]
        return AImage(b"{}", (*layers, *self.layers))


class Net(Network):
    """A module with layers for MATRICES and VECTORS."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Linear(64, 8)
        self.rest = [Linear(64, 64, bias=False)]
        self.table = Embedding(16, 64)
        self.norm = RMSNorm(64)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.fc(self.norm(self.rest[0](self.table(tokens))))

    @staticmethod
    def sanitize(name: str) -> str:
        return name.removeprefix("model.")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random numbers that BF16 represents exactly."""
    found = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    return (found.view(np.uint32) & 0xFFFF0000).view(np.float32)


MATRICES = {NAME: values(8, 64), "rest.0.weight": values(64, 64), "table.weight": values(16, 64)}
VECTORS = {"model.fc.bias": values(8), "norm.weight": 1 + values(64) / 4}


def made(
    store: FolderStore,
    kind: str,
    layout: str,
    size: int | None = None,
    component: str = COMPONENT,
) -> Maker:
    maker = Maker(store, component=component)
    for name, array in MATRICES.items():
        maker.quantized(name, array, kind, layout, size)
    for name, array in VECTORS.items():
        maker.plain(name, array)
    return maker


def opened(maker: Maker) -> ModelWeights:
    return ModelWeights.open(maker.store, maker.aimage(), maker.component)
