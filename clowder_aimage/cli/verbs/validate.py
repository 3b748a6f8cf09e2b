"""The verb ``validate``."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import click

from clowder_aimage import validate as validation
from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import complete_path, get_settings, verb
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.stored_name import resolve_reference
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.validate import CheckedDocument


@examples("aimage validate manifest.json", "aimage validate shapes")
@verb
@click.argument("target", metavar="FILE|REF", shell_complete=complete_path)
@click.option(
    "--schema",
    default="",
    metavar="NAME",
    help="The schema of FILE. [default: detected]",
)
def validate(target: str, schema: str) -> int:
    """Check FILE, or all documents of the AImage REF in the store, against their schemas.

    FILE is a manifest, an index, an AImage config, a configuration of aimage (JSON, - is stdin; or
    YAML), a safetensors file, or the directory of an OCI image layout. All violations are listed
    with their places. The exit code is 5 if there are any.
    """
    try:
        documents = _check(target, schema)
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or target}: {error.strerror or error}"
        ) from None
    is_valid = not any(document.violations for document in documents)
    print_result(_encode_documents(documents, is_valid), _format_documents(documents, is_valid))
    return 0 if is_valid else FormatError.exit_code


def _check(target: str, schema: str) -> list[CheckedDocument]:
    path = Path(target)
    if target == "-":
        return [validation.validate_stream(sys.stdin.buffer, "stdin", schema)]
    if _is_file(path):
        return [validation.validate_file(path, schema)]
    if schema:
        raise UsageError(f"--schema requires a file, and {target} is not a file")
    if path.is_dir() and validation.is_layout(path):
        return validation.validate_layout(path)
    try:
        reference = resolve_reference(target)
    except UsageError as error:
        raise _build_target_error(target, path, error) from None
    try:
        return validation.validate_reference(get_settings().layout, reference)
    except NotFoundError as error:
        raise _build_target_error(target, path, error) from None


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError as error:
        # Too long for a path, or in an inaccessible directory.
        return error.errno != errno.ENAMETOOLONG


def _build_target_error(target: str, path: Path, error: AImageError) -> AImageError:
    if path.is_dir():
        return UsageError(
            f"{target} is a directory, but not an OCI image layout",
            hint="choose a file in it; 'aimage create' packs a model directory",
        )
    if isinstance(error, UsageError) or target.endswith(".json"):
        return NotFoundError(f"file not found: {target}")
    return NotFoundError(f"file not found: {target}, and {error.message}", **error.advice)


def _format_documents(documents: list[CheckedDocument], is_valid: bool) -> list[str]:
    """Return a line for each violation, or for each document if there are none."""
    if is_valid:
        return [
            f"{document.name}: "
            + (f"not checked, {document.note}" if document.note else f"valid {document.schema}")
            for document in documents
        ]
    return [
        document.name
        + (f":{violation.line}:{violation.column}: " if violation.line else ": ")
        + (f"{violation.pointer}: " if violation.pointer else "")
        + violation.message.replace("\n", " ")
        for document in documents
        for violation in document.violations
    ]


def _encode_documents(documents: list[CheckedDocument], is_valid: bool) -> dict[str, Any]:
    main = documents[0]
    return {
        "valid": is_valid,
        "document": main.name,
        "schema": main.schema or None,
        "violations": [
            {
                "document": document.name,
                "schema": document.schema or None,
                "pointer": violation.pointer,
            }
            | ({"line": violation.line, "column": violation.column} if violation.line else {})
            | {"message": violation.message}
            for document in documents
            for violation in document.violations
        ],
        "documents": [
            {
                "document": document.name,
                "schema": document.schema or None,
                "valid": not document.violations,
            }
            | ({"note": document.note} if document.note else {})
            for document in documents
        ],
    }
