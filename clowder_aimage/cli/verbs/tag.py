"""``aimage tag``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import complete_name, settings, tag_reference, verb
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.oci import Reference, mediatype


@verb
@click.argument("src", type=Reference.parse, shell_complete=complete_name)
@click.argument("dst", type=tag_reference)
def tag(src: Reference, dst: Reference) -> None:
    """Give the AImage SRC the name DST as well. No blob is copied."""
    layout = settings().layout
    layout.resolve(src)  # before a missing store is created
    with layout.keep():
        descriptor = layout.resolve(src)
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        layout.tag(descriptor, dst, is_partial=is_partial)
    result({"reference": str(dst), **plain(descriptor)}, str(descriptor.digest))
