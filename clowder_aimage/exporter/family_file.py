"""Weight files of an image model in another layout: tensors renamed, stacked, in another order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.family.component_names import DIFFUSERS, ComponentNames
from clowder_aimage.family.image_family import ImageFamily, LayoutComponent, LayoutFile
from clowder_aimage.family.name_table import TensorChange, TensorLocation
from clowder_aimage.family.tensor_change import last_shape
from clowder_aimage.formats.family_model import EXTRA
from clowder_aimage.formats.weight_file import entries
from clowder_aimage.tensor.weight import SourceTensor, Weight

GROUP = 64  # values that share a scale in MLX's files of image models


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a tensor in a file: the bytes ``start`` to ``stop`` of ``source``.

    With ``is_last``, the channels of a convolution are moved to the end.
    """

    source: SourceTensor
    start: int
    stop: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """A tensor of a file in another layout: the parts of stored tensors, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]
    is_extra: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


def file_tensors(
    family: ImageFamily,
    file: LayoutFile,
    weights: Mapping[str, Sequence[Weight]],
    has_quantized: bool,
) -> dict[str, FamilyTensor]:
    """Return the tensors of a file by name; ``weights`` are those of the components.

    ``has_quantized`` is set for a layout with quantized weights, in MLX's form.

    Raises:
        UsageError: A component is missing, or is quantized in a way that the layout cannot express.
        FormatError: A tensor has no place in the layout.
    """
    made: dict[str, FamilyTensor] = {}
    for part in file.parts:
        component = family.component(part.component)
        own = weights.get(part.component)
        if not own:
            raise UsageError(f"the model has no {part.component}, which the layout requires")
        for tensor in _tensors(component, part, own, has_quantized):
            made[part.prefix + tensor.name] = replace(tensor, name=part.prefix + tensor.name)
        for weight in weights.get(EXTRA, ()):
            if weight.name.startswith(f"{part.component}."):
                name = part.prefix + weight.name.removeprefix(f"{part.component}.")
                made[name] = replace(_copied(weight, name), is_extra=True)
    return made


def _tensors(
    component: ComponentNames, part: LayoutComponent, weights: Iterable[Weight], has_quantized: bool
) -> Iterable[FamilyTensor]:
    stacked: dict[str, dict[int, tuple[Weight, TensorLocation]]] = {}
    weights = list(weights)
    known = component.locate(DIFFUSERS, (component.full(one.name) for one in weights))
    for weight in weights:
        name = component.full(weight.name)
        if name not in known:
            if not re.fullmatch(component.extras, weight.name):
                raise FormatError(
                    f"{component.name}/{weight.name[:200]} has no place in the layout"
                )
            yield replace(_copied(weight, weight.name), is_extra=True)
            continue
        place = component.dialects[part.dialect].locate(name)
        if weight.quantization is not None:
            yield from _quantized(component, weight, place, has_quantized)
        elif place.count > 1:
            stacked.setdefault(place.name, {})[place.index] = (weight, place)
        else:
            yield _changed(weight, place)
    for members in stacked.values():
        yield _stacked(component, members)


def _quantized(
    component: ComponentNames, weight: Weight, place: TensorLocation, is_allowed: bool
) -> Iterable[FamilyTensor]:
    quantization = weight.quantization
    assert quantization is not None  # noqa: S101
    is_affine = quantization.type.has_bias and quantization.group_size == GROUP
    if not is_allowed or not is_affine or place.count > 1:
        raise UsageError(
            f"{component.name}/{weight.name[:200]} is quantized to {weight.dtype}, in groups of "
            f"{quantization.group_size}, which the layout cannot express",
            hint="export the unquantized model",
        )
    for entry in entries(component.name, replace(weight, name=place.name)):
        part = FilePart(entry.source, 0, entry.nbytes)
        yield FamilyTensor(entry.name, entry.dtype, entry.shape, (part,))


def _copied(weight: Weight, name: str) -> FamilyTensor:
    return FamilyTensor(name, weight.dtype, weight.shape, (_whole(weight),))


def _whole(weight: Weight) -> FilePart:
    return FilePart(weight.tensor, 0, weight.tensor.nbytes)


def _changed(weight: Weight, place: TensorLocation) -> FamilyTensor:
    shape, half = weight.shape, weight.tensor.nbytes // 2
    parts: tuple[FilePart, ...] = (_whole(weight),)
    match place.change:
        case TensorChange.UNIT_KERNEL if len(shape) == 2:
            shape = (*shape, 1, 1)
        case TensorChange.CHANNELS_LAST if len(shape) == 4:
            parts = (replace(parts[0], is_last=True),)
            shape = last_shape(shape)
        case TensorChange.HALVES:
            whole = parts[0]
            parts = (replace(whole, start=half), replace(whole, stop=half))
    return FamilyTensor(place.name, weight.dtype, shape, parts)


def _stacked(
    component: ComponentNames, members: Mapping[int, tuple[Weight, TensorLocation]]
) -> FamilyTensor:
    weights = [members[index][0] for index in sorted(members)]
    first, place = members[min(members)]
    kinds = {(weight.dtype, weight.shape) for weight in weights}
    if len(weights) != place.count or len(kinds) != 1:
        raise FormatError(
            f"{component.name}: the {place.count} parts of {place.name[:200]} are incomplete, or "
            "differ in type or shape"
        )
    shape = (len(weights) * first.shape[0], *first.shape[1:])
    return FamilyTensor(place.name, first.dtype, shape, tuple(map(_whole, weights)))
