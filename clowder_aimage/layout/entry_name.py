"""The names of entries of an index, in the spellings of all tools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterable
from typing import Any

from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference, mediatype
from clowder_aimage.oci.reference import DEFAULT_TAG

# In order of preference: containerd's exports have only the tag as ref.name.
_NAMES = (
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)


def find_entry_name(annotations: Any) -> str:
    """Return the name of an entry with these annotations; empty if it has none."""
    if not isinstance(annotations, dict):
        return ""
    for key in _NAMES:
        if name := annotations.get(key):
            return str(name)
    return ""


def find_similar_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that resembles another one most, or None."""
    return find_nearest(name, names, cutoff=0.7, suffix=f":{DEFAULT_TAG}")


def get_name(entry: Any) -> str:
    """Return the name of an entry; empty if it has none, or is malformed."""
    return find_entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""


def is_same_name(name: str, reference: Reference) -> bool:
    """Return True if an entry's name means ``reference`` (``model`` is ``model:latest``)."""
    return bool(name) and _parse_name(name) == reference


@functools.lru_cache(maxsize=4096)
def _parse_name(name: str) -> Reference | None:
    with contextlib.suppress(UsageError):
        return Reference.parse(name)
    return None


def is_named(entry: Any, name: str) -> bool:
    """Return True if an entry has a name, in aimage's form or that of another tool."""
    entry_reference, reference = get_name(entry), _parse_name(name)
    return entry_reference == name or (
        reference is not None and is_same_name(entry_reference, reference)
    )


def build_key(name: str) -> Hashable:
    """Return a value that is equal for two spellings of a name (``is_named``)."""
    return _parse_name(name) or name


def list_spellings(name: str) -> set[str]:
    """Return all texts of a name: ``model`` is ``model:latest``."""
    reference = _parse_name(name)
    if reference is None:
        return {name}
    is_short = reference.tag == DEFAULT_TAG and reference.digest is None
    return {name, str(reference)} | ({reference.name} if is_short else set())
