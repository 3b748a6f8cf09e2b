"""Parse YAML and JSON texts into values with their line numbers.

The accepted YAML 1.2.2 expresses JSON's values only: no aliases (a few lines can expand to
gigabytes), no tags (some readers construct arbitrary Python objects from them), no duplicate keys,
one document. Plain scalars are resolved by the core schema (10.3.2 "Tag Resolution"), so that
``no``, ``012`` and ``2026-01-31`` keep their meaning. Octal and hexadecimal numbers are strings.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from clowder_aimage.errors import FormatError

# Levels of lists and objects.
MAX_DEPTH = 20
Path = tuple[str | int, ...]
"""The keys and positions that lead to a value; empty for the whole document."""
# libyaml is faster, but PyYAML may be built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")
_FORBIDDEN = re.compile(
    # YAML 1.2.2, 5.1
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
Lines = dict[Path, int]
"""The line of each value by its path; for a value in an object, the line of its key."""


def read_yaml(text: str, file: str, hint: str | None = None) -> tuple[Any, Lines]:
    """Return the value of ``text``, None if it is empty, and its lines.

    Raises FormatError with ``file`` and ``hint``, and with the line if it is known.
    """
    lines: Lines = {}
    try:
        _check(text)
        root = yaml.compose(text, Loader=_LOADER)
        return None if root is None else _build_value(root, (), lines), lines
    except yaml.YAMLError as error:
        line, message = _describe_syntax_error(error, text)
    raise FormatError(f"{format_position(file, line)}: {message}", hint=hint)


def find_json_lines(text: str) -> Lines:
    """Return the lines of the values in a JSON text, parsed as YAML; empty if that fails."""
    try:
        return read_yaml(text.replace("\t", " "), "")[1]
    except FormatError:
        return {}


def format_position(file: str, line: int) -> str:
    """Format a file and a line for messages; the file alone for line 0."""
    return f"{file}, line {line}" if line else file


def _check(text: str) -> None:
    """Reject aliases, tags, multiple documents and deep nesting before nodes are composed.

    libyaml's composer recurses in C: without a limit, deep nesting overflows the stack.
    """
    # Events need no memory for the document, so that a bad one is refused before it is built.
    depth = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise _refuse("aliases (*name) are not supported: repeat the value", event)
        if (tag := getattr(event, "tag", None)) is not None:
            raise _refuse(f"the tag {tag[:60]!a} is not supported: remove it", event)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise _refuse("multiple documents are not supported: merge them", event)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _refuse(f"nested more than {MAX_DEPTH} levels deep", event)


def _build_value(node: Any, path: Path, lines: Lines) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else _resolve_scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_build_value(item, (*path, index), lines) for index, item in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key_node, value in node.value:
        key = _build_value(key_node, (), lines) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise _refuse("a key must be a string: put it in quotes", key_node)
        if key in mapping:
            raise _refuse(f"duplicate key {key[:60]!a}", key_node)
        lines[(*path, key)] = key_node.start_mark.line + 1
        mapping[key] = _build_value(value, (*path, key), lines)
    return mapping


def _resolve_scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not math.isinf(float(text)):
        return float(text)
    return text


def _describe_syntax_error(error: Any, text: str) -> tuple[int, str]:
    """Return the line of the parser's error, 0 if unknown, and the message."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or "not YAML"
        return mark.line + 1, str(problem)
    if (forbidden := _FORBIDDEN.search(text)) is None:
        return 0, "not YAML"
    line = text.count("\n", 0, forbidden.start()) + 1
    return line, f"invalid character in YAML: {forbidden[0]!a}"


def _refuse(message: str, node: Any) -> Exception:
    return yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)  # type: ignore[no-any-return]
