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
from clowder_aimage.family.image_family import FAMILIES, recognise, refusal
from clowder_aimage.family.name_table import TensorPlace
from clowder_aimage.family.tensor_change import restore
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.gguf import read_model
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.weight_source import ENDINGS, WeightSource, read_source
from clowder_aimage.tensor.weight import SourceTensor, Weight, by_name, plain

_SHARD = re.compile(r"(?:^|-)[0-9]+(?:-of-[0-9]{5})?$")
_GROUP = 64  # values that share a scale in quantized MLX files, which do not say it
_WORD = 32  # bits of a word of codes
_SHOWN = 10  # names in a message


@dataclass(frozen=True, slots=True)
class FamilyWeights:
    """A component that was found: its weights under diffusers' names, and tensors without meaning.

    ``extras`` have the names of the file without the prefix.
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
        FormatError: A file is damaged, belongs to no known model or to a variant that cannot be
            used, or has tensors that belong to nothing.
    """
    return [found for group in _groups(path) for found in _components(group)]


def has_transformer(path: Path) -> bool:
    """Return whether a directory has weights of an image model in a layout that is known.

    Raises FormatError: A weight file is damaged.
    """
    try:
        groups = _groups(path)
    except ModelError:  # an error about the whole directory is more specific
        return False
    return any(is_transformer(_names(group)) for group in groups)


def is_transformer(names: Iterable[str]) -> bool:
    """Return whether tensors of these names include the transformer of an image model."""
    return any(found.component.name == "transformer" for found in recognise(names))


def has_gguf_transformer(path: Path) -> bool:
    """Return whether a GGUF file has the transformer of an image model."""
    if not path.is_file():
        return False
    headers = read_model(path).headers
    return is_transformer(tensor.name for header in headers for tensor in header.tensors)


def _groups(path: Path) -> list[list[WeightSource]]:
    """Return the files at ``path``; the shards of one set of tensors are together."""
    if not path.is_dir():
        return [[read_source(path)]]
    groups: dict[tuple[Path, str], list[WeightSource]] = {}
    for one in model_tree.walk(path):
        if one.suffix.lower() in ENDINGS and model_tree.ADAPTERS not in one.parts:
            key = (one.parent, _SHARD.sub("", one.stem))
            groups.setdefault(key, []).append(read_source(one))
    return list(groups.values())


def _names(group: Sequence[WeightSource]) -> list[str]:
    return [tensor.name for source in group for tensor in source.tensors]


def _components(group: Sequence[WeightSource]) -> list[FamilyWeights]:
    path, names = group[0].path, _names(group)
    if what := refusal(names):
        titles = " or ".join(family.title for family in FAMILIES)
        raise FormatError(
            f"{path} cannot be run: it is {what}",
            hint=f"use a model of {titles}; instead of a quantized one, the original",
        )
    named = recognise(names)
    if not named:
        raise FormatError(
            f"{path} contains no part of a known image model",
            hint="keep only the files of one model in the directory",
        )
    if len(set(names)) != len(names):
        raise FormatError(f"{path.parent} has two tensors of the same name", hint=model_tree.AGAIN)
    weights, _ = read_quantized(path, [t for s in group for t in s.tensors], _stated(group))
    divided = _divide(path, named, weights)
    return [_found(one, divided[one], group) for one in named]


def _stated(group: Sequence[WeightSource]) -> dict[str, Any]:
    """Return the quantization of an MLX file as a config: it says the bits at most."""
    named = {tensor.name: tensor for source in group for tensor in source.tensors}
    for name, scales in named.items():
        codes = named.get(f"{name.removesuffix('.scales')}.weight")
        if codes is not None and codes.name != name and scales.shape and scales.shape[-1]:
            bits = _WORD * codes.shape[-1] // (_GROUP * scales.shape[-1])
            return {"quantization": {"group_size": _GROUP, "bits": bits}}
    return {}


def _divide(
    path: Path, named: Sequence[NamedComponent], weights: Iterable[Weight]
) -> dict[NamedComponent, list[Weight]]:
    """Return the weights of each component. Raises FormatError: One belongs to none."""
    longest = sorted(named, key=lambda one: -len(one.prefix))
    divided: dict[NamedComponent, list[Weight]] = {one: [] for one in named}
    places = {one: _places(one, weights) for one in named}
    unknown = []
    for weight in weights:
        for one in longest:
            name = weight.name.removeprefix(one.prefix)
            is_below = weight.name.startswith(one.prefix)
            is_extra = re.fullmatch(one.component.extras, name)
            if is_below and (is_extra or name in places[one]):
                divided[one].append(weight)
                break
        else:
            unknown.append(weight.name)
    if unknown:
        raise FormatError(
            f"{path} has {counted(unknown)} that the model does not have",
            hint="a file with tensors of several models cannot be used",
        )
    return divided


def counted(names: Sequence[str]) -> str:
    """Return the number of tensors and the first ten names."""
    shown = ", ".join(name[:120] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{more})"


def _places(
    named: NamedComponent, weights: Iterable[Weight]
) -> Mapping[str, Sequence[tuple[str, TensorPlace]]]:
    names = [
        weight.name.removeprefix(named.prefix)
        for weight in weights
        if weight.name.startswith(named.prefix)
    ]
    return named.component.places(named.dialect, names)


def _found(
    named: NamedComponent, members: Sequence[Weight], group: Sequence[WeightSource]
) -> FamilyWeights:
    places = _places(named, members)
    made: list[Weight] = []
    extras = []
    for weight in members:
        name = weight.name.removeprefix(named.prefix)
        if name not in places:
            extras.append(weight.tensor.rename(name, weight.shape))
        else:
            made += [_weight(weight, own, place) for own, place in places[name]]
    return FamilyWeights(named.component, by_name(made), tuple(extras), tuple(group))


def _weight(weight: Weight, name: str, place: TensorPlace) -> Weight:
    if weight.quantization is None:
        return plain(restore(weight.tensor, name, place))
    if place.parts > 1:
        raise FormatError(
            f"{weight.tensor.path}: {weight.name[:200]} is quantized, and combines "
            f"{place.parts} tensors, which cannot be separated",
            hint="use the unquantized model",
        )
    return replace(weight, name=name)
