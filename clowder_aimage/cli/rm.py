"""``aimage rm``"""

from __future__ import annotations

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result
from clowder_aimage.oci import Reference


@click.command(short_help="Forget a name.")
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@common_options
def rm(refs: tuple[str, ...]) -> None:
    """Forget the names REF... in the store. The blobs stay."""
    chosen = settings()
    references = [Reference.parse(ref) for ref in refs]
    for reference in references:
        chosen.layout.untag(reference)
    names = [str(reference) for reference in references]
    result({"removed": names}, "\n".join(names), as_json=chosen.as_json)
