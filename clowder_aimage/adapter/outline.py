"""The layers of the families by name, with an adapter's shapes, for adapters without a base."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clowder_aimage.adapter.layer import AdapterLayer, Shape
from clowder_aimage.adapter.target import TargetTable
from clowder_aimage.family.image_family import FAMILIES, Z_IMAGE, ImageFamily

NAME = Z_IMAGE.title
_NUMBER = re.compile(r"[0-9]+")
_THIRD = re.compile(r"(.+\.(?:to_|add_))[qkv]((?:_proj)?\.weight)")
# The largest number of a block.
_MAX_BLOCK = 255


def infer_shapes(layers: Iterable[AdapterLayer]) -> dict[str, Shape]:
    """Return the shapes of an adapter's target tensors, in the family with most of them.

    Query, key and value of a block have the same shape. Layers with unknown names are omitted.
    """
    layers = list(layers)
    numbers = {int(n) for layer in layers for n in _NUMBER.findall(layer.stem[:1024]) if len(n) < 4}
    count = min(max(numbers, default=0), _MAX_BLOCK) + 1
    return max((_infer_family_shapes(layers, family, count) for family in FAMILIES), key=len)


def _infer_family_shapes(
    layers: Iterable[AdapterLayer], family: ImageFamily, count: int
) -> dict[str, Shape]:
    names = dict(_iter_tensors(family, count))
    table = TargetTable(names)
    shapes: dict[str, Shape] = {}
    for layer in layers:
        target = table.find(layer.stem)
        if target is None:
            continue
        shape = next((shape for _, shape in layer.changes), None)
        if shape is None:
            # The layer has only changes of its bias.
            shape = (max(layer.shapes[rows][0] for rows in layer.biases), 1)
        tensor_shape = (shape[0] // len(target.rows), *shape[1:])
        for rows in target.rows:
            shapes[rows.tensor] = tensor_shape
            if match := _THIRD.fullmatch(rows.tensor):
                for letter in "kvq":
                    shapes.setdefault(f"{match[1]}{letter}{match[2]}", tensor_shape)
            if rows.bias in names:
                shapes[rows.bias] = tensor_shape[:1]
    return shapes


def _iter_tensors(family: ImageFamily, count: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors that adapters can change, with placeholders as lengths."""
    for component in family.components:
        if component.name != "vae":
            shapes = component.shapes(component.widest(count))
            yield from ((f"{component.name}/{name}", (3,) * len(s)) for name, s in shapes.items())
