"""Tensors of a component, from one file or from shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.model_tree import AGAIN, MODEL_AGAIN, check_not_pointer
from clowder_aimage.tensor import Header, read_header
from clowder_aimage.tensor.weight import SourceTensor

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"


def read_weights(directory: Path, paths: list[Path]) -> tuple[SourceTensor, ...]:
    """Return the tensors of a component, sorted by name.

    Raises:
        ModelError: There is an extra shard, or the index and the shards disagree.
        FormatError: A shard is missing, or a file is not valid safetensors.
    """
    indexes = [path for path in paths if path.name.endswith(_INDEX)]
    files = [path for path in paths if path.name.endswith(_WEIGHTS)]
    if len(indexes) > 1:
        raise ModelError(f"{directory} has several indexes: {_names(indexes)}")
    headers = {path: read_file(path) for path in files}
    if indexes:
        _check_index(indexes[0], headers)
    elif len(files) != 1:
        found = f"{len(files)} ({_names(files)})" if files else "none"
        raise ModelError(
            f"{directory} should have one weight file, or shards with an index; it has {found}",
            hint="download the index of the shards, or keep one of the variants"
            if files
            else MODEL_AGAIN,
        )
    tensors = [one for path, header in headers.items() for one in SourceTensor.of(path, header)]
    if not tensors:
        raise ModelError(f"{_names(files)} in {directory} holds no tensors")
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as a safetensors file."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def read_file(path: Path) -> Header:
    """Return the header of a safetensors file. Raises FormatError."""
    try:
        with path.open("rb") as file:
            check_not_pointer(path, file.peek(64)[:64])
            return read_header(file, path.stat().st_size)
    except FormatError as error:
        raise FormatError(f"{path} is damaged: {error}", hint=AGAIN) from None


def _check_index(index: Path, headers: dict[Path, Header]) -> None:
    """Check that the index assigns every tensor to the shard that contains it."""
    weight_map = _weight_map(index)
    here = {path.name for path in headers}
    wanted = set(weight_map.values())
    if missing := sorted(wanted - here):
        lacks = f"{index} names shards that are missing: {', '.join(missing)}"
        raise FormatError(lacks, hint=MODEL_AGAIN)
    if extra := sorted(here - wanted):
        raise ModelError(
            f"{index} does not know these weight files: {', '.join(extra)}",
            hint="remove them, or download the index that belongs to them",
        )
    there = {name: path.name for path, header in headers.items() for name in header.tensors}
    total = sum(len(header.tensors) for header in headers.values())
    if total != len(there):
        raise ModelError(f"two shards of {index} have the same tensor", hint=MODEL_AGAIN)
    for name in sorted(weight_map.keys() | there.keys()):
        said, own = weight_map.get(name, "no shard"), there.get(name, "no shard")
        if said != own:
            raise ModelError(
                f"{index} places tensor {name[:200]} in {said}, it is in {own}", hint=MODEL_AGAIN
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} is not an index of shards: it has no weight_map")
    return weight_map


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
