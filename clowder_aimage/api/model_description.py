"""Descriptions of the models in a store, for all lists of a worker.

A description is derived once for a digest, and kept in the store: a model of a stranger costs its
time once, also if it is refused. What depends on names, times and missing blobs is no part of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import TypeAdapter, ValidationError

from clowder_aimage.api.model_details import ModelDetails, build_details
from clowder_aimage.api.model_kind import EMBEDDER, PICTURES, TEXT, classify_model
from clowder_aimage.content.gate import find_gate
from clowder_aimage.dialect import AImage
from clowder_aimage.dialect.packing import is_known_late
from clowder_aimage.errors import AImageError, is_passing
from clowder_aimage.generation.request import MODEL_DEFAULTS, GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.description import MODEL, keep_description, read_description
from clowder_aimage.layout.summary import find_weight_type
from clowder_aimage.model.ability import Ability
from clowder_aimage.model.adapter_source import is_adapter
from clowder_aimage.model.runnable import read_model
from clowder_aimage.model.stored_ability import find_ability
from clowder_aimage.model.text.text_facts import TextFacts, read_text_facts
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.pictures.input_kind import get_max_images

# Descriptions in memory
_MAX_CACHED = 4096
_log = logging.getLogger("aimage.worker")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts of an AImage that lists show.

    ``stated`` are the defaults in its config, ``defaults`` those of requests for pictures.
    ``created`` is the time in its config, ``subject`` the digest of its base, ``adapter`` the
    metadata of an adapter.
    """

    kind: str
    details: ModelDetails
    ability: Ability
    family: str | None = None
    precision: str | None = None
    stated: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] | None = None
    max_images: Annotated[int, Ge(1)] = 1
    context: int | None = None
    created: int | None = None
    subject: str | None = None
    adapter: dict[str, Any] | None = None

    def list_capabilities(self) -> tuple[str, ...]:
        """Return the capabilities of the model in this installation."""
        return self.ability.list_capabilities()


_FORM = TypeAdapter(ModelDescription | None)


class ModelDescriptions:
    """The descriptions of the manifests in a store, in memory and in its files."""

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._cached: dict[Digest, ModelDescription | None] = {}

    def find(self, descriptor: Descriptor) -> ModelDescription | None:
        """Return the description of a manifest; None if it is not a readable AImage.

        The policy of signatures is asked each time: it may have changed since it was described.
        """
        try:
            if (gate := find_gate()) is not None:
                gate.admit_stored(self._store, descriptor)
        except AImageError:
            return None
        digest = descriptor.digest
        if digest not in self._cached:
            description, is_final = self._read(descriptor)
            if not is_final:
                return description
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[digest] = description
        return self._cached[digest]

    def _read(self, descriptor: Descriptor) -> tuple[ModelDescription | None, bool]:
        root, digest = self._store.root, descriptor.digest
        value = read_description(root, MODEL, digest)
        if value is not None and value.keys() == {"model"}:
            with contextlib.suppress(ValidationError):
                return _FORM.validate_json(json.dumps(value["model"]), strict=True), True
        description, is_final = _derive(self._store, descriptor)
        value = {"model": _FORM.dump_python(description, mode="json")}
        if is_final and not keep_description(root, MODEL, digest, value):
            _log.warning(
                "a model has too long a config to be listed", extra={"digest": str(digest)}
            )
            keep_description(root, MODEL, digest, {"model": None})
            return None, True
        return description, is_final


def _derive(store: ImageLayout, descriptor: Descriptor) -> tuple[ModelDescription | None, bool]:
    """Return the description of a manifest, and True if it will not change."""
    try:
        aimage = read_model(store, descriptor).aimage
        is_text = classify_model(aimage) in (TEXT, EMBEDDER)
        text = read_text_facts(store, descriptor.digest, aimage) if is_text else None
        ability = find_ability(store, descriptor.digest, aimage)
        is_final = not is_known_late(aimage) and (text is None or text.is_final)
        return _describe(aimage, ability, text), is_final
    # A list must show the other models, whatever is wrong with one
    except Exception as error:
        if not isinstance(error, AImageError | OSError):
            facts = {"digest": str(descriptor.digest), "reason": repr(error)[:300]}
            _log.warning("a model cannot be described", extra=facts)
        return None, not is_passing(error)


def _describe(aimage: AImage, ability: Ability, text: TextFacts | None) -> ModelDescription:
    properties, kind = aimage.properties, classify_model(aimage)
    family = properties.get("family") or properties.get("architecture") or properties.get("format")
    precision = properties.get("variant") or find_weight_type(properties)
    defaults = None
    if kind == PICTURES:
        values = GenerateRequest.draft().apply_defaults(aimage).collect_values()
        defaults = {name: values[name] for name in MODEL_DEFAULTS}
    return ModelDescription(
        kind,
        build_details(properties),
        ability,
        family if isinstance(family, str) else None,
        precision if isinstance(precision, str) else None,
        properties.get("defaults", {}),
        defaults,
        get_max_images(properties) if kind == PICTURES else 1,
        text.context if text is not None else None,
        _parse_time(properties.get("created")),
        str(aimage.subject.digest) if aimage.subject is not None else None,
        properties.get("adapter", {}) if is_adapter(aimage) else None,
    )


def _parse_time(text: object) -> int | None:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return int(datetime.fromisoformat(str(text)).timestamp()) if text is not None else None
    return None
