"""The layers of the families by name, for adapters without a base: shapes are the adapter's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clowder_aimage.adapter.layer import AdapterLayer, Shape
from clowder_aimage.adapter.target import TargetTable
from clowder_aimage.family.image_family import FAMILIES, Z_IMAGE, ImageFamily

NAME = Z_IMAGE.title
_NUMBER = re.compile(r"[0-9]+")
_THIRD = re.compile(r"(.+\.(?:to_|add_))[qkv]((?:_proj)?\.weight)")
_MOST = 255  # the number of a block


def outline_shapes(layers: Iterable[AdapterLayer]) -> dict[str, Shape]:
    """Return the shapes of the tensors that an adapter is for, in the family that has most of them.

    The layers that are stacked with one of them have the same shape. Layers with other names are
    left out.
    """
    layers = list(layers)
    numbers = {int(n) for layer in layers for n in _NUMBER.findall(layer.stem[:1024]) if len(n) < 4}
    count = min(max(numbers, default=0), _MOST) + 1
    return max((_outline(layers, family, count) for family in FAMILIES), key=len)


def _outline(layers: Iterable[AdapterLayer], family: ImageFamily, count: int) -> dict[str, Shape]:
    names = dict(_names(family, count))
    table = TargetTable(names)
    found: dict[str, Shape] = {}
    for layer in layers:
        target = table.find(layer.stem)
        if target is None:
            continue
        shape = next((shape for _, shape in layer.changes), None)
        if shape is None:  # a bias alone
            shape = (max(layer.shapes[part][0] for part in layer.biases), 1)
        whole = (shape[0] // len(target.parts), *shape[1:])
        for part in target.parts:
            found[part.tensor] = whole
            if third := _THIRD.fullmatch(part.tensor):
                for letter in "kvq":
                    found.setdefault(f"{third[1]}{letter}{third[2]}", whole)
            if part.bias in names:
                found[part.bias] = whole[:1]
    return found


def _names(family: ImageFamily, count: int) -> Iterator[tuple[str, Shape]]:
    """Yield the names of all tensors that adapters change; lengths are placeholders."""
    for component in family.components:
        if component.name != "vae":
            shapes = component.shapes(component.widest(count))
            yield from ((f"{component.name}/{name}", (3,) * len(s)) for name, s in shapes.items())
