"""``aimage rm``"""

from __future__ import annotations

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@click.command(short_help="Forget a name.")
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@common_options
def rm(refs: tuple[str, ...]) -> None:
    """Forget the names REF... in the store. The blobs stay until 'aimage gc' removes them."""
    from clowder_aimage.layout.layout import index_name

    chosen = settings()
    references = [Reference.parse(ref) for ref in refs]
    for reference in references:
        if chosen.layout.pins.get(index_name(reference)) is not None:
            raise UsageError(
                f"{reference} is pinned", hint=f"let it go first: aimage unpin {reference}"
            )
    for reference in references:
        chosen.layout.untag(reference)
    names = [str(reference) for reference in references]
    result({"removed": names}, "\n".join(names), as_json=chosen.as_json)
