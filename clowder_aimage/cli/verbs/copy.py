"""The verb ``copy``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import common_options, settings, transfer_options
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.oci import Reference


@click.command()
@click.argument("src")
@click.argument("dst")
@transfer_options
@common_options
def copy(src: str, dst: str) -> None:
    """Copy SRC from its registry to the registry in DST; print its digest.

    The manifest keeps its bytes. Blobs are not stored on disk on the way. Blobs that DST already
    has are not sent; within one registry blobs are mounted.
    """
    from clowder_aimage.transfer import transfer

    source, target = Reference.parse(src), Reference.parse(dst)
    with Progress("copying", source) as progress:
        connection = settings().connection()
        descriptor = transfer(source, target, connection, on_event=progress.on_event)
    progress.say("copied")
    value = {"source": str(source), "reference": str(target), **plain(descriptor)}
    result(value, str(descriptor.digest))
