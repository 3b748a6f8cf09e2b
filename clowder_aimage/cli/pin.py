"""``aimage pin`` and ``aimage unpin``"""

from __future__ import annotations

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result
from clowder_aimage.errors import NotFoundError
from clowder_aimage.oci import Reference


@click.command(short_help="Let no collection take a name.")
@click.argument("refs", metavar="[REF...]", nargs=-1)
@common_options
def pin(refs: tuple[str, ...]) -> None:
    """Keep the names REF... and what they name: neither 'gc' nor 'rm' takes them.

    Without REF, list the names that are pinned.
    """
    from clowder_aimage.layout.layout import index_name

    chosen = settings()
    names = [Reference.parse(ref) for ref in refs]
    for reference in names:
        chosen.layout.resolve(reference)
    for reference in names:
        chosen.layout.pins.put(index_name(reference), {}, durable=True)
    pinned = sorted(name for name, _ in chosen.layout.pins.items())
    said = [index_name(reference) for reference in names] if refs else pinned
    result({"pinned": said}, "\n".join(said), as_json=chosen.as_json)


@click.command(short_help="Let a pinned name go.")
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@common_options
def unpin(refs: tuple[str, ...]) -> None:
    """Pin the names REF... no longer. They stay until 'rm' or 'gc' takes them."""
    from clowder_aimage.layout.layout import index_name

    chosen = settings()
    names = [index_name(Reference.parse(ref)) for ref in refs]
    for name in names:
        if chosen.layout.pins.get(name) is None:
            raise NotFoundError(f"{name} is not pinned", hint="'aimage pin' lists what is")
    for name in names:
        chosen.layout.pins.remove(name)
    result({"unpinned": names}, "\n".join(names), as_json=chosen.as_json)
