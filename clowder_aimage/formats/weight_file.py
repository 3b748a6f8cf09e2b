"""Weight files of a limited size, as libraries expect them.

A single file is named ``STEM.safetensors``. Several are ``STEM-00001-of-0000N.safetensors``, with
``STEM.safetensors.index.json`` (transformers, "Sharded checkpoints"): tensors sorted by name, with
a new file when one would be too large. Within a file wide types come first, so that each tensor is
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

SHARD = 5 * 10**9  # bytes of tensors in a file; a larger tensor has a file to itself
STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A planned safetensors file: its header and the data that follow, in order."""

    name: str
    header: bytes
    entries: tuple[WeightEntry, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def weight_files(stem: str, entries: Sequence[WeightEntry], most: int = SHARD) -> list[WeightFile]:
    """Return the files that hold ``entries``.

    Raises:
        FormatError: Two tensors have the same name, or a name is invalid.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise FormatError(f"duplicate tensor {one.name[:200]} in {stem}.safetensors")
    shards = _split(ordered, most)
    return [
        _file(_name(stem, number, len(shards)), shard) for number, shard in enumerate(shards, 1)
    ]


def index_file(stem: str, files: Sequence[WeightFile]) -> tuple[str, bytes] | None:
    """Return the name and bytes of the index of several files, or None for one file."""
    if len(files) < 2:
        return None
    where = {entry.name: file.name for file in files for entry in file.entries}
    size = sum(entry.nbytes for file in files for entry in file.entries)
    value = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return f"{stem}.safetensors.index.json", text.encode()


def are_usual(stem: str, weights: Sequence[Weight], paths: Iterable[Path]) -> bool:
    """Return whether weight files and their index are those that an export writes by itself."""
    tensors = [entry for weight in weights for entry in entries("", weight)]
    files = weight_files(stem, tensors)
    expected = {file.name: file.header for file in files}
    if (found := index_file(stem, files)) is not None:
        expected[found[0]] = found[1]
    weight_paths = {path.name: path for path in paths if ".safetensors" in path.name}
    return expected.keys() == weight_paths.keys() and all(
        _begins(weight_paths[name], start) for name, start in expected.items()
    )


def _begins(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _split(ordered: Sequence[WeightEntry], most: int) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    size = 0
    for entry in ordered:
        if shards[-1] and size + entry.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _name(stem: str, number: int, count: int) -> str:
    part = f"-{number:05}-of-{count:05}" if count > 1 else ""
    return f"{stem}{part}.safetensors"


def _file(name: str, shard: Sequence[WeightEntry]) -> WeightFile:
    ordered = sorted(shard, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.name))
    header = encode_header([(e.name, e.dtype, e.shape) for e in ordered], _METADATA)
    return WeightFile(name, header, tuple(ordered))


_WEIGHT = ".weight"
_MLX = {SCALE: ".scales", BIAS: ".biases"}
_MODELOPT = {SCALE: ("_scale", "F8_E4M3"), GLOBAL_SCALE: ("_scale_2", "F32")}
_BYTES = 4  # in a word of codes


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
    """Return whether it is quantized and written in ModelOpt's form."""
    return any(part.suffix == GLOBAL_SCALE for part in weight.parts)


def stem(weight: Weight) -> str:
    """Return the module that a weight belongs to."""
    return weight.name.removesuffix(_WEIGHT)


def entries(component: str, weight: Weight) -> list[WeightEntry]:
    """Return the tensors that ``weight`` becomes.

    Raises:
        ModelError: It is quantized, and its name is not valid for quantized weights.
    """
    if weight.quantization is None:
        return [WeightEntry(weight.name, p.dtype, p.shape, p.tensor) for p in weight.parts]
    if not weight.name.endswith(_WEIGHT):
        raise ModelError(
            f"{component}/{weight.name[:200]} is quantized to {weight.dtype}, but the formats of "
            "MLX and ModelOpt support only quantized tensors named .weight",
            hint="export the unquantized AImage",
        )
    return _modelopt(weight) if is_modelopt(weight) else _mlx(weight)


def _mlx(weight: Weight) -> list[WeightEntry]:
    own = stem(weight)
    return [
        WeightEntry(own + _MLX.get(part.suffix, _WEIGHT), part.dtype, part.shape, part.tensor)
        for part in weight.parts
    ]


def _modelopt(weight: Weight) -> list[WeightEntry]:
    """Return nvfp4 entries: blobs pack codes in words; here as bytes, two codes each, low first."""
    made = []
    for part in weight.parts:
        if part.suffix in _MODELOPT:
            word, dtype = _MODELOPT[part.suffix]
            made.append(WeightEntry(weight.name + word, dtype, part.shape, part.tensor))
        else:
            shape = (*part.shape[:-1], part.shape[-1] * _BYTES)
            made.append(WeightEntry(weight.name, "U8", shape, part.tensor))
    return made
