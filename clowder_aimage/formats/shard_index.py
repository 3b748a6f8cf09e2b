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
        raise ModelError(f"{directory} contains several indexes: {_names(indexes)}")
    headers = {path: read_file(path) for path in files}
    if indexes:
        _check_index(indexes[0], headers)
    elif len(files) != 1:
        found = f"{len(files)} ({_names(files)})" if files else "none"
        raise ModelError(
            f"{directory} must contain one weight file, or shards with an index; found {found}",
            hint="download the index of the shards, or keep only one variant"
            if files
            else MODEL_AGAIN,
        )
    tensors = [one for path, header in headers.items() for one in SourceTensor.of(path, header)]
    if not tensors:
        raise ModelError(f"{_names(files)} in {directory} contains no tensors")
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
        names = ", ".join(missing)
        raise FormatError(f"shards listed in {index} are missing: {names}", hint=MODEL_AGAIN)
    if extra := sorted(here - wanted):
        raise ModelError(
            f"weight files not listed in {index}: {', '.join(extra)}",
            hint="remove them, or download the matching index",
        )
    found = {name: path.name for path, header in headers.items() for name in header.tensors}
    total = sum(len(header.tensors) for header in headers.values())
    if total != len(found):
        raise ModelError(f"duplicate tensor in the shards of {index}", hint=MODEL_AGAIN)
    for name in sorted(weight_map.keys() | found.keys()):
        listed, actual = weight_map.get(name, "no shard"), found.get(name, "no shard")
        if listed != actual:
            raise ModelError(
                f"{index} lists tensor {name[:200]} in {listed}, but it is in {actual}",
                hint=MODEL_AGAIN,
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} is not a shard index: weight_map is missing or invalid")
    return weight_map


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
