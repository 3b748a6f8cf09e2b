"""Models that the settings of a worker name, and that no request will find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout.entry_name import find_similar_name
from clowder_aimage.oci import Reference


@dataclass(frozen=True, slots=True)
class MissingModel:
    """A model that is not in the store, the setting that names it, and a similar name."""

    setting: str
    name: str
    similar: str | None


def find_missing(service: Service) -> list[MissingModel]:
    """Return the models of the settings that are not in the store, unless requests pull them."""
    can_pull = service.settings.pull != NEVER
    missing = []
    for setting, name in _list_named(service):
        reference = Reference.parse(service.resolve_alias(name) or name)
        if (can_pull and reference.registry is not None) or _is_stored(service, reference):
            continue
        missing.append(MissingModel(setting, str(reference), _find_similar(service, reference)))
    return missing


def _list_named(service: Service) -> Iterator[tuple[str, str]]:
    settings = service.settings
    if settings.default_model is not None:
        yield "default model", settings.default_model
    if settings.enhancer is not None:
        yield "enhancer", settings.enhancer
    for alias, name in settings.aliases.items():
        yield f"alias {alias}", name


def _is_stored(service: Service, reference: Reference) -> bool:
    try:
        service.store.resolve(reference)
    except NotFoundError:
        return False
    except AImageError:
        # Its readiness reports a store that cannot be read.
        return True
    return True


def _find_similar(service: Service, reference: Reference) -> str | None:
    try:
        return find_similar_name(str(reference), (name for name, _ in service.store.list_tags()))
    except AImageError:
        return None
