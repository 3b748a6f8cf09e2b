"""The verb ``ls``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.option import complete_name, settings, verb
from clowder_aimage.cli.console.output import (
    is_quiet,
    plural,
    remark,
    result,
    size,
    table,
    wants_json,
)
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

_TITLES = ("NAME", "FAMILY", "TYPE", "SIZE", "CREATED", "DIGEST")
_UNITS = (
    *((365 * 86400, "year"), (30 * 86400, "month"), (7 * 86400, "week"), (86400, "day")),
    *((3600, "hour"), (60, "minute"), (1, "second")),
)


@verb
@click.argument("patterns", metavar="[PATTERN...]", nargs=-1, shell_complete=complete_name)
@remote_option
def ls(patterns: tuple[str, ...], remote: bool) -> None:
    """List the names in the store, or those that match a PATTERN such as 'tiny*'.

    A PATTERN matches the name with its tag or without. CREATED is the recorded time of creation,
    else that of the arrival in the store. With -q only names are printed. With --remote the names
    in a worker's store are listed.
    """
    found = _remote_rows() if remote else _rows(settings().layout, patterns)
    rows = sorted(
        (row for row in found if _matches(str(row["reference"]), patterns)),
        key=lambda row: str(row["reference"]),
    )
    text = "\n".join(row["reference"] for row in rows)
    if not is_quiet():
        now = time.time()
        text = table([_TITLES, *(_cells(row, now) for row in rows)])
    if rows or not is_quiet() or wants_json():
        result(rows, text)
    if rows:
        return
    if patterns:
        remark(f"no names match {' '.join(patterns)}")
    elif not remote:
        root = settings().stores[0]
        text = "no names in the store" if root.exists() else "no store at"
        remark(f"{text} {root}; 'aimage create' and 'aimage pull' add names")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    head, slash, last = name.rpartition("/")
    spelt = {name, f"{head}{slash}{last.partition('@')[0].partition(':')[0]}"}
    return not patterns or any(fnmatchcase(one, each) for one in spelt for each in patterns)


def _remote_rows() -> Iterator[dict[str, Any]]:
    refuse_options("omit --remote to list a store on this machine")
    for model in models(worker(), "/api/tags"):
        row = {"reference": model["name"], "digest": model["digest"], "size": model["size"]}
        row |= {"family": detail_of(model, "family")}
        row |= {"type": detail_of(model, "quantization_level")}
        yield row | {"created": None, "added": model.get("modified_at")}


def _rows(layout: ImageLayout, patterns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name, descriptor in layout.tags():
        row: dict[str, Any] = {"reference": name, "digest": str(descriptor.digest)}
        if _matches(name, patterns):
            row |= summary(layout.root, layout, descriptor) | {"added": None}
            with contextlib.suppress(OSError):
                at = int(Path(layout.place(descriptor)).stat().st_mtime)
                row["added"] = datetime.fromtimestamp(at, UTC).isoformat()
            yield row | {"partial": True} if is_partial(layout, descriptor) else row


def _cells(row: dict[str, Any], now: float) -> tuple[str, ...]:
    length = "-" if row["size"] is None else size(row["size"])
    if "partial" in row:
        length += " (partial)"
    created = _ago(row["created"], now) or _ago(row["added"], now) or "-"
    kind, name = row["family"] or "-", row["type"] or "-"
    return row["reference"], kind, name, length, created, row["digest"][7:19]


def _ago(text: object, now: float) -> str | None:
    """Format the time since ``text``; None if it is not a time."""
    with contextlib.suppress(ValueError, OverflowError):
        seconds = max(0.0, now - datetime.fromisoformat(str(text)).timestamp())
        for length, unit in _UNITS:
            if seconds >= length:
                return f"{plural(int(seconds // length), unit)} ago"
        return "now"
    return None
