"""``aimage attach``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.example import NAME, REPOSITORY, examples
from clowder_aimage.cli.console.option import (
    get_settings,
    parse_annotation,
    reference_argument,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


@examples(
    f"aimage attach {NAME} sbom.json --type application/spdx+json",
    f"aimage attach --get {REPOSITORY}@sha256:... -o sbom",
)
@verb
@reference_argument
@click.argument("file", nargs=-1, type=click.Path(path_type=Path))
@click.option("--type", "artifact_type", metavar="MEDIA/TYPE", help="The type of the artifact.")
@click.option(
    "--annotation",
    "annotations",
    metavar="KEY=VALUE",
    multiple=True,
    help="Annotate the artifact. May be repeated.",
)
@click.option("--get", "is_get", is_flag=True, help="Fetch the files of the artifact REF instead.")
@click.option(
    "-o",
    "--output",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --get: the directory of the files. [default: .]",
)
@transfer_options
def attach(
    reference: Reference,
    file: tuple[Path, ...],
    artifact_type: str | None,
    annotations: tuple[str, ...],
    is_get: bool,
    directory: Path | None,
) -> None:
    """Push FILEs as an artifact with the subject REF in its registry; print its digest.

    The artifact goes to the repository of REF. 'aimage referrers' lists it. With --get, REF is such
    an artifact, by its digest: its files are written to DIR, verified, and their paths printed. No
    file is replaced.
    """
    from clowder_aimage.attach import attach as attach_files
    from clowder_aimage.content.gate import unchecked

    if is_get:
        if file or artifact_type or annotations:
            raise UsageError("--get cannot be combined with FILE, --type or --annotation")
        _get(reference, directory or Path())
        return
    if not file or not artifact_type:
        raise UsageError("the argument FILE is missing" if not file else "missing option --type")
    if directory is not None:
        raise UsageError("--output requires --get")
    connection = get_settings().build_client_options()
    # A publisher attaches to what has no signature yet.
    with Progress("attaching", reference) as progress, unchecked():
        descriptor, subject = attach_files(
            reference,
            file,
            connection,
            artifact_type=artifact_type,
            annotations=dict(map(parse_annotation, annotations)),
            on_event=progress.on_event,
        )
    progress.summarize("attached")
    value = {"reference": str(reference.with_digest(descriptor.digest)), **to_plain(descriptor)}
    print_result(value | {"subject": str(subject.digest)}, str(descriptor.digest))


def _get(reference: Reference, directory: Path) -> None:
    from clowder_aimage.attach import fetch_files

    with Progress("fetching", reference) as progress:
        connection = get_settings().build_client_options()
        paths = fetch_files(reference, directory, connection, on_event=progress.on_event)
    progress.summarize("fetched")
    files = [str(path) for path in paths]
    print_result({"reference": str(reference), "files": files}, files)
