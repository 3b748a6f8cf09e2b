"""The verb ``blob fetch``."""

from __future__ import annotations

from dataclasses import replace

import click

from clowder_aimage.cli.console.example import REPOSITORY, examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    complete_name,
    connection_options,
    get_settings,
    output_option,
    parse_reference,
)
from clowder_aimage.cli.console.output import open_output, print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.graph import UNKNOWN
from clowder_aimage.content.verified_reader import VerifyingReader
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Descriptor


@click.group(cls=VerbGroup)
def blob() -> None:
    """Fetch a blob from a registry."""


@examples(f"aimage blob fetch {REPOSITORY}@sha256:... -o weights.bin")
@common_options
@blob.command(short_help="Fetch a blob by its digest.")
@click.argument("name", metavar="REF@DIGEST|REPO", shell_complete=complete_name)
@click.argument("digest", required=False)
@output_option
@connection_options
def fetch(name: str, digest: str | None, file: str) -> None:
    """Fetch the blob REF@DIGEST, or DIGEST of the repository REPO, verified against its digest.

    FILE is written in full or not at all, and its path is printed. Without -o the bytes are printed
    while they arrive: the exit code is 5 if they are wrong.

    If a policy demands signatures, REF has the tag of an AImage with the blob: REPO:TAG@DIGEST.
    """
    from clowder_aimage.content.gate import find_gate
    from clowder_aimage.registry import Repository

    if digest is not None and "@" in name:
        raise UsageError(f"{name} has a digest already", hint="omit the second digest")
    reference = parse_reference(name if digest is None else f"{name}@{digest}")
    if reference.digest is None:
        raise UsageError(f"{name} has no digest: expected REF@DIGEST, or REPO DIGEST")
    with Repository(reference, get_settings().build_client_options()) as repository:
        if reference.tag is not None and find_gate() is not None:
            # A blob has no signature: it is accepted with a manifest that lists it.
            repository.resolve(replace(reference, digest=None))
        content = Descriptor(UNKNOWN, reference.digest, repository.fetch_size(reference.digest))
        buffer = new_buffer()
        with (
            open_output(file) as target,
            VerifyingReader(repository.open(content), content) as reader,
            Progress("fetching", reference) as progress,
        ):
            progress.begin(content.size)
            while count := reader.readinto(buffer):
                write_all(target.fileno(), buffer[:count])
                progress.advance(count)
    if file != "-":
        value = {"file": file, "digest": str(content.digest), "size": content.size}
        print_result({"reference": str(reference), **value}, file)
