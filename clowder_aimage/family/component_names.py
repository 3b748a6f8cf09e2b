"""A component of an image model in every layout: names, shapes, config, recognition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from clowder_aimage.family.name_table import NameTable, TensorLocation

Shapes = Mapping[str, tuple[int, ...]]
DIFFUSERS = "diffusers"
# Blocks of a kind: a limit for numbers in the names of damaged files.
_MAX_BLOCKS = 256
_NUMBER = re.compile(r"\.([0-9]{1,3})(?=\.)")
# The share of its marks by which a component is recognised.
_MIN_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class ComponentNames:
    """A component with tensors.

    ``dialects`` has a table for each layout; ``prefix`` matches the prefixes of layouts. ``shapes``
    returns the shapes of all tensors for a config, ``configure`` the config for shapes, with 1 for
    missing lengths. ``widest`` returns a config with the given number of blocks of all kinds,
    ``check`` the reason against a config of another family. ``marks`` are tensors by which the
    component is recognised; tensors that match ``excluded`` are of another component. ``extras``
    matches names without a counterpart in diffusers. ``base`` is a prefix that diffusers' names may
    lack. Some converters omit the tensors in ``omitted``; those in ``optional`` may be missing.
    ``sizes`` are the fields of a config that are derived from shapes, ``flags`` those that add or
    remove tensors.
    """

    name: str
    marks: tuple[str, ...]
    dialects: Mapping[str, NameTable]
    prefix: str
    shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]
    configure: Callable[[Shapes], dict[str, Any]]
    widest: Callable[[int], dict[str, Any]]
    excluded: str = "(?!)"
    extras: str = "(?!)"
    base: str = ""
    omitted: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], str | None] = lambda _: None

    def add_base(self, name: str) -> str:
        """Return a name of diffusers with its base prefix."""
        return name if name.startswith(self.base) else self.base + name

    @cache  # noqa: B019 (the families are constants)
    def list_names(self, count: int) -> tuple[str, ...]:
        """Return the names of all tensors of ``count`` blocks of each kind."""
        return tuple(self.shapes(self.widest(count)))

    def locate(
        self, dialect: str, names: Iterable[str]
    ) -> dict[str, list[tuple[str, TensorLocation]]]:
        """Return diffusers' tensors by their names in a layout, for the blocks in ``names``."""
        numbers = (int(number) for name in names for number in _NUMBER.findall(name[:500]))
        count = min(max(numbers, default=0) + 1, _MAX_BLOCKS)
        return self.dialects[dialect].invert(self.list_names(count))


@dataclass(frozen=True, slots=True)
class NamedComponent:
    """A component recognised by the names of tensors: its layout and the prefix of its names."""

    component: ComponentNames
    dialect: str
    prefix: str


def find_component(component: ComponentNames, names: Iterable[str]) -> NamedComponent | None:
    """Return the layout and prefix of a component in tensors of these names, or None."""
    name_set = set(names)
    if any(re.search(component.excluded, name) for name in name_set):
        return None
    candidates: list[tuple[int, str, str]] = []
    for dialect, table in component.dialects.items():
        marks = [table.locate(mark).name for mark in component.marks]
        # A single call of endswith rejects nearly all names of a large model.
        ends = tuple(marks)
        prefixes = {
            name.removesuffix(mark)
            for name in name_set
            if name.endswith(ends)
            for mark in marks
            if name.endswith(mark)
        }
        candidates += [
            (sum(prefix + mark in name_set for mark in marks), dialect, prefix)
            for prefix in prefixes
            if re.fullmatch(component.prefix, prefix)
        ]
    best = max(candidates, key=lambda candidate: candidate[0], default=(0, "", ""))
    if best[0] <= _MIN_SHARE * len(component.marks):
        return None
    return NamedComponent(component, best[1], best[2])
