"""``aimage pin`` and ``aimage unpin``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clowder_aimage.cli.console.option import references_argument, settings, verb
from clowder_aimage.cli.console.output import result
from clowder_aimage.errors import NotFoundError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.layout import ImageLayout


@verb
@references_argument(required=False)
def pin(references: tuple[Reference, ...]) -> None:
    """Pin the names REF...: neither 'gc' nor 'rm' removes them or their content.

    Without REF, list the pinned names.
    """
    chosen = settings()
    names = [name for reference in references for name in _names(chosen.layout, reference)]
    for name in names:
        chosen.layout.pins.put(name, {}, durable=True)
    said = names if references else sorted(name for name, _ in chosen.layout.pins.items())
    result({"pinned": said}, "\n".join(said))


def _names(layout: ImageLayout, reference: Reference) -> list[str]:
    """Return a name in the store, or all names of a digest.

    Raises:
        NotFoundError: it is not there, or in a store that is only read: a pin would have no effect.
    """
    from clowder_aimage.layout.layered_store import read_only_error
    from clowder_aimage.layout.layout import index_name

    digest = layout.resolve(reference).digest
    names = [name for name, root in layout.tags() if root.digest == digest]
    if reference.tag is not None:
        names = [index_name(reference)]
    borrowed = layout.borrowed()
    ours = [name for name in names if name not in borrowed]
    if names and not ours:
        raise read_only_error(reference, borrowed[names[0]], "pin")
    return ours


@verb
@references_argument(required=True)
def unpin(references: tuple[Reference, ...]) -> None:
    """Remove the pins of the names REF...; the names stay until 'rm' or 'gc' removes them."""
    from clowder_aimage.layout.layout import index_name

    chosen = settings()
    names = [index_name(reference) for reference in references]
    for name in names:
        if chosen.layout.pins.get(name) is None:
            raise NotFoundError(f"{name} is not pinned", hint="'aimage pin' lists what is")
    for name in names:
        chosen.layout.pins.remove(name)
    result({"unpinned": names}, "\n".join(names))
