"""The check of a parameter's value and the words of its error, for every interface."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard, get_args, get_origin

from clowder_aimage.document.unicode_text import INVALID, is_valid_text
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.parameter import ValueType, list_parameters

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
# The most digits of a number that is text
_MAX_DIGITS = 400
_MAX_SHOWN = 1 << 80
_FLAGS = dict.fromkeys(("true", "1", "on", "yes"), True)
_FLAGS |= dict.fromkeys(("false", "0", "off", "no"), False)
_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "multiple_of": lambda value, factor: value % factor == 0,
    "min_length": lambda value, least: len(value) >= least,
    "max_length": lambda value, most: most is None or len(value) <= most,
}


def build_parameter_error(
    name: str, reason: str, hint: str | None = None, **facts: str
) -> UsageError:
    """Return the error of a parameter, with its name as a fact."""
    return UsageError(f"{name} {reason}", hint=hint, parameter=name, **facts)


def check_fields(value: Any) -> None:
    """Check the parameters of a dataclass that is being made, and set them as their types.

    Raises UsageError as ``check``.
    """
    for parameter in list_parameters(value.__class__):
        checked = check(parameter.name, getattr(value, parameter.attribute), parameter.type)
        object.__setattr__(value, parameter.attribute, checked)


def check(name: str, value: object, accepted: ValueType) -> Any:
    """Return a value as its type: 8.0 as a whole number, a list as a tuple.

    Raises UsageError with the name, and with the values that are accepted.
    """
    if value is None and accepted.is_optional:
        return None
    stated, value = value, _as_kind(value, accepted.kind)
    is_kind = _is_kind(value, accepted.kind)
    if not is_kind or not _is_within(value, accepted):
        shown = f", not {stated}" if is_number(stated) and abs(stated) <= _MAX_SHOWN else ""
        mistake = "value" if is_kind else "type"
        raise build_parameter_error(name, f"must be {describe(accepted)}{shown}", mistake=mistake)
    if isinstance(value, tuple):
        items = map(ValueType.of, _list_item_types(accepted.kind, len(value)))
        return tuple(check(name, element, item) for element, item in zip(value, items, strict=True))
    if isinstance(value, str) and not is_valid_text(value):
        raise build_parameter_error(name, INVALID, mistake="value")
    return value


def _is_within(value: object, accepted: ValueType) -> bool:
    """Return True if a value of the right kind is one of the choices, or within the bounds."""
    if get_origin(accepted.kind) is Literal:
        return value in get_args(accepted.kind)
    return all(_TESTS[bound](value, limit) for bound, limit in accepted.bounds.items())


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value is a number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_kind(value: object, kind: Any) -> object:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    return tuple(value) if get_origin(kind) is tuple and isinstance(value, list) else value


def _is_kind(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) == len(_list_item_types(kind, len(value)))
    return type(value) is kind


def _list_item_types(kind: Any, count: int) -> tuple[Any, ...]:
    """Return the types of the items of a tuple of ``count`` items."""
    item, *further = get_args(kind)
    return (item,) * count if further[-1:] == [...] else (item, *further)


def parse(text: str, accepted: ValueType) -> object:
    """Return the value of a text in a form or on a command line; a wrong text as it is."""
    kind = accepted.kind
    if get_origin(kind) is tuple:
        item = ValueType.of(get_args(kind)[0])
        return tuple(parse(element.strip(), item) for element in text.split(","))
    if kind is bool:
        return parse_flag(text)
    if kind not in (int, float) or len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def parse_flag(text: str) -> bool | str:
    """Return True or False for a text that stands for it, such as True, on or 1; others as is."""
    return _FLAGS.get(text.lower(), text)


def describe(accepted: ValueType) -> str:
    """Return the values of a type in words, such as "a whole number from 1 to 1000"."""
    kind, bounds, _ = accepted
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        item, *further = get_args(kind)
        if further == [...]:
            return f"a list of {_count(bounds)}"
        item_words = describe(ValueType.of(item)).removeprefix("a ").replace("number", "numbers")
        return f"{1 + len(further)} {item_words}"
    if kind is str:
        return f"text of {_count(bounds)} characters" if bounds else "text"
    if kind not in (bool, int, float):
        return "values"
    number = "a number" if kind is float else "a whole number"
    number = f"a multiple of {bounds['multiple_of']}" if "multiple_of" in bounds else number
    return "true or false" if kind is bool else f"{number}{_format_range(bounds)}"


def _count(bounds: Mapping[str, Any]) -> str:
    least, most = bounds.get("min_length", 0), bounds["max_length"]
    return f"{least} to {most}" if least else f"at most {most}"


def _format_range(bounds: Mapping[str, Any]) -> str:
    if "gt" in bounds:
        return f" above {bounds['gt']}, up to {bounds['le']}"
    return f" from {bounds['ge']} to {bounds['le']}"
