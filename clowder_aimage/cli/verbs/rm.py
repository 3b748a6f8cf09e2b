"""The verb ``rm``."""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.cli.console.option import references_argument, settings, verb
from clowder_aimage.cli.console.output import result
from clowder_aimage.cli.console.remote_worker import models, refuse_options, remote_option, worker
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Reference


@verb
@references_argument(required=True)
@remote_option
def rm(references: tuple[Reference, ...], remote: bool) -> None:
    """Remove the names REF... from the store. The blobs stay until 'aimage gc' removes them.

    With --remote a worker removes the names, and content that nothing needs any more.
    """
    if remote:
        _remove_remotely(references)
    else:
        _remove(references)
    names = [str(reference) for reference in references]
    result({"removed": names}, "\n".join(names))


def _remove(references: Sequence[Reference]) -> None:
    from clowder_aimage.layout.layout import index_name

    layout = settings().layout
    for reference in references:
        if layout.pins.get(index_name(reference)) is not None:
            raise UsageError(f"{reference} is pinned", hint=f"unpin it: aimage unpin {reference}")
    for reference in references:
        layout.untag(reference)


def _remove_remotely(references: Sequence[Reference]) -> None:
    """Remove all names from a worker, or none if one of them is missing."""
    refuse_options("omit --remote to remove a name from a store on this machine")
    client = worker()
    known = {model["name"] for model in models(client, "/api/tags")}
    for reference in references:
        if str(reference) not in known:
            raise NotFoundError(f"{reference} not found on the worker at {client.endpoint}")
    for reference in references:
        client.ask("DELETE", "/api/delete", {"model": str(reference)})
