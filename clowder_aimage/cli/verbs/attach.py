"""``aimage attach``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.option import (
    reference_argument,
    settings,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import plain, result
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
    help="The type of the artifact.",
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
    progress.summarize("attached")
    value = {"reference": str(reference.with_digest(descriptor.digest)), **plain(descriptor)}
    result(value | {"subject": str(subject.digest)}, str(descriptor.digest))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"invalid --annotation {text!r}: expected KEY=VALUE")
    return key, value
