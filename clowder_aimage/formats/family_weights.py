"""Weights of an image model in any layout, as components with diffusers' names.

Files are recognised by the names of their tensors (``family/``), never by their own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.family.component_names import ComponentNames, NamedComponent
from clowder_aimage.family.image_family import FAMILIES, find_unsupported, recognise
from clowder_aimage.family.name_table import TensorLocation
from clowder_aimage.family.tensor_change import restore
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.gguf import read_model
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.weight_source import ENDINGS, WeightSource, read_source
from clowder_aimage.tensor.weight import SourceTensor, Weight, sort_weights, to_weight

_SHARD = re.compile(r"(?:^|-)[0-9]+(?:-of-[0-9]{5})?$")
# Values that share a scale in quantized MLX files, which do not state it (MLX's default).
_GROUP = 64
# Bits of a word of codes.
_WORD = 32
# Names in a message.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class FamilyWeights:
    """The weights of a component under diffusers' names.

    ``extras`` are tensors without a counterpart in diffusers, named as in the file without the
    prefix.
    """

    component: ComponentNames
    weights: tuple[Weight, ...]
    extras: tuple[SourceTensor, ...]
    sources: tuple[WeightSource, ...]

    @property
    def path(self) -> Path:
        return self.sources[0].path

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name."""
        return {weight.name: weight.shape for weight in self.weights}


def read_family(path: Path) -> list[FamilyWeights]:
    """Return the components in a file, or in all weight files below a directory.

    Raises:
        ModelError: A file cannot be read.
        FormatError: A file is damaged, is of an unknown model or an unsupported variant, or has
            tensors of no component.
    """
    return [weights for group in _group_files(path) for weights in _build_components(group)]


def has_transformer(path: Path) -> bool:
    """Return True if a directory has the transformer of an image model in a known layout.

    Raises FormatError: A weight file is damaged.
    """
    try:
        groups = _group_files(path)
    except ModelError:
        # An error about the whole directory is more specific.
        return False
    return any(is_transformer(_list_names(group)) for group in groups)


def is_transformer(names: Iterable[str]) -> bool:
    """Return True if tensors of these names include the transformer of an image model."""
    return any(match.component.name == "transformer" for match in recognise(names))


def has_gguf_transformer(path: Path) -> bool:
    """Return True if a GGUF file has the transformer of an image model."""
    if not path.is_file():
        return False
    headers = read_model(path).headers
    return is_transformer(tensor.name for header in headers for tensor in header.tensors)


def _group_files(path: Path) -> list[list[WeightSource]]:
    """Return the files at ``path``, grouped by sets of shards."""
    if not path.is_dir():
        return [[read_source(path)]]
    groups: dict[tuple[Path, str], list[WeightSource]] = {}
    for file in model_tree.walk(path):
        if file.suffix.lower() in ENDINGS and model_tree.ADAPTERS not in file.parts:
            key = (file.parent, _SHARD.sub("", file.stem))
            groups.setdefault(key, []).append(read_source(file))
    return list(groups.values())


def _list_names(group: Sequence[WeightSource]) -> list[str]:
    return [tensor.name for source in group for tensor in source.tensors]


def _build_components(group: Sequence[WeightSource]) -> list[FamilyWeights]:
    path, names = group[0].path, _list_names(group)
    if unsupported := find_unsupported(names):
        titles = " or ".join(family.title for family in FAMILIES)
        raise FormatError(
            f"{path} cannot be run: it is {unsupported}",
            hint=f"use a model of {titles}; instead of a quantized one, the original",
        )
    matches = recognise(names)
    if not matches:
        raise FormatError(
            f"{path} contains no part of a known image model",
            hint="keep only the files of one model in the directory",
        )
    if len(set(names)) != len(names):
        raise FormatError(f"{path.parent} has two tensors of the same name", hint=model_tree.AGAIN)
    weights, _ = read_quantized(
        path, [t for s in group for t in s.tensors], _derive_mlx_config(group)
    )
    divided = _divide(path, matches, weights)
    return [_rename_weights(match, divided[match], group) for match in matches]


def _derive_mlx_config(group: Sequence[WeightSource]) -> dict[str, Any]:
    """Return the quantization config of an MLX file, derived from the shapes of its tensors."""
    tensors = {tensor.name: tensor for source in group for tensor in source.tensors}
    for name, scales in tensors.items():
        codes = tensors.get(f"{name.removesuffix('.scales')}.weight")
        if codes is not None and codes.name != name and scales.shape and scales.shape[-1]:
            # A row has the same number of values in words of codes and in groups of scales.
            bits = _WORD * codes.shape[-1] // (_GROUP * scales.shape[-1])
            return {"quantization": {"group_size": _GROUP, "bits": bits}}
    return {}


def _divide(
    path: Path, matches: Sequence[NamedComponent], weights: Iterable[Weight]
) -> dict[NamedComponent, list[Weight]]:
    """Return the weights of each component. Raises FormatError: A weight belongs to none."""
    # The empty prefix of a component matches the names of all others: it is tried last.
    longest = sorted(matches, key=lambda match: -len(match.prefix))
    divided: dict[NamedComponent, list[Weight]] = {match: [] for match in matches}
    locations = {match: _find_locations(match, weights) for match in matches}
    unknown = []
    for weight in weights:
        for match in longest:
            name = weight.name.removeprefix(match.prefix)
            is_below = weight.name.startswith(match.prefix)
            is_extra = re.fullmatch(match.component.extras, name)
            if is_below and (is_extra or name in locations[match]):
                divided[match].append(weight)
                break
        else:
            unknown.append(weight.name)
    if unknown:
        raise FormatError(
            f"{path} has {list_tensors(unknown)} that the model does not have",
            hint="a file with tensors of several models cannot be used",
        )
    return divided


def list_tensors(names: Sequence[str]) -> str:
    """Return the number of tensors and the first ten names."""
    shown = ", ".join(name[:120] for name in names[:_SHOWN])
    remainder = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{remainder})"


def _find_locations(
    match: NamedComponent, weights: Iterable[Weight]
) -> Mapping[str, Sequence[tuple[str, TensorLocation]]]:
    names = [
        weight.name.removeprefix(match.prefix)
        for weight in weights
        if weight.name.startswith(match.prefix)
    ]
    return match.component.locate(match.dialect, names)


def _rename_weights(
    match: NamedComponent, members: Sequence[Weight], group: Sequence[WeightSource]
) -> FamilyWeights:
    locations = _find_locations(match, members)
    weights: list[Weight] = []
    extras = []
    for weight in members:
        name = weight.name.removeprefix(match.prefix)
        if name not in locations:
            extras.append(weight.tensor.rename(name, weight.shape))
        else:
            weights += [
                _rename_weight(weight, new_name, location) for new_name, location in locations[name]
            ]
    return FamilyWeights(match.component, sort_weights(weights), tuple(extras), tuple(group))


def _rename_weight(weight: Weight, name: str, location: TensorLocation) -> Weight:
    if weight.quantization is None:
        return to_weight(restore(weight.tensor, name, location))
    if location.count > 1:
        raise FormatError(
            f"{weight.tensor.path}: {weight.name[:200]} is quantized, and combines "
            f"{location.count} tensors, which cannot be separated",
            hint="use the unquantized model",
        )
    return replace(weight, name=name)
