"""The verb ``validate``."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import click

from clowder_aimage import validate as validation
from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import complete_path, settings, verb
from clowder_aimage.cli.console.output import result
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.validate import CheckedDocument


@examples("aimage validate manifest.json", "aimage validate shapes")
@verb
@click.argument("what", metavar="FILE|REF", shell_complete=complete_path)
@click.option(
    "--schema",
    default="",
    metavar="NAME",
    help="The schema of FILE. [default: detected]",
)
def validate(what: str, schema: str) -> int:
    """Check FILE, or all documents of the AImage REF in the store, against their schemas.

    FILE is a manifest, an index, an AImage config, a configuration of aimage (JSON, - is stdin; or
    YAML), a safetensors file, or the directory of an OCI image layout. All violations are listed
    with their places. The exit code is 5 if there are any.
    """
    try:
        documents = _check(what, schema)
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or what}: {error.strerror or error}"
        ) from None
    is_valid = not any(one.violations for one in documents)
    result(_value(documents, is_valid), _lines(documents, is_valid))
    return 0 if is_valid else FormatError.exit_code


def _check(what: str, schema: str) -> list[CheckedDocument]:
    path = Path(what)
    if what == "-":
        return [validation.validate_stream(sys.stdin.buffer, "stdin", schema)]
    if _is_file(path):
        return [validation.validate_file(path, schema)]
    if schema:
        raise UsageError(f"--schema requires a file, and {what} is not a file")
    if path.is_dir() and validation.is_layout(path):
        return validation.validate_layout(path)
    try:
        return validation.validate_reference(settings().layout, stored_reference(what))
    except (NotFoundError, UsageError) as error:
        raise _not_found(what, path, error) from None


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError as error:  # too long for a path, or in an inaccessible directory
        return error.errno != errno.ENAMETOOLONG


def _not_found(what: str, path: Path, error: AImageError) -> AImageError:
    if path.is_dir():
        return UsageError(
            f"{what} is a directory, but not an OCI image layout",
            hint="choose a file in it; 'aimage create' packs a model directory",
        )
    if isinstance(error, UsageError) or what.endswith(".json"):
        return NotFoundError(f"file not found: {what}")
    return NotFoundError(f"file not found: {what}, and {error.message}", **error.advice)


def _lines(documents: list[CheckedDocument], is_valid: bool) -> list[str]:
    """Return a line for each violation, or for each document if there are none."""
    if is_valid:
        return [
            f"{one.name}: " + (f"not checked, {one.note}" if one.note else f"valid {one.schema}")
            for one in documents
        ]
    return [
        one.name
        + (f":{wrong.line}:{wrong.column}: " if wrong.line else ": ")
        + (f"{wrong.pointer}: " if wrong.pointer else "")
        + wrong.message.replace("\n", " ")
        for one in documents
        for wrong in one.violations
    ]


def _value(documents: list[CheckedDocument], is_valid: bool) -> dict[str, Any]:
    first = documents[0]
    return {
        "valid": is_valid,
        "document": first.name,
        "schema": first.schema or None,
        "violations": [
            {"document": one.name, "schema": one.schema or None, "pointer": wrong.pointer}
            | ({"line": wrong.line, "column": wrong.column} if wrong.line else {})
            | {"message": wrong.message}
            for one in documents
            for wrong in one.violations
        ],
        "documents": [
            {"document": one.name, "schema": one.schema or None, "valid": not one.violations}
            | ({"note": one.note} if one.note else {})
            for one in documents
        ],
    }
