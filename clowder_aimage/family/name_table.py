"""Two-way tables of tensor names: those of diffusers, and those of another layout.

A table is written in one direction, from diffusers' names. The other direction is looked up among
the names that a component can have (``NameTable.invert``), so no rule is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class TensorChange(StrEnum):
    """The difference between a tensor in diffusers' layout and in another one."""

    SAME = "same"
    CHANNELS_LAST = "channels last"  # [out, in, height, width] as [out, height, width, in]
    UNIT_KERNEL = "unit kernel"  # [out, in] as a convolution [out, in, 1, 1]
    HALVES = "halves"  # the two halves of the rows are exchanged


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in another layout: a part, of ``parts``, of the rows of ``name``."""

    name: str
    part: int = 0
    parts: int = 1
    change: TensorChange = TensorChange.SAME


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names of a component in one layout.

    ``renames`` are regular expressions and replacements, applied one after the other to the name
    of a module or tensor. ``stacked`` maps a module to those that are its rows: ``attention.qkv``
    to ``attention.to_q`` and so on. ``changes`` apply to the names of diffusers that they match.
    """

    renames: tuple[tuple[str, str], ...] = ()
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = ()
    changes: tuple[tuple[str, TensorChange], ...] = ()

    def rename_module(self, name: str) -> str:
        """Return the name of a module or tensor that is not stacked."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def place(self, name: str) -> TensorPlace:
        """Return the place of a tensor, given diffusers' name."""
        change = next(
            (c for pattern, c in self.changes if re.search(pattern, name)), TensorChange.SAME
        )
        for whole, members in self.stacked:
            for part, member in enumerate(members):
                pattern = rf"(?:(?<=\.)|^){re.escape(member)}(?=\.|$)"
                if re.search(pattern, name):
                    stem = re.sub(pattern, whole, name)
                    return TensorPlace(self.rename_module(stem), part, len(members), change)
        return TensorPlace(self.rename_module(name), change=change)

    def invert(self, names: Iterable[str]) -> dict[str, list[tuple[str, TensorPlace]]]:
        """Return the tensors of diffusers, among ``names``, by the names of this layout."""
        found: dict[str, list[tuple[str, TensorPlace]]] = {}
        for name in names:
            place = self.place(name)
            found.setdefault(place.name, []).append((name, place))
        return found
