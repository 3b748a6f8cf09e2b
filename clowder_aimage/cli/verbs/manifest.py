"""The verbs ``manifest fetch`` and ``manifest push``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    connection_options,
    get_settings,
    output_option,
    reference_argument,
)
from clowder_aimage.cli.console.output import clean_lines, open_output, print_result
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Manifest, Reference, parse_document, read_json
from clowder_aimage.oci.descriptor import to_plain


@click.group(cls=VerbGroup)
def manifest() -> None:
    """Fetch a manifest from a registry, or push one."""


@examples(f"aimage manifest fetch --pretty {NAME}", f"aimage manifest fetch --config {NAME}")
@common_options
@manifest.command(short_help="Print a manifest, or the config that it names.")
@reference_argument
@output_option
@click.option("--pretty", is_flag=True, help="Indent the JSON.")
@click.option(
    "--config", "wants_config", is_flag=True, help="Print the config that the manifest names."
)
@connection_options
def fetch(reference: Reference, file: str, pretty: bool, wants_config: bool) -> None:
    """Print the manifest of REF in its registry, verified and byte for byte.

    With -o it is written to FILE, and the path is printed.
    """
    from clowder_aimage.registry import Repository

    with Repository(reference, get_settings().build_client_options()) as repository:
        descriptor = repository.resolve(reference)
        raw = read_all(repository.open(descriptor), descriptor)
        if wants_config:
            descriptor = Manifest.parse(raw, descriptor.media_type).config
            raw = read_all(repository.open(descriptor), descriptor, MAX_CONFIG_SIZE)
    if pretty:
        raw = json.dumps(read_json(raw, "the document"), indent=2, ensure_ascii=False).encode()
        raw += b"\n"
    if file == "-" and sys.stdout.isatty():
        # The registry may have sent terminal escape sequences.
        click.echo(clean_lines(raw.decode(errors="replace")))
        return
    with open_output(file) as target:
        write_all(target.fileno(), raw)
    if file != "-":
        print_result({"reference": str(reference), "file": file, **to_plain(descriptor)}, file)


@examples(f"aimage manifest push {NAME} manifest.json")
@common_options
@manifest.command(short_help="Push a manifest from a file.")
@reference_argument
@click.argument("file", metavar="FILE")
@connection_options
def push(reference: Reference, file: str) -> None:
    """Push the manifest in FILE (- is stdin) unchanged as REF; print its digest.

    The registry must have the config and all layers, or manifests, that it lists. A REF with a
    digest is refused if the file has another one.
    """
    from clowder_aimage.registry import Repository

    raw = _read(file)
    try:
        document = parse_document(raw)
    except FormatError as error:
        raise FormatError(f"{file} is not a manifest: {error.message}", **error.advice) from None
    if reference.digest not in (None, document.digest):
        raise UsageError(f"{file} has the digest {document.digest}, not that of {reference}")
    with Repository(reference, get_settings().build_client_options()) as repository:
        repository.push(document.descriptor, build_bytes_body(raw), reference)
    print_result(
        {"reference": str(reference), **to_plain(document.descriptor)}, str(document.digest)
    )


def _read(file: str) -> bytes:
    """Return the content of a file or of stdin. Raises ModelError."""
    try:
        with click.open_file(file, "rb") if file == "-" else Path(file).open("rb") as source:
            raw: bytes = source.read(MAX_MANIFEST_SIZE + 1)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    if len(raw) > MAX_MANIFEST_SIZE:
        raise ModelError(
            f"{file} is larger than {MAX_MANIFEST_SIZE} bytes, the limit of a manifest"
        )
    return raw
