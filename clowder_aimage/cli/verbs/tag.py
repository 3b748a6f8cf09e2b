"""The verb ``tag``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import common_options, settings, tag_reference
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.oci import Reference, mediatype


@click.command()
@click.argument("src")
@click.argument("dst")
@common_options
def tag(src: str, dst: str) -> None:
    """Give the AImage SRC the name DST as well. No blob is copied."""
    chosen = settings()
    source, target = Reference.parse(src), tag_reference(dst)
    chosen.layout.resolve(source)  # before a missing store is made
    with chosen.layout.keep():
        descriptor = chosen.layout.resolve(source)
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        chosen.layout.tag(descriptor, target, is_partial=is_partial)
    value = {"reference": str(target), **plain(descriptor)}
    result(value, str(descriptor.digest))
