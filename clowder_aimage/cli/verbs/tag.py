"""The verb ``tag``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import settings, tag_reference, verb
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.oci import Reference, mediatype


@verb
@click.argument("src", type=Reference.parse)
@click.argument("dst", type=tag_reference)
def tag(src: Reference, dst: Reference) -> None:
    """Give the AImage SRC the name DST as well. No blob is copied."""
    chosen = settings()
    chosen.layout.resolve(src)  # before a missing store is made
    with chosen.layout.keep():
        descriptor = chosen.layout.resolve(src)
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        chosen.layout.tag(descriptor, dst, is_partial=is_partial)
    value = {"reference": str(dst), **plain(descriptor)}
    result(value, str(descriptor.digest))
