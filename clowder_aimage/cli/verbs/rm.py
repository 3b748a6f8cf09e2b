"""The verb ``rm``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import islice

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, remote_option, verb
from clowder_aimage.cli.console.output import (
    format_count,
    format_size,
    is_quiet,
    print_result,
    remark,
)
from clowder_aimage.cli.console.stored_name import resolve_unique_name, stored_arguments
from clowder_aimage.cli.console.worker_connection import connect_worker, list_models, refuse_options
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference

# Names whose manifests are read in less than about a second.
_MANY = 200


@examples("aimage rm shapes:int8")
@verb
@stored_arguments(required=True, parse=resolve_unique_name)
@click.option("--gc", "is_freed", is_flag=True, help="Also remove content that no name needs.")
@remote_option
def rm(references: tuple[Reference, ...], is_freed: bool, remote: bool) -> None:
    """Remove the names REF... from the store, or none if one of them is missing or pinned.

    The blobs stay until 'aimage gc' removes them. With --remote a worker removes the names, and
    content that nothing needs any more.
    """
    value: dict[str, object] = {"removed": [str(reference) for reference in references]}
    if remote:
        _remove_remotely(references)
    else:
        layout = get_settings().layout
        _remove(layout, references)
        if is_freed or not is_quiet():
            value |= _collect(layout, is_freed)
    print_result(value, map(str, references))


def _remove(layout: ImageLayout, references: Sequence[Reference]) -> None:
    """Remove all names, or none. Raises UsageError: one is pinned; NotFoundError."""
    from clowder_aimage.layout.layout import index_name

    # All checks are made before the first removal.
    for reference in references:
        if layout.pins.get(index_name(reference)) is not None:
            raise UsageError(f"{reference} is pinned", hint=f"unpin it: aimage unpin {reference}")
    names_by_reference = {reference: layout.find_names(reference) for reference in references}
    missing = [reference for reference in references if not names_by_reference[reference]]
    if len(missing) > 1:
        raise NotFoundError(
            f"{', '.join(map(str, missing))} not found in the store {layout.root}; "
            "nothing was removed",
            remedy="not_in_store",
        )
    for reference in missing:
        # Raises NotFoundError with the reason.
        layout.untag(reference)
    layout.remove_names(
        {name: root for names in names_by_reference.values() for name, root in names.items()}
    )


def _collect(layout: ImageLayout, is_freed: bool) -> dict[str, object]:
    """Remove unneeded content, or print its size. Raises VerificationError, StoreError."""
    from clowder_aimage.layout.gc import Collector

    if is_freed:
        done = Collector(layout).run()
        remark(f"freed {format_size(done.size)} ({format_count(done.blobs, 'blob')})")
        return {"freed": done.size}
    if sum(1 for _ in islice(layout.list_tags(), _MANY + 1)) > _MANY:
        remark("to free content that no other name needs: aimage gc")
        return {}
    # 'aimage gc' reports the error.
    with contextlib.suppress(AImageError):
        if unneeded := Collector(layout, dry_run=True).run().size:
            remark(f"{format_size(unneeded)} can be freed with: aimage gc")
    return {}


def _remove_remotely(references: Sequence[Reference]) -> None:
    """Remove all names from a worker, or none if one of them is missing."""
    refuse_options("omit --remote to remove a name from a store on this machine")
    client = connect_worker()
    stored_names = {model["name"] for model in list_models(client, "/api/tags")}
    for reference in references:
        if str(reference) not in stored_names:
            raise NotFoundError(f"{reference} not found on the worker at {client.endpoint}")
    for reference in references:
        client.ask("DELETE", "/api/delete", {"model": str(reference)})
