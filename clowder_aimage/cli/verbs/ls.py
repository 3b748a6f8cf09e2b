"""The verb ``ls``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clowder_aimage.cli.console.option import settings, verb
from clowder_aimage.cli.console.output import remark, result, size, table
from clowder_aimage.cli.console.remote_worker import (
    detail_of,
    models,
    refuse_options,
    remote_option,
    worker,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import is_partial
from clowder_aimage.layout.metadata import summary


@verb
@remote_option
def ls(remote: bool) -> None:
    """List the names in the store, with digest, size and kind.

    With --remote the names in a worker's store are listed.
    """
    found = _remote_rows() if remote else _rows(settings().layout)
    rows = sorted(found, key=lambda row: str(row["reference"]))
    cells = [("NAME", "DIGEST", "SIZE", "FAMILY" if remote else "KIND")] + [
        (row["reference"], row["digest"][7:19], _size(row), _kind(row)) for row in rows
    ]
    result(rows, table(cells))
    if not rows and not remote:
        root = settings().stores[0]
        text = "no names in the store" if root.exists() else "no store at"
        remark(f"{text} {root}; 'aimage create' and 'aimage pull' add names")


def _remote_rows() -> Iterator[dict[str, Any]]:
    refuse_options("omit --remote to list a store on this machine")
    for model in models(worker(), "/api/tags"):
        row = {"reference": model["name"], "digest": model["digest"], "size": model["size"]}
        yield row | {"family": detail_of(model, "family")}


def _rows(layout: ImageLayout) -> Iterator[dict[str, Any]]:
    for name, descriptor in layout.tags():
        row = {"reference": name, "digest": str(descriptor.digest)}
        row |= summary(layout.root, layout, descriptor)
        yield row | {"partial": True} if is_partial(layout, descriptor) else row


def _kind(row: dict[str, Any]) -> str:
    if "family" in row:
        return row["family"] or "?"
    return f"{row['kind']} (partial)" if "partial" in row else str(row["kind"])


def _size(row: dict[str, Any]) -> str:
    return "?" if row["size"] is None else size(row["size"])
