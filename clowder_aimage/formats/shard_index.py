"""Tensors of a component, from one file or from shards with an index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats.model_tree import (
    AGAIN,
    MAX_JSON,
    MODEL_AGAIN,
    SourceFile,
    check_not_pointer,
)
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.tensor import Header, read_header
from clowder_aimage.tensor.weight import SourceTensor

_WEIGHTS = ".safetensors"
# diffusers and transformers, "variant": model.fp16.safetensors,
# model.fp16-00001-of-00002.safetensors (or -00001-of-00002.fp16), model.safetensors.index.fp16.json
_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}")
_INDEX = re.compile(r"[^.]*\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json")
_FILE = re.compile(r"[^.]*(?:\.(?P<variant>.+))?\.safetensors")


def read_weights(directory: Path, paths: list[Path]) -> tuple[SourceTensor, ...]:
    """Return the tensors of a component, sorted by name.

    Raises:
        ModelError: There is an extra shard, or the index and the shards disagree.
        FormatError: A shard is missing, or a file is not valid safetensors.
    """
    indexes = [path for path in paths if is_index(path.name)]
    files = [path for path in paths if path.name.endswith(_WEIGHTS)]
    if len(indexes) > 1:
        raise ModelError(f"{directory} contains several indexes: {_join_names(indexes)}")
    headers = {path: read_file(path) for path in files}
    if indexes:
        _check_index(indexes[0], headers)
    elif len(files) != 1:
        listing = f"{len(files)} ({_join_names(files)})" if files else "none"
        raise ModelError(
            f"{directory} must contain one weight file, or shards with an index; found {listing}",
            hint="download the index of the shards, or keep only one variant"
            if files
            else MODEL_AGAIN,
        )
    tensors = [
        tensor for path, header in headers.items() for tensor in SourceTensor.of(path, header)
    ]
    if not tensors:
        raise ModelError(f"{_join_names(files)} in {directory} contains no tensors")
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def is_index(name: str) -> bool:
    """Return True if a file of this name is the index of shards."""
    return _INDEX.fullmatch(name) is not None


def select_variant(names: Iterable[str], variant: str) -> set[str]:
    """Return the names of a component's files, with weights in one variant only.

    They are those of ``variant``, else those without a variant, as in diffusers, else those of the
    only variant.

    Raises:
        UsageError: There are several variants, and none is chosen.
    """
    names = set(names)
    weights = {}
    for name in names:
        file = _PART.sub("", name.rpartition("/")[2])
        if match := _INDEX.fullmatch(file) or _FILE.fullmatch(file):
            weights[name] = match["variant"] or ""
    variants = sorted(set(weights.values()))
    chosen = next(
        (
            candidate
            for candidate in (variant, "", *variants[: len(variants) == 1])
            if candidate in variants
        ),
        None,
    )
    if chosen is None and variants:
        raise UsageError(
            f"the weights exist in several variants: {', '.join(variants)}",
            remedy="choose_weights",
            names=", ".join(variants),
        )
    return {name for name in names if weights.get(name, chosen) == chosen}


def build_header_files(prefix: str, paths: Iterable[Path]) -> tuple[SourceFile, ...]:
    """Return the headers of weight files and the index of shards, as layers.

    An export restores the files of any writer from them.
    """
    headers = []
    for path in paths:
        status = path.stat()
        if path.name.endswith(_WEIGHTS):
            with path.open("rb") as file:
                # The header begins with its length in 8 bytes.
                size = 8 + int.from_bytes(file.read(8), "little")
        elif is_index(path.name):
            size = status.st_size
        else:
            continue
        name, kind = prefix + path.name, mediatype.AIMAGE_HEADER
        headers.append(SourceFile(name, path, size, status.st_mtime_ns, kind))
    return tuple(headers)


def is_safetensors(path: Path) -> bool:
    """Return True if a file begins as a safetensors file."""
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
    weight_map = _read_weight_map(index)
    present = {path.name for path in headers}
    expected = set(weight_map.values())
    if missing := sorted(expected - present):
        names = ", ".join(missing)
        raise FormatError(f"shards listed in {index} are missing: {names}", hint=MODEL_AGAIN)
    if extra := sorted(present - expected):
        raise ModelError(
            f"weight files not listed in {index}: {', '.join(extra)}",
            hint="remove them, or download the matching index",
        )
    locations = {name: path.name for path, header in headers.items() for name in header.tensors}
    total = sum(len(header.tensors) for header in headers.values())
    if total != len(locations):
        raise ModelError(f"duplicate tensor in the shards of {index}", hint=MODEL_AGAIN)
    for name in sorted(weight_map.keys() | locations.keys()):
        listed, actual = weight_map.get(name, "no shard"), locations.get(name, "no shard")
        if listed != actual:
            raise ModelError(
                f"{index} lists tensor {name[:200]} in {listed}, but it is in {actual}",
                hint=MODEL_AGAIN,
            )


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        with index.open("rb") as file:
            weight_map = read_json(file.read(MAX_JSON + 1), index.name, MAX_JSON)["weight_map"]
    except (FormatError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} is not a shard index: weight_map is missing or invalid")
    return weight_map


def _join_names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
