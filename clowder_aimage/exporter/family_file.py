"""Weight files of an image model in another layout: tensors renamed, stacked and reordered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.family.component_names import DIFFUSERS, ComponentNames
from clowder_aimage.family.image_family import ImageFamily, LayoutComponent, LayoutFile
from clowder_aimage.family.name_table import TensorChange, TensorLocation
from clowder_aimage.family.tensor_change import permute_shape
from clowder_aimage.formats.family_model import EXTRA
from clowder_aimage.formats.weight_file import build_entries
from clowder_aimage.tensor.weight import SourceTensor, Weight

# Values that share a scale in MLX's files of image models, which do not state the number.
GROUP = 64


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """A chunk of a tensor in a file: the bytes ``start`` to ``stop`` of ``source``.

    With ``is_last``, the channels of a convolution are moved to the end.
    """

    source: SourceTensor
    start: int
    stop: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """A tensor of a file in another layout: chunks of stored tensors, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[SourceChunk, ...]
    is_extra: bool = False

    @property
    def nbytes(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


def build_tensors(
    family: ImageFamily,
    file: LayoutFile,
    weights: Mapping[str, Sequence[Weight]],
    has_quantized: bool,
) -> dict[str, FamilyTensor]:
    """Return the tensors of a file by name; ``weights`` are those of the components.

    ``has_quantized`` is True for a layout with quantized weights, in MLX's form.

    Raises:
        UsageError: A component is missing, or the layout does not support its quantization.
        FormatError: A tensor has no counterpart in the layout.
    """
    tensors: dict[str, FamilyTensor] = {}
    for layout_component in file.components:
        component = family.get_component(layout_component.component)
        component_weights = weights.get(layout_component.component)
        if not component_weights:
            raise UsageError(
                f"the model has no {layout_component.component}, which the layout requires"
            )
        for tensor in _iter_tensors(component, layout_component, component_weights, has_quantized):
            tensors[layout_component.prefix + tensor.name] = replace(
                tensor, name=layout_component.prefix + tensor.name
            )
        for weight in weights.get(EXTRA, ()):
            if weight.name.startswith(f"{layout_component.component}."):
                name = layout_component.prefix + weight.name.removeprefix(
                    f"{layout_component.component}."
                )
                tensors[name] = replace(_copy_tensor(weight, name), is_extra=True)
    return tensors


def _iter_tensors(
    component: ComponentNames,
    layout_component: LayoutComponent,
    weights: Iterable[Weight],
    has_quantized: bool,
) -> Iterable[FamilyTensor]:
    stacked: dict[str, dict[int, tuple[Weight, TensorLocation]]] = {}
    weights = list(weights)
    locations = component.locate(DIFFUSERS, (component.add_base(weight.name) for weight in weights))
    for weight in weights:
        name = component.add_base(weight.name)
        if name not in locations:
            if not re.fullmatch(component.extras, weight.name):
                raise FormatError(
                    f"{component.name}/{weight.name[:200]} has no counterpart in the layout"
                )
            yield replace(_copy_tensor(weight, weight.name), is_extra=True)
            continue
        location = component.dialects[layout_component.dialect].locate(name)
        if weight.quantization is not None:
            yield from _iter_quantized_tensors(component, weight, location, has_quantized)
        elif location.count > 1:
            stacked.setdefault(location.name, {})[location.index] = (weight, location)
        else:
            yield _change_tensor(weight, location)
    for members in stacked.values():
        yield _stack_tensors(component, members)


def _iter_quantized_tensors(
    component: ComponentNames, weight: Weight, location: TensorLocation, is_allowed: bool
) -> Iterable[FamilyTensor]:
    quantization = weight.quantization
    assert quantization is not None  # noqa: S101
    is_affine = quantization.type.has_bias and quantization.group_size == GROUP
    if not is_allowed or not is_affine or location.count > 1:
        raise UsageError(
            f"{component.name}/{weight.name[:200]} is quantized to {weight.dtype}, in groups of "
            f"{quantization.group_size}, which the layout cannot express",
            hint="export the unquantized model",
        )
    for entry in build_entries(component.name, replace(weight, name=location.name)):
        chunk = SourceChunk(entry.source, 0, entry.nbytes)
        yield FamilyTensor(entry.name, entry.dtype, entry.shape, (chunk,))


def _copy_tensor(weight: Weight, name: str) -> FamilyTensor:
    return FamilyTensor(name, weight.dtype, weight.shape, (_build_chunk(weight),))


def _build_chunk(weight: Weight) -> SourceChunk:
    return SourceChunk(weight.tensor, 0, weight.tensor.nbytes)


def _change_tensor(weight: Weight, location: TensorLocation) -> FamilyTensor:
    shape, half = weight.shape, weight.tensor.nbytes // 2
    chunks: tuple[SourceChunk, ...] = (_build_chunk(weight),)
    match location.change:
        case TensorChange.UNIT_KERNEL if len(shape) == 2:
            shape = (*shape, 1, 1)
        case TensorChange.CHANNELS_LAST if len(shape) == 4:
            chunks = (replace(chunks[0], is_last=True),)
            shape = permute_shape(shape)
        case TensorChange.HALVES:
            chunk = chunks[0]
            chunks = (replace(chunk, start=half), replace(chunk, stop=half))
    return FamilyTensor(location.name, weight.dtype, shape, chunks)


def _stack_tensors(
    component: ComponentNames, members: Mapping[int, tuple[Weight, TensorLocation]]
) -> FamilyTensor:
    weights = [members[index][0] for index in sorted(members)]
    template, location = members[min(members)]
    kinds = {(weight.dtype, weight.shape) for weight in weights}
    if len(weights) != location.count or len(kinds) != 1:
        raise FormatError(
            f"{component.name}: the {location.count} parts of {location.name[:200]} are "
            "incomplete, or differ in type or shape"
        )
    shape = (len(weights) * template.shape[0], *template.shape[1:])
    return FamilyTensor(location.name, template.dtype, shape, tuple(map(_build_chunk, weights)))
