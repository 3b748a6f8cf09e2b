"""Two-way tables of tensor names: those of diffusers, and those of another layout.

A table is written in one direction, from diffusers' names. ``NameTable.invert`` derives the other
direction from all names of a component, so no rule is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class TensorChange(StrEnum):
    """The difference between a tensor in diffusers' layout and in another one."""

    SAME = "same"
    # [out, in, height, width] as [out, height, width, in].
    CHANNELS_LAST = "channels last"
    # [out, in] as a convolution [out, in, 1, 1].
    UNIT_KERNEL = "unit kernel"
    # The two halves of the rows are exchanged.
    HALVES = "halves"


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor in another layout: the ``index``-th of ``count`` stacked tensors in ``name``."""

    name: str
    index: int = 0
    count: int = 1
    change: TensorChange = TensorChange.SAME


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names of a component in one layout.

    ``renames`` are regular expressions and replacements, applied in order to the name of a module
    or tensor. ``stacked`` maps a module to the modules of its rows: ``attention.qkv`` to
    ``attention.to_q`` and so on. ``changes`` apply to the matching names of diffusers.
    """

    renames: tuple[tuple[str, str], ...] = ()
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    changes: tuple[tuple[str, TensorChange], ...] = ()

    def rename_module(self, name: str) -> str:
        """Return the name of an unstacked module or tensor."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def locate(self, name: str) -> TensorLocation:
        """Return the location of a tensor by its name in diffusers."""
        change = next(
            (c for pattern, c in self.changes if re.search(pattern, name)), TensorChange.SAME
        )
        for stacked, members in self.stacked:
            for index, member in enumerate(members):
                pattern = rf"(?:(?<=\.)|^){re.escape(member)}(?=\.|$)"
                if re.search(pattern, name):
                    stem = re.sub(pattern, stacked, name)
                    return TensorLocation(self.rename_module(stem), index, len(members), change)
        return TensorLocation(self.rename_module(name), change=change)

    def invert(self, names: Iterable[str]) -> dict[str, list[tuple[str, TensorLocation]]]:
        """Return the tensors of diffusers in ``names``, by the names of this layout."""
        tensors: dict[str, list[tuple[str, TensorLocation]]] = {}
        for name in names:
            location = self.locate(name)
            tensors.setdefault(location.name, []).append((name, location))
        return tensors
