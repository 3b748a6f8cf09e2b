"""The verb ``tag``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import common_options, settings
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference, mediatype


@click.command()
@click.argument("src")
@click.argument("dst")
@common_options
def tag(src: str, dst: str) -> None:
    """Let DST name what SRC names. No blob is copied."""
    chosen = settings()
    source, target = Reference.parse(src), Reference.parse(dst)
    if target.digest is not None:
        raise UsageError(f"{dst} names a digest: a tag is needed", hint="leave the @... away")
    chosen.layout.resolve(source)  # before a store is made just to look into it
    with chosen.layout.keep():
        descriptor = chosen.layout.resolve(source)
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        chosen.layout.tag(descriptor, target, is_partial=is_partial)
    value = {"reference": str(target), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)
