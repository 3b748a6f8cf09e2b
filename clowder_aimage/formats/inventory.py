"""Inventory of a model: its files, its weights, and facts that its format states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.tensor.weight import Weight

_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a pipeline: its class and library, as model_index.json names them.

    A Transformers model is a single part without a name. ``ignored`` are names of tensors that are
    left out.
    """

    name: str
    library: str
    class_name: str
    weights: tuple[Weight, ...]
    files: tuple[SourceFile, ...]
    config: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that a plan is made from.

    ``family`` and ``pipeline`` are empty for what is not a diffusers directory; ``facts`` are
    properties of the AImage config (schemas/aimage-config.schema.json) that its format states.
    """

    family: str
    pipeline: str
    components: tuple[Component, ...]
    files: tuple[SourceFile, ...]
    license: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_files(
        cls, kind: str, files: Iterable[SourceFile], facts: Mapping[str, Any], licence: object
    ) -> Inventory:
        """Return a model of whole files: sorted by name, and without facts that are None."""
        known = {key: value for key, value in facts.items() if value is not None}
        ordered = tuple(sorted(files, key=lambda file: file.name))
        return cls("", "", (), ordered, printable(licence), {"format": kind} | known)


def printable(value: object) -> str | None:
    """Return a text of a file about itself, if it is fit to be shown: short, and printable."""
    if not isinstance(value, str):
        return None
    word = value.strip()
    return word if word and len(word) <= _MAX_TEXT and word.isprintable() else None
