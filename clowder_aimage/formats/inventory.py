"""Inventory of a model: its files, its weights, and the properties that its format states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.formats.stored_weights import StoredLayer
from clowder_aimage.tensor.weight import Weight

_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a pipeline, with its class and library as in model_index.json.

    A Transformers model is a single component without a name. ``ignored`` are the names of tensors
    that are not packed. ``stored`` are layers shared with another AImage; ``weights`` includes
    their weights. A component without a class is not listed in the pipeline's index.
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

    ``family`` and ``pipeline`` are empty except for diffusers pipelines. ``facts`` are properties
    of the AImage config (schemas/aimage-config.schema.json) read from the model, ``defaults`` the
    request defaults of the family. ``read`` are files whose content is in the inventory, without a
    layer of their own; ``left_out`` are those that are not packed.
    """

    family: str
    pipeline: str
    components: tuple[Component, ...]
    files: tuple[SourceFile, ...]
    license: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: tuple[Path, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def of_files(
        cls, kind: str, files: Iterable[SourceFile], facts: Mapping[str, Any], licence: object
    ) -> Inventory:
        """Return a model of whole files, sorted by name; facts that are None are omitted."""
        stated = {key: value for key, value in facts.items() if value is not None}
        ordered = tuple(sorted(files, key=lambda file: file.name))
        return cls("", "", (), ordered, clean_text(licence), {"format": kind} | stated)


def clean_text(value: object) -> str | None:
    """Return a text from a file's metadata if it is short and printable, else None."""
    if not isinstance(value, str):
        return None
    word = value.strip()
    return word if word and len(word) <= _MAX_TEXT and word.isprintable() else None
