"""Rules between the fields of a body: checked, and part of its JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic.config import JsonDict

# The values of a field that count as absent
Unset = Callable[[str], list[Any]]


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Fields that require one of ``others``, or if they ``exclude`` them, that none is set.

    Without fields, every body requires one of ``others``. words: the required or excluded thing in
    messages; by default the name of a field.
    """

    fields: tuple[str, ...]
    others: tuple[str, ...]
    words: str = ""
    exclude: bool = False

    def find_fault(self, is_set: Callable[[str], bool]) -> tuple[str, str] | None:
        """Return a field and the reason of its refusal; None if the body observes the rule."""
        fields = [field for field in self.fields if is_set(field)]
        set_others = [name for name in self.others if is_set(name)]
        if self.exclude and fields and set_others:
            return fields[0], f"cannot be combined with {self.words or set_others[0]}"
        if self.exclude or set_others:
            return None
        if not self.fields:
            return self.others[0], "is required"
        return (fields[0], f"requires {self.words or self.others[0]}") if fields else None

    def build_schema(self, names: Collection[str], unset: Unset) -> JsonDict | None:
        """Return the JSON Schema of a body with ``names`` fields; None if it cannot break it."""
        fields = [name for name in self.fields if name in names]
        alternatives = [name for name in self.others if name in names]
        if not alternatives or (self.fields and not fields):
            return None
        cases = [_without(fields, unset)] if fields else []
        return {"anyOf": [*cases, *self._build_cases(alternatives, unset)]}

    def _build_cases(self, alternatives: list[str], unset: Unset) -> list[JsonDict]:
        if self.exclude:
            return [_without(alternatives, unset)]
        return [
            {"required": [name], "properties": {name: {"not": {"enum": unset(name)}}}}
            for name in alternatives
        ]


def _without(names: list[str], unset: Unset) -> JsonDict:
    return {"properties": {name: {"enum": unset(name)} for name in names}}


def needs(*fields: str) -> FieldRule:
    """Return the rule that a body has one of the fields."""
    return FieldRule((), fields)


def requires(fields: str | tuple[str, ...], *alternatives: str, words: str = "") -> FieldRule:
    """Return the rule that fields require one of the others."""
    return FieldRule((fields,) if isinstance(fields, str) else fields, alternatives, words)


def excludes(field: str, *excluded: str, words: str = "") -> FieldRule:
    """Return the rule that a field cannot be combined with any of the others."""
    return FieldRule((field,), excluded, words, exclude=True)
