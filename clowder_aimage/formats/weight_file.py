"""Weight files of a limited size, in the forms of transformers, diffusers, MLX and ModelOpt.

A single file is named ``STEM.safetensors``. Several are ``STEM-00001-of-0000N.safetensors``, with
``STEM.safetensors.index.json`` (transformers, "Sharded checkpoints"): tensors are sorted by name,
and a new file begins at the limit. Within a file wide types come first, so that each tensor is
aligned for its type (safetensors, ``serialize``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.tensor import DTYPE_BITS, encode_header
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.weight import SourceTensor, Weight

# Bytes of tensors in a file, the default of transformers 4. A larger tensor is alone in its file.
SHARD = 5 * 10**9
STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A planned safetensors file: its header and its tensors, in order."""

    name: str
    header: bytes
    entries: tuple[WeightEntry, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def plan_weight_files(
    stem: str, entries: Sequence[WeightEntry], limit: int = SHARD
) -> list[WeightFile]:
    """Return the files that hold ``entries``.

    Raises:
        FormatError: Two tensors have the same name, or a name is invalid.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    for previous, following in pairwise(ordered):
        if previous.name == following.name:
            raise FormatError(f"duplicate tensor {previous.name[:200]} in {stem}.safetensors")
    shards = _split(ordered, limit)
    return [
        _build_file(_format_name(stem, number, len(shards)), shard)
        for number, shard in enumerate(shards, 1)
    ]


def build_index_file(stem: str, files: Sequence[WeightFile]) -> tuple[str, bytes] | None:
    """Return the name and bytes of the index of several files, or None for one file."""
    if len(files) < 2:
        return None
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    size = sum(entry.nbytes for file in files for entry in file.entries)
    value = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return f"{stem}.safetensors.index.json", text.encode()


def are_usual(stem: str, weights: Sequence[Weight], paths: Iterable[Path]) -> bool:
    """Return True if an export without stored headers writes these weight files and index."""
    tensors = [entry for weight in weights for entry in build_entries("", weight)]
    files = plan_weight_files(stem, tensors)
    expected = {file.name: file.header for file in files}
    if (index := build_index_file(stem, files)) is not None:
        expected[index[0]] = index[1]
    weight_paths = {path.name: path for path in paths if ".safetensors" in path.name}
    return expected.keys() == weight_paths.keys() and all(
        _begins(weight_paths[name], start) for name, start in expected.items()
    )


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _split(ordered: Sequence[WeightEntry], limit: int) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    size = 0
    for entry in ordered:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _format_name(stem: str, number: int, count: int) -> str:
    number_suffix = f"-{number:05}-of-{count:05}" if count > 1 else ""
    return f"{stem}{number_suffix}.safetensors"


def _build_file(name: str, shard: Sequence[WeightEntry]) -> WeightFile:
    ordered = sorted(shard, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.name))
    header = encode_header([(e.name, e.dtype, e.shape) for e in ordered], _METADATA)
    return WeightFile(name, header, tuple(ordered))


_WEIGHT = ".weight"
_MLX = {SCALE: ".scales", BIAS: ".biases"}
_MODELOPT = {SCALE: ("_scale", "F8_E4M3"), GLOBAL_SCALE: ("_scale_2", "F32")}
# Bytes of a word of codes.
_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor of a planned file, and the location of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


def is_modelopt(weight: Weight) -> bool:
    """Return True if a weight is written in ModelOpt's form: it has a global scale."""
    return any(chunk.suffix == GLOBAL_SCALE for chunk in weight.parts)


def get_stem(weight: Weight) -> str:
    """Return the module of a weight."""
    return weight.name.removesuffix(_WEIGHT)


def build_entries(component: str, weight: Weight) -> list[WeightEntry]:
    """Return the tensors of a weight in a file.

    Raises:
        ModelError: It is quantized, and its name is not valid for quantized weights.
    """
    if weight.quantization is None:
        return [
            WeightEntry(weight.name, chunk.dtype, chunk.shape, chunk.tensor)
            for chunk in weight.parts
        ]
    if not weight.name.endswith(_WEIGHT):
        raise ModelError(
            f"{component}/{weight.name[:200]} is quantized to {weight.dtype}, but the formats of "
            "MLX and ModelOpt support only quantized tensors named .weight",
            hint="export the unquantized AImage",
        )
    return _build_modelopt_entries(weight) if is_modelopt(weight) else _build_mlx_entries(weight)


def _build_mlx_entries(weight: Weight) -> list[WeightEntry]:
    module = get_stem(weight)
    return [
        WeightEntry(
            module + _MLX.get(chunk.suffix, _WEIGHT), chunk.dtype, chunk.shape, chunk.tensor
        )
        for chunk in weight.parts
    ]


def _build_modelopt_entries(weight: Weight) -> list[WeightEntry]:
    """Return nvfp4 entries: the words of codes as bytes of two codes, the low half first."""
    tensors = []
    for chunk in weight.parts:
        if chunk.suffix in _MODELOPT:
            word, dtype = _MODELOPT[chunk.suffix]
            tensors.append(WeightEntry(weight.name + word, dtype, chunk.shape, chunk.tensor))
        else:
            shape = (*chunk.shape[:-1], chunk.shape[-1] * _BYTES)
            tensors.append(WeightEntry(weight.name, "U8", shape, chunk.tensor))
    return tensors
