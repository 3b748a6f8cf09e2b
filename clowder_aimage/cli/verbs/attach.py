"""Attached artifacts: ``aimage attach`` and ``aimage referrers``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.option import (
    connection_options,
    reference_argument,
    settings,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import plain, result, size, table
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@verb
@reference_argument
@click.argument(
    "file", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--type",
    "artifact_type",
    metavar="MEDIA/TYPE",
    required=True,
    help="The artifact type: what the files are.",
)
@click.option(
    "--annotation",
    "annotations",
    metavar="KEY=VALUE",
    multiple=True,
    help="Annotate the artifact. May be repeated.",
)
@transfer_options
def attach(
    reference: Reference, file: tuple[Path, ...], artifact_type: str, annotations: tuple[str, ...]
) -> None:
    """Push FILEs as an artifact with the subject REF in its registry; print its digest.

    The artifact goes to the repository of REF. 'aimage referrers' lists it.
    """
    from clowder_aimage.attach import attach as attach_files

    connection = settings().connection()
    with Progress("attaching", reference) as progress:
        descriptor, subject = attach_files(
            reference,
            file,
            connection,
            artifact_type=artifact_type,
            annotations=dict(map(_pair, annotations)),
            on_event=progress.on_event,
        )
    progress.say("attached")
    value = {"reference": str(reference.with_digest(descriptor.digest)), **plain(descriptor)}
    result(value | {"subject": str(subject.digest)}, str(descriptor.digest))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--annotation {text!r} is not KEY=VALUE")
    return key, value


@verb
@reference_argument
@click.option(
    "--type", "artifact_type", metavar="MEDIA/TYPE", default="", help="Only artifacts of this type."
)
@connection_options
def referrers(reference: Reference, artifact_type: str) -> None:
    """List the artifacts whose subject is REF in its registry. There may be none."""
    from clowder_aimage.registry import Repository

    with Repository(reference, settings().connection()) as repository:
        subject = reference.digest or repository.resolve(reference).digest
        found = repository.referrers(subject, artifact_type)
    rows = [{"reference": str(reference.with_digest(one.digest)), **one.to_json()} for one in found]
    cells = [("DIGEST", "TYPE", "SIZE")] + [
        (row["digest"], row.get("artifactType") or "?", size(row["size"])) for row in rows
    ]
    result(rows, table(cells))
