"""The verb ``copy``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.complete import complete_name
from clowder_aimage.cli.console.option import settings, transfer_options, verb
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.oci import Reference


@verb
@click.argument("src", type=Reference.parse, shell_complete=complete_name)
@click.argument("dst", type=Reference.parse)
@transfer_options
def copy(src: Reference, dst: Reference) -> None:
    """Copy SRC from its registry to the registry in DST; print its digest.

    The manifest keeps its bytes. Blobs are not stored on disk on the way. Blobs that DST already
    has are not sent; within one registry blobs are mounted.
    """
    from clowder_aimage.push import transfer

    with Progress("copying", src) as progress:
        connection = settings().connection()
        descriptor = transfer(src, dst, connection, on_event=progress.on_event)
    progress.summarize("copied")
    value = {"source": str(src), "reference": str(dst), **plain(descriptor)}
    result(value, str(descriptor.digest))
