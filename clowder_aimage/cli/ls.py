"""``aimage ls``"""

from __future__ import annotations

from typing import Any

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result, size, table
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.absence import is_partial
from clowder_aimage.layout.listing import summary
from clowder_aimage.oci import Descriptor


@click.command(short_help="List the AImages in the store.")
@common_options
def ls() -> None:
    """List the names in the store, what they name, and how large that is."""
    chosen = settings()
    rows = sorted(
        (_row(chosen.layout, name, descriptor) for name, descriptor in chosen.layout.tags()),
        key=lambda row: str(row["reference"]),
    )
    cells = [("NAME", "DIGEST", "SIZE", "KIND")] + [
        (row["reference"], row["digest"][7:19], _size(row), _kind(row)) for row in rows
    ]
    result(rows, table(cells), as_json=chosen.as_json)


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
