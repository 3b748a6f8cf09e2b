"""The JSON Schemas in schemas/: one loader for checkouts and installed wheels.

They are JSON Schema 2020-12 and refer to each other by their ``$id``; they are never fetched. A
pattern's ``$`` matches at the end of the text only, as in ECMA-262 (JSON Schema Validation, 6.3.3);
Python's also matches before a last line feed. And 7.0 is not an integer, as in other languages.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clowder_aimage.document.optional_file import read_optional
from clowder_aimage.document.schema_check import (
    SchemaCheck,
    UnknownKeywordError,
    compile_pattern,
)
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import FormatError, UsageError

if TYPE_CHECKING:
    from jsonschema import ValidationError

_HERE = Path(__file__).parents[1]
_SUFFIX = ".schema.json"
JSONPath = tuple[str | int, ...]
"""The keys and positions that lead to a value; empty for the whole document."""
# Bytes of a document with located lines, at about 1 MiB/s
MAX_POSITIONED_SIZE = 2 * 1024 * 1024
_MAX_MESSAGE = 300  # characters
# Violations that are compared for relevance: a large document may have millions.
_MAX_MATCHED = 100
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault in a document; line and column count from 1 and are 0 if unknown."""

    path: JSONPath
    message: str
    line: int = 0
    column: int = 0

    @property
    def pointer(self) -> str:
        """The path as a JSON pointer."""
        return format_pointer(self.path)


def format_pointer(path: JSONPath) -> str:
    """Return a path as a JSON pointer (RFC 6901)."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Return the schema in ``schemas/<name>.schema.json``. Raises FileNotFoundError."""
    path = _list_paths().get(name)
    if path is None:
        raise FileNotFoundError(f"no schema {name}")
    schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return schema


def list_names() -> list[str]:
    """Return the names that ``load`` accepts."""
    return sorted(_list_paths())


@functools.cache
def _list_paths() -> dict[str, Path]:
    directories = (_HERE.parent / "schemas", _HERE / "schemas")
    paths = (path for directory in directories for path in directory.glob(f"*{_SUFFIX}"))
    return {path.name.removesuffix(_SUFFIX): path for path in paths}


def validate(name: str, document: object) -> None:
    """Check ``document`` against a schema. Raises FormatError, with the most relevant violation."""
    if is_valid(name, document):
        return
    from jsonschema.exceptions import best_match

    error = best_match(islice(_build_validator(name).iter_errors(document), _MAX_MATCHED))
    if error is not None:
        location = "/".join(str(key) for key in error.absolute_path) or "the top"
        raise FormatError(f"invalid {name} document: {_format_message(error)} (at {location})")


def is_valid(name: str, document: object) -> bool:
    """Return True if a document is surely valid; False also if it is not known here."""
    try:
        return SchemaCheck(load(name), _load_url).accepts(document)
    except (UnknownKeywordError, RecursionError):
        return False


def _load_url(url: str) -> dict[str, Any]:
    """Return the schema of the project with a URL. Raises UnknownKeywordError."""
    # schemas/trust.schema.json is .../trust.v1.schema.json
    name = re.sub(r"\.v[0-9]+$", "", url.rpartition("/")[2].removesuffix(_SUFFIX))
    if name in list_names() and (schema := load(name)).get("$id") == url:
        return schema
    raise UnknownKeywordError(url)


def read_configuration(
    path: Path | None, parse: Callable[[dict[str, Any]], _T], *, is_optional: bool = False
) -> _T:
    """Read the configuration file and parse its object, an empty one if there is no file.

    It is YAML if the name ends in .yaml or .yml, else JSON. If it ``is_optional``, a file that
    cannot be read, or is not well-formed, counts as absent, with a warning.

    Raises:
        UsageError: the file cannot be read, is not valid, or ``parse`` raises ValueError.
    """
    try:
        document = _load_configuration(path, is_optional=is_optional)
        if document:
            validate("config", document)
        return parse(document)
    except (OSError, ValueError, RecursionError, FormatError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot use the configuration {path}: {reason}", hint="see schemas/config.schema.json"
        ) from None


def _load_configuration(path: Path | None, *, is_optional: bool) -> dict[str, Any]:
    if path is None:
        return {}
    load_document = partial(_parse_configuration, path)
    if is_optional:
        return read_optional(path, load_document) or {}
    try:
        return load_document(recode_file(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _parse_configuration(path: Path, raw: bytes) -> dict[str, Any]:
    if is_yaml(path):
        # Imported late: it takes 15 ms.
        from clowder_aimage.document.yaml import read_yaml

        document = read_yaml(raw.decode("utf-8"), path.name)[0]
        # A document of comments only is empty.
        document = {} if document is None else document
    elif not raw.strip():
        raise FormatError("it is empty")
    else:
        document = read_json(raw, "it")
    if not isinstance(document, dict):
        raise FormatError(f"{str(document)[:60]!r} is not of type 'object'")
    return document


def is_yaml(path: Path) -> bool:
    """Return True if the name of a file is that of a YAML document."""
    return path.suffix in (".yaml", ".yml")


def iter_violations(name: str, document: object) -> Iterator[Violation]:
    """Yield all violations of a schema, each once."""
    reported: set[Violation] = set()
    for error in _build_validator(name).iter_errors(document):
        path = tuple(error.absolute_path)
        if "propertyNames" in error.absolute_schema_path:
            path = (*path, str(error.instance))
        violation = Violation(path, _format_message(error))
        # Two schemas may have the same rule for one value.
        if violation not in reported:
            reported.add(violation)
            yield violation


@functools.cache
def _build_validator(name: str) -> Any:
    """Return a validator that resolves references to the project's other schemas only."""
    # Imported late: it takes 40 ms.
    import jsonschema
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    resources = [DRAFT202012.create_resource(_drop_dialect(schema)) for schema in list_names()]
    registry: Registry[Any] = Registry().with_resources(
        (resource.id() or "", resource) for resource in resources
    )
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    kind = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        jsonschema.Draft202012Validator, {"pattern": _iter_pattern_errors}, type_checker=types
    )
    return kind(_drop_dialect(name), registry=registry.crawl())


def _drop_dialect(name: str) -> dict[str, Any]:
    """Return a schema without ``$schema``, so that jsonschema uses the given validator."""
    return {key: value for key, value in load(name).items() if key != "$schema"}


def _iter_pattern_errors(
    _validator: Any, pattern: str, instance: object, _schema: object
) -> Iterator[ValidationError]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not compile_pattern(pattern).search(instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _format_message(error: ValidationError) -> str:
    """Return jsonschema's message, shortened, with the schema's description of a pattern."""
    text, schema = error.message, error.schema
    if error.validator == "pattern" and isinstance(schema, dict) and "description" in schema:
        text = f"{error.instance!r} is not valid: {schema['description']}"
    if error.validator == "additionalProperties" and error.validator_value is False:
        declared = schema.get("properties", {}) if isinstance(schema, dict) else {}
        keys: Any = error.instance
        text = ", ".join(
            describe_unknown_key(str(key), declared) for key in keys if key not in declared
        )
    if len(text) <= _MAX_MESSAGE:
        return text
    return f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"


def describe_unknown_key(key: str, names: Iterable[str]) -> str:
    """Return the message for a key that is not in ``names``, with the nearest that is."""
    nearest = find_nearest(key, names)
    return f"unknown key {key!r}" + (f"; did you mean {nearest!r}?" if nearest else "")


def locate(text: str, violations: list[Violation]) -> list[Violation]:
    """Return the violations with the nearest lines, in text order."""
    positions = find_json_positions(text)
    if not positions:
        return violations
    located = []
    for violation in violations:
        path = violation.path
        while path not in positions:
            path = path[:-1]
        # Of duplicate keys the last one counts.
        line, column = compute_line_column(text, positions[path][-1])
        located.append(replace(violation, line=line, column=column))
    return sorted(located, key=lambda violation: (violation.line, violation.column))


def find_json_positions(text: str) -> dict[JSONPath, list[int]]:
    """Return the offsets of the values of a JSON text; in an object, of the keys.

    PyYAML parses the text after characters that YAML does not allow are replaced at the same
    length: tabs, control characters, escaped surrogates.
    """
    import yaml  # type: ignore[import-untyped]

    if len(text) > MAX_POSITIONED_SIZE:
        return {}
    plain = re.sub("[^ -~]", " ", text).replace("\\ud", "\\u0").replace("\\uD", "\\u0")
    try:
        root = yaml.compose(plain, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError):
        # JSON may be invalid as YAML, such as a key of more than 1,024 characters.
        return {}
    positions: dict[JSONPath, list[int]] = {(): [root.start_mark.index]}
    nodes: list[tuple[JSONPath, Any]] = [((), root)]
    while nodes:
        path, node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                positions[*path, number] = [item.start_mark.index]
                nodes.append(((*path, number), item))
        elif isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                start = key.start_mark.index
                inner = (*path, json.loads(text[start : key.end_mark.index]))
                positions.setdefault(inner, []).append(start)
                nodes.append((inner, item))
    return positions


def compute_line_column(text: str, offset: int) -> tuple[int, int]:
    """Return the line and column of a character; both count from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
