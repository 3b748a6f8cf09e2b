"""``aimage pull``"""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.option import (
    common_options,
    connection,
    connection_options,
    jobs_option,
    settings,
)
from clowder_aimage.cli.output import note, plain, result
from clowder_aimage.cli.progress import Progress
from clowder_aimage.oci import Reference


@click.command(short_help="Fetch an AImage from the registry in its name.")
@click.argument("ref")
@jobs_option
@connection_options
@common_options
def pull(ref: str, jobs: int, plain_http: bool, insecure: bool, ca_file: Path | None) -> None:
    """Fetch the AImage REF from the registry in its name; print its digest.

    Every byte is verified before it gets its name in the store. Blobs that are there already are
    not fetched.
    """
    from clowder_aimage.pull import pull as pull_aimage

    chosen = settings()
    reference = Reference.parse(ref)
    with Progress(f"pulling {reference}", quiet=chosen.quiet) as progress:
        descriptor = pull_aimage(
            reference,
            chosen.layout,
            connection(plain_http, insecure, ca_file, jobs),
            jobs=jobs,
            on_event=progress.on_event,
        )
    if not chosen.quiet:
        note(progress.summary("pulled"))
    value = {"reference": str(reference), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)
