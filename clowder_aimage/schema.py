"""The JSON Schemas in schemas/: one loader, for a checkout and for an installed wheel.

They are JSON Schema 2020-12 and refer to each other by their ``$id``. All of them are on this
machine, and nothing is ever fetched. A pattern's ``$`` is the end of the text, as in ECMA-262,
which the specification means (JSON Schema Validation, 6.3.3); to Python it is also the place before
a last line feed. And 7.0 is no integer: readers in other languages take none for a size.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import FormatError

if TYPE_CHECKING:
    from jsonschema import ValidationError

_HERE = Path(__file__).parent
_SUFFIX = ".schema.json"
_KINDS = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
_MUST = {
    "minimum": "{} is less than {}",
    "maximum": "{} is more than {}",
    "multipleOf": "{} is no multiple of {}",
    "minLength": "the text is empty, or too short ({1} at least)",
    "maxLength": "the text is too long ({1} characters at most)",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong in a document, and where: the keys and positions that lead there."""

    path: tuple[str | int, ...]
    message: str


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The schema in ``schemas/<name>.schema.json``. Raises FileNotFoundError."""
    for directory in _directories():
        path = directory / f"{name}{_SUFFIX}"
        if path.is_file():
            schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return schema
    raise FileNotFoundError(f"no schema {name}")


def names() -> list[str]:
    """What ``load`` knows."""
    paths = (path for place in _directories() for path in place.glob(f"*{_SUFFIX}"))
    return sorted({path.name.removesuffix(_SUFFIX) for path in paths})


def _directories() -> tuple[Path, ...]:
    return (_HERE / "schemas", _HERE.parent / "schemas")


def validate(name: str, document: object) -> None:
    """Check ``document`` against a schema.

    Raises:
        FormatError: with the place of the first thing that is wrong.
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(name).iter_errors(document))
    if error is not None:
        where = "/".join(str(part) for part in error.absolute_path) or "the top"
        raise FormatError(f"not a valid {name} document: {error.message[:300]} (at {where})")


def violations(name: str, document: object) -> Iterator[Violation]:
    """Everything in which ``document`` is not what a schema says, as sentences for people."""
    said: set[Violation] = set()
    for error in _validator(name).iter_errors(document):
        path = tuple(error.absolute_path)
        if "propertyNames" in error.absolute_schema_path:
            path = (*path, str(error.instance))
        violation = Violation(path, _sentence(error))
        if violation not in said:  # two schemas may ask the same of one place
            said.add(violation)
            yield violation


@functools.cache
def _validator(name: str) -> Any:
    """A validator that finds the other schemas here, and never anywhere else."""
    import jsonschema  # 40 ms that a plain 'aimage ls' must not pay
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    found = [DRAFT202012.create_resource(_undeclared(one)) for one in names()]
    registry: Registry[Any] = Registry().with_resources((one.id() or "", one) for one in found)
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda checker, value: type(value) is int
    )
    kind = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        jsonschema.Draft202012Validator, {"pattern": _pattern}, type_checker=types
    )
    return kind(_undeclared(name), registry=registry.crawl())


def _undeclared(name: str) -> dict[str, Any]:
    """A schema without ``$schema``, at which jsonschema would go back to a validator of its own."""
    return {key: value for key, value in load(name).items() if key != "$schema"}


def _pattern(
    validator: Any, pattern: str, instance: object, schema: object
) -> Iterator[ValidationError]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not _compiled(pattern).search(instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", re.sub(r"\[[^]]*\]", _shielded, pattern)))


def _shielded(found: re.Match[str]) -> str:
    """A class of characters, in which a ``$`` is a dollar."""
    return found[0].replace("$", r"\$")


def _sentence(error: ValidationError) -> str:
    """What is wrong, for people."""
    said, found, keyword = error.validator_value, error.instance, str(error.validator)
    if keyword == "type" and isinstance(said, str):
        return f"must be {_KINDS.get(said, said)}, not {_shown(found)}"
    if keyword == "required" and isinstance(found, dict):
        # jsonschema has an error for each; its text alone says which
        return f"{error.message.removesuffix(' is a required property')} is missing"
    if keyword == "dependentRequired":
        missing, _, other = error.message.partition(" is a dependency of ")
        return f"{missing} is missing, which {other} needs"
    if keyword == "const":
        return f"must be {json.dumps(said)}, not {_shown(found)}"
    if keyword == "enum" and isinstance(said, list):
        return f"{_shown(found)} is none of {', '.join(map(str, said))}"
    if keyword == "pattern":
        return f"{_shown(found)} is not what it must be{_meant(error)}"
    if keyword in _MUST:
        return _MUST[keyword].format(_shown(found), said)
    return error.message[:300]


def _meant(error: ValidationError) -> str:
    """What the schema says of the place, or else the pattern."""
    schema = error.schema
    described = schema.get("description") if isinstance(schema, dict) else None
    return f": {described}" if described else f" ({error.validator_value})"


def _shown(value: object) -> str:
    """A value, short enough for a line; of what holds others only the kind."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
