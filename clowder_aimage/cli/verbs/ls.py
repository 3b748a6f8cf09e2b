"""The verb ``ls``."""

from __future__ import annotations

from typing import Any

import click

from clowder_aimage.cli.console.option import common_options, settings
from clowder_aimage.cli.console.output import result, size, table
from clowder_aimage.cli.console.remote_worker import (
    digest_of,
    family_of,
    models,
    refuse_options,
    remote_option,
    worker,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import is_partial
from clowder_aimage.layout.metadata import summary
from clowder_aimage.oci import Descriptor


@click.command()
@remote_option
@common_options
def ls(remote: bool) -> None:
    """List the names in the store, what they name, and how large that is.

    With --remote they are those in a worker's store.
    """
    if remote:
        _list_remotely()
        return
    chosen = settings()
    rows = sorted(
        (_row(chosen.layout, name, descriptor) for name, descriptor in chosen.layout.tags()),
        key=lambda row: str(row["reference"]),
    )
    cells = [("NAME", "DIGEST", "SIZE", "KIND")] + [
        (row["reference"], row["digest"][7:19], _size(row), _kind(row)) for row in rows
    ]
    result(rows, table(cells), as_json=chosen.as_json)


def _list_remotely() -> None:
    """List what a worker has in its store."""
    refuse_options("leave out --remote to list a store of this machine")
    rows = [
        {
            "reference": model["name"],
            "digest": digest_of(model),
            "size": model["size"],
            "family": family_of(model),
        }
        for model in models(worker(), "/api/tags")
    ]
    rows.sort(key=lambda row: str(row["reference"]))
    cells = [("NAME", "DIGEST", "SIZE", "FAMILY")] + [
        (row["reference"], row["digest"][7:19], size(row["size"]), row["family"] or "?")
        for row in rows
    ]
    result(rows, table(cells), as_json=settings().as_json)


def _row(layout: ImageLayout, name: str, descriptor: Descriptor) -> dict[str, Any]:
    row = {
        "reference": name,
        "digest": str(descriptor.digest),
        **summary(layout.root, layout, descriptor),
    }
    return row | {"partial": True} if is_partial(layout, descriptor) else row


def _kind(row: dict[str, Any]) -> str:
    return f"{row['kind']} (partial)" if "partial" in row else row["kind"]


def _size(row: dict[str, Any]) -> str:
    return "?" if row["size"] is None else size(row["size"])
