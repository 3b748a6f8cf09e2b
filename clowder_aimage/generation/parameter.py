"""Parameters: their types, their bounds, and their words in interfaces.

Parameters are fields of dataclasses, such as ``Annotated[int, Ge(1), Le(1000), Words("Steps.")]``,
with the bounds of the package annotated-types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Words:
    """The words that interfaces need of a parameter.

    help: a sentence. default: in words, if it is not a constant. name: in all interfaces, if it is
    not the field's. field: in requests over HTTP, if it is another; synonyms: further ones there.
    unit: of the value, such as pixels. usual: the range of a slider, if the bounds are far apart.
    """

    help: str
    default: str = ""
    name: str = ""
    field: str = ""
    synonyms: tuple[str, ...] = ()
    unit: str = ""
    usual: tuple[float, float] | None = None


class ValueType(NamedTuple):
    """The parts of an annotation.

    kind: bool, int, float, str, a Literal, or a tuple. bounds: ge, gt, le, multiple_of of numbers;
    min_length and max_length.
    """

    kind: Any
    bounds: Mapping[str, Any]
    is_optional: bool

    @classmethod
    def of(cls, annotation: Any) -> ValueType:
        """Return the parts of a type or of an annotated one."""
        kind, *limits = (
            get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
        )
        is_union = get_origin(kind) in (UnionType, Union)
        kinds = [member for member in get_args(kind) if member is not NoneType]
        is_optional = is_union and len(kinds) < len(get_args(kind))
        limits = [limit for limit in limits if not isinstance(limit, Words)]
        bounds = {
            name: bound for limit in limits for name, bound in dataclasses.asdict(limit).items()
        }
        return cls(kinds[0] if is_optional else kind, bounds, is_optional)

    @property
    def is_scalar(self) -> bool:
        """Return True if the value is not a tuple."""
        return get_origin(self.kind) is not tuple


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field with words.

    name: in interfaces. attribute: in its dataclass. type: the parts of ``annotation``.
    """

    name: str
    attribute: str
    annotation: Any
    type: ValueType
    default: Any
    words: Words

    @property
    def default_text(self) -> str:
        """Return the default as a person writes it; empty for none and for flags."""
        if self.words.default or isinstance(self.default, bool):
            return self.words.default
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default) if isinstance(self.default, int | str) else ""

    @property
    def field(self) -> str:
        """Return the name in requests over HTTP."""
        return self.words.field or self.name


@cache
def list_parameters(owner: type[Any]) -> tuple[Parameter, ...]:
    """Return the parameters among the fields of a dataclass, in their order."""
    hints = get_type_hints(owner, include_extras=True)
    listed = []
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        for words in get_args(hint):
            if isinstance(words, Words):
                name, parts = words.name or field.name, ValueType.of(hint)
                listed.append(Parameter(name, field.name, hint, parts, field.default, words))
    return tuple(listed)
