"""Advice on the repository of an adapter: a registry lists it beside its base only there."""

from __future__ import annotations

import contextlib

from clowder_aimage.cli.console.option import get_settings, parse_reference
from clowder_aimage.cli.console.output import remark
from clowder_aimage.errors import AImageError
from clowder_aimage.oci import Reference


def advise_repository(reference: Reference, *, is_pushed: bool) -> None:
    """Print the repository where an adapter in the store is listed with its base.

    Referrers are those of one repository (OCI distribution-spec, "Listing Referrers"). Nothing is
    printed for another AImage, or if ``reference`` is in that repository.
    """
    with contextlib.suppress(AImageError):
        places = _list_repositories(reference)
        if places is None or reference.name in places:
            return
        if places:
            remark(f"to be listed with its base, push it to {places[0]}")
        elif not is_pushed:
            remark("to be listed with its base, push it to the repository of its base")


def _list_repositories(reference: Reference) -> list[str] | None:
    """Return the repositories of registries that the base of an adapter has in its names.

    None stands for another AImage. Raises AImageError.
    """
    from clowder_aimage.layout.stored_aimage import read_aimage

    layout = get_settings().layout
    aimage = read_aimage(layout, reference).aimage
    if aimage.subject is None or aimage.properties.get("format") != "lora":
        return None
    places = set()
    for name, descriptor in layout.iter_entries():
        if descriptor.digest == aimage.subject.digest:
            # The digest may have no name, or a name of another tool.
            with contextlib.suppress(AImageError):
                base = parse_reference(name)
                places |= {base.name} if base.registry else set()
    return sorted(places)
