"""Inventory of a model: its files, its weights, and the facts that its format states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.formats.stored_weights import StoredLayer
from clowder_aimage.tensor.weight import Weight

_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a pipeline, with its class and library as in model_index.json.

    A Transformers model is a single component without a name. ``ignored`` are the names of tensors
    that are left out. ``stored`` are layers of another AImage that it shares; their weights are
    among ``weights``. Without a class it is not a part of the pipeline.
    """

    name: str
    library: str
    class_name: str
    weights: tuple[Weight, ...]
    files: tuple[SourceFile, ...]
    config: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    stored: tuple[StoredLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """The input of a plan.

    ``family`` and ``pipeline`` are empty except for diffusers directories; ``facts`` are properties
    of the AImage config (schemas/aimage-config.schema.json) that the format states;
    ``defaults`` are those of requests that it states.
    """

    family: str
    pipeline: str
    components: tuple[Component, ...]
    files: tuple[SourceFile, ...]
    license: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_files(
        cls, kind: str, files: Iterable[SourceFile], facts: Mapping[str, Any], licence: object
    ) -> Inventory:
        """Return a model of whole files, sorted by name, without facts that are None."""
        known = {key: value for key, value in facts.items() if value is not None}
        ordered = tuple(sorted(files, key=lambda file: file.name))
        return cls("", "", (), ordered, printable(licence), {"format": kind} | known)


def printable(value: object) -> str | None:
    """Return a text from a file's metadata if it is short and printable, else None."""
    if not isinstance(value, str):
        return None
    word = value.strip()
    return word if word and len(word) <= _MAX_TEXT and word.isprintable() else None
