"""The JSON Schemas in schemas/: one loader, for a checkout and for an installed wheel.

They are JSON Schema 2020-12 and refer to each other by their ``$id``; they are never
fetched. A pattern's ``$`` matches at the end of the text only, as in ECMA-262, which the
specification refers to (JSON Schema Validation, 6.3.3); Python's also matches before a last line
feed. And 7.0 is not an integer: readers in other languages refuse it as a size.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clowder_aimage.errors import FormatError, UsageError

if TYPE_CHECKING:
    from jsonschema import ValidationError

_HERE = Path(__file__).parent
_SUFFIX = ".schema.json"
JSONPath = tuple[str | int, ...]
"""The keys and positions that lead to a value; empty for the whole document."""
_MAX_MESSAGE = 300  # characters
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault in a document; line and column count from 1 and are 0 where they are not known."""

    path: JSONPath
    message: str
    line: int = 0
    column: int = 0

    @property
    def pointer(self) -> str:
        """The path as a JSON pointer."""
        return pointer(self.path)


def pointer(path: JSONPath) -> str:
    """Return a path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return the schema in ``schemas/<name>.schema.json``.

    Raises:
        FileNotFoundError: there is no such schema.
    """
    for directory in _directories():
        path = directory / f"{name}{_SUFFIX}"
        if path.is_file():
            schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return schema
    raise FileNotFoundError(f"no schema {name}")


def names() -> list[str]:
    """Return the names that ``load`` accepts."""
    paths = (path for place in _directories() for path in place.glob(f"*{_SUFFIX}"))
    return sorted({path.name.removesuffix(_SUFFIX) for path in paths})


def _directories() -> tuple[Path, ...]:
    return (_HERE / "schemas", _HERE.parent / "schemas")


def validate(name: str, document: object) -> None:
    """Check ``document`` against a schema.

    Raises:
        FormatError: it is not valid; the message has the path of the most relevant violation.
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(name).iter_errors(document))
    if error is not None:
        where = "/".join(str(part) for part in error.absolute_path) or "the top"
        raise FormatError(f"not a valid {name} document: {error.message[:300]} (at {where})")


def read_configuration(path: Path, parse: Callable[[dict[str, Any]], _T]) -> _T:
    """Read the configuration file and parse its object, an empty one if there is no file.

    Raises:
        UsageError: the file cannot be read, is not valid, or ``parse`` raises ValueError.
    """
    try:
        document = json.loads(path.read_bytes())
        validate("config", document)
    except (FileNotFoundError, NotADirectoryError):
        return parse({})
    except (OSError, ValueError, RecursionError, FormatError) as error:
        raise _configuration_error(path, error) from None
    try:
        return parse(document)
    except ValueError as error:
        raise _configuration_error(path, error) from None


def _configuration_error(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"cannot use the configuration {path}: {error}", hint="see schemas/config.schema.json"
    )


def violations(name: str, document: object) -> Iterator[Violation]:
    """Yield all violations of a schema, each once."""
    seen: set[Violation] = set()
    for error in _validator(name).iter_errors(document):
        path = tuple(error.absolute_path)
        if "propertyNames" in error.absolute_schema_path:
            path = (*path, str(error.instance))
        violation = Violation(path, _message(error))
        if violation not in seen:  # two schemas may have the same rule for one place
            seen.add(violation)
            yield violation


@functools.cache
def _validator(name: str) -> Any:
    """Return a validator that resolves references to the other schemas here, and only here."""
    import jsonschema  # here, because it takes 40 ms
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    found = [DRAFT202012.create_resource(_undeclared(one)) for one in names()]
    registry: Registry[Any] = Registry().with_resources((one.id() or "", one) for one in found)
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    kind = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        jsonschema.Draft202012Validator, {"pattern": _pattern}, type_checker=types
    )
    return kind(_undeclared(name), registry=registry.crawl())


def _undeclared(name: str) -> dict[str, Any]:
    """Return a schema without ``$schema``, for which jsonschema takes its own validator."""
    return {key: value for key, value in load(name).items() if key != "$schema"}


def _pattern(
    _validator: Any, pattern: str, instance: object, _schema: object
) -> Iterator[ValidationError]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not _compiled(pattern).search(instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", re.sub(r"\[[^]]*\]", _shielded, pattern)))


def _shielded(found: re.Match[str]) -> str:
    """Escape ``$`` in a class of characters, where it is a dollar."""
    return found[0].replace("$", r"\$")


def _message(error: ValidationError) -> str:
    """Return jsonschema's message, shortened, with the schema's description of a pattern."""
    text, schema = error.message, error.schema
    if error.validator == "pattern" and isinstance(schema, dict) and "description" in schema:
        text = f"{error.instance!r} is not valid: {schema['description']}"
    if len(text) <= _MAX_MESSAGE:
        return text
    return f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
