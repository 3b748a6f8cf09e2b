"""The verb ``attach``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.option import (
    common_options,
    connection,
    connection_options,
    jobs_option,
    settings,
)
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@click.command()
@click.argument("ref")
@click.argument(
    "file",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--type",
    "artifact_type",
    metavar="MEDIA/TYPE",
    required=True,
    help="What the files are: the artifact type.",
)
@click.option(
    "--annotation",
    "annotations",
    metavar="KEY=VALUE",
    multiple=True,
    help="Say something about them; may be given several times.",
)
@jobs_option
@connection_options
@common_options
def attach(
    ref: str,
    file: tuple[Path, ...],
    artifact_type: str,
    annotations: tuple[str, ...],
    jobs: int | None,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
) -> None:
    """Push FILEs as an artifact about what REF names in its registry; print the artifact's digest.

    It goes to the repository of REF, which stays as it is. 'aimage referrers' finds it again.
    """
    from clowder_aimage.attach import attach as attach_files

    chosen = settings()
    reference = Reference.parse(ref)
    with Progress("attaching", reference, quiet=chosen.quiet) as progress:
        descriptor, subject = attach_files(
            reference,
            file,
            connection(plain_http, insecure, ca_file, jobs),
            artifact_type=artifact_type,
            annotations=dict(map(_pair, annotations)),
            on_event=progress.on_event,
        )
    progress.say("attached")
    name = str(reference.with_digest(descriptor.digest))
    value = {"reference": name, **plain(descriptor), "subject": str(subject.digest)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--annotation {text!r} is not KEY=VALUE")
    return key, value
