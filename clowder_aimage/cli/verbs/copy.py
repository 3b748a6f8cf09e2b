"""The verb ``copy``."""

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
from clowder_aimage.oci import Reference


@click.command()
@click.argument("src")
@click.argument("dst")
@jobs_option
@connection_options
@common_options
def copy(
    src: str, dst: str, jobs: int | None, plain_http: bool, insecure: bool, ca_file: Path | None
) -> None:
    """Copy what SRC names in a registry to where DST says; print its digest.

    The bytes of the manifest stay as they are. Blobs pass through without a stop on disk; those
    that DST has already are not sent, and within one registry they need not be sent at all.
    """
    from clowder_aimage.transfer import transfer

    chosen = settings()
    source, target = Reference.parse(src), Reference.parse(dst)
    with Progress("copying", source, quiet=chosen.quiet) as progress:
        descriptor = transfer(
            source,
            target,
            connection(plain_http, insecure, ca_file, jobs),
            on_event=progress.on_event,
        )
    progress.say("copied")
    value = {"source": str(source), "reference": str(target), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)
