"""A component of an image model in every layout: names, shapes, config, recognition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from clowder_aimage.family.name_table import NameTable, TensorPlace

Shapes = Mapping[str, tuple[int, ...]]
DIFFUSERS = "diffusers"
_LAST = 256  # blocks of one kind
_NUMBER = re.compile(r"\.([0-9]{1,3})(?=\.)")
_SOME = 0.5  # of the marks, by which a component is recognised


@dataclass(frozen=True, eq=False)
class ComponentNames:
    """A component with tensors.

    ``dialects`` has a table for each layout; ``prefix`` matches what layouts put before the names.
    ``shapes`` returns the shapes of all tensors for a config, ``configure`` the config for shapes;
    it takes 1 for a length that is missing. ``widest`` returns a config with the blocks of all
    kinds up to a number, and ``check`` the reason why a config is not the family's. ``marks`` are
    tensors by which it is recognised, and files with tensors that match ``without`` have another
    one; ``extras`` matches names without meaning. ``base`` is a
    prefix that diffusers' own names may have or lack. The tensors in ``spared`` are left out by
    some converters, those in ``optional`` need not be there. ``sizes`` are the fields of a config
    that follow from the shapes, ``flags`` those that decide which tensors there are.
    """

    name: str
    marks: tuple[str, ...]
    dialects: Mapping[str, NameTable]
    prefix: str
    shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]
    configure: Callable[[Shapes], dict[str, Any]]
    widest: Callable[[int], dict[str, Any]]
    without: str = "(?!)"
    extras: str = "(?!)"
    base: str = ""
    spared: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], str | None] = lambda _: None

    def full(self, name: str) -> str:
        """Return a name of diffusers with its base."""
        return name if name.startswith(self.base) else self.base + name

    @cache  # noqa: B019 (the families are constants)
    def names(self, count: int) -> tuple[str, ...]:
        """Return all names that blocks up to ``count`` can have."""
        return tuple(self.shapes(self.widest(count)))

    def places(
        self, dialect: str, names: Iterable[str]
    ) -> dict[str, list[tuple[str, TensorPlace]]]:
        """Return diffusers' tensors by their names in a layout, for the blocks in ``names``."""
        numbers = (int(number) for name in names for number in _NUMBER.findall(name[:500]))
        count = min(max(numbers, default=0) + 1, _LAST)
        return self.dialects[dialect].invert(self.names(count))


@dataclass(frozen=True, slots=True)
class NamedComponent:
    """A component that was recognised among tensors: its layout and the prefix of its names."""

    component: ComponentNames
    dialect: str
    prefix: str


def find_component(component: ComponentNames, names: Iterable[str]) -> NamedComponent | None:
    """Return the layout and prefix of a component among tensors of these names, or None."""
    known = set(names)
    if any(re.search(component.without, name) for name in known):
        return None
    found: list[tuple[int, str, str]] = []
    for dialect, table in component.dialects.items():
        marks = [table.place(mark).name for mark in component.marks]
        ends = tuple(marks)
        fronts = {
            name.removesuffix(mark)
            for name in known
            if name.endswith(ends)
            for mark in marks
            if name.endswith(mark)
        }
        found += [
            (sum(front + mark in known for mark in marks), dialect, front)
            for front in fronts
            if re.fullmatch(component.prefix, front)
        ]
    most = max(found, key=lambda one: one[0], default=(0, "", ""))
    if most[0] <= _SOME * len(component.marks):
        return None
    return NamedComponent(component, most[1], most[2])
