"""``aimage pin`` and ``aimage unpin``."""

from __future__ import annotations

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.stored_name import resolve_unique_name, stored_arguments
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layered_store import read_only_error
from clowder_aimage.layout.layout import index_name
from clowder_aimage.oci import Reference


@examples("aimage pin shapes")
@verb
@stored_arguments(required=False, parse=resolve_unique_name)
def pin(references: tuple[Reference, ...]) -> None:
    """Pin the names REF...: neither 'gc' nor 'rm' removes them or their content.

    Without REF, list the pinned names.
    """
    layout = get_settings().layout
    names = [name for reference in references for name in _resolve_names(layout, reference)]
    for name in names:
        layout.pin(name)
    listed = names if references else sorted(name for name, _ in layout.pins.iter_items())
    print_result({"pinned": listed}, listed)


def _resolve_names(layout: ImageLayout, reference: Reference) -> list[str]:
    """Return a name in the store, or all names of a digest.

    Raises:
        NotFoundError: it is not there, or in a store that is only read: a pin would have no effect.
    """
    digest = layout.resolve(reference).digest
    names = [name for name, root in layout.list_tags() if root.digest == digest]
    if reference.tag is not None:
        names = [index_name(reference)]
    borrowed = layout.read_only_names()
    ours = [name for name in names if name not in borrowed]
    if names and not ours:
        raise read_only_error(reference, borrowed[names[0]], "pin")
    return ours


@examples("aimage unpin shapes")
@verb
@stored_arguments(required=True, parse=resolve_unique_name)
def unpin(references: tuple[Reference, ...]) -> None:
    """Remove the pins of the names REF...; the names stay until 'rm' or 'gc' removes them."""
    layout = get_settings().layout
    names = [index_name(reference) for reference in references]
    for name in names:
        # All checks are made before the first removal.
        if layout.pins.get(name) is None:
            raise NotFoundError(f"{name} is not pinned", hint="'aimage pin' lists the pinned names")
    for name in names:
        layout.unpin(name)
    print_result({"unpinned": names}, names)
