"""``aimage ls``"""

from __future__ import annotations

from typing import Any

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result, size, table
from clowder_aimage.dialect import detect
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.aimage import read_manifest
from clowder_aimage.oci import Descriptor, mediatype


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
        (row["reference"], row["digest"][7:19], _size(row), row["kind"]) for row in rows
    ]
    result(rows, table(cells), as_json=chosen.as_json)


def _row(layout: ImageLayout, name: str, descriptor: Descriptor) -> dict[str, Any]:
    row: dict[str, Any] = {
        "reference": name,
        "digest": str(descriptor.digest),
        "size": None,
        "kind": "?",
    }
    if descriptor.media_type in mediatype.INDEXES:
        return row | {"kind": "index"}
    try:
        manifest = read_manifest(layout, descriptor)
        row["size"] = sum(blob.size for blob in manifest.children)
        row["kind"] = detect(manifest).name
    except AImageError:
        pass  # 'aimage show' says what is wrong with it; the others are listed all the same
    return row


def _size(row: dict[str, Any]) -> str:
    return "?" if row["size"] is None else size(row["size"])
