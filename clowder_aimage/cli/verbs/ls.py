"""The verb ``ls``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    complete_name,
    get_settings,
    parse_with,
    remote_option,
    verb,
)
from clowder_aimage.cli.console.output import (
    build_table,
    format_count,
    format_size,
    is_quiet,
    print_result,
    remark,
    wants_json,
    wants_value,
)
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import is_partial
from clowder_aimage.layout.summary import SummaryReader
from clowder_aimage.oci import Descriptor

_FILTERED = ("reference", "family", "type", "kind", "partial")
_TITLES = ("NAME", "FAMILY", "TYPE", "SIZE", "CREATED", "DIGEST")
# On narrow terminals these are left out first.
_OPTIONAL = ("FAMILY", "CREATED", "TYPE")
_UNITS = (
    *((365 * 86400, "year"), (30 * 86400, "month"), (7 * 86400, "week"), (86400, "day")),
    *((3600, "hour"), (60, "minute"), (1, "second")),
)


def _parse_filters(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the patterns of each field, from FIELD=PATTERN. Raises ValueError."""
    patterns: dict[str, tuple[str, ...]] = {}
    for text in texts:
        field, equals, pattern = text.partition("=")
        if not equals or field not in _FILTERED:
            raise ValueError(f"{text!r} is not FIELD=PATTERN with one of {', '.join(_FILTERED)}")
        patterns[field] = (*patterns.get(field, ()), pattern)
    return patterns


@examples("aimage ls", "aimage ls --filter family=z-image", "aimage ls --remote")
@verb
@click.argument("patterns", metavar="[PATTERN...]", nargs=-1, shell_complete=complete_name)
@click.option(
    "-f",
    "--filter",
    "filters",
    multiple=True,
    metavar="FIELD=PATTERN",
    callback=parse_with(_parse_filters),
    help=f"List only names of which a field matches: {', '.join(_FILTERED)}. May be repeated.",
)
@click.option("--no-trunc", is_flag=True, help="Show whole names and digests.")
@remote_option
def ls(
    patterns: tuple[str, ...],
    filters: Mapping[str, tuple[str, ...]],
    no_trunc: bool,
    remote: bool,
) -> None:
    """List the names in the store, or those that match a PATTERN such as 'tiny*'.

    A PATTERN matches the name with its tag or without. Several filters of one field are
    alternatives. CREATED is the recorded time of creation, else that of the arrival in the store.
    With -q only names are printed. With --remote the names in a worker's store are listed. On a
    terminal, long names are shortened, and a narrow one shows fewer columns.
    """
    entries = _iter_remote_rows() if remote else _iter_rows(get_settings().layout, patterns)
    rows = sorted(
        (
            row
            for row in entries
            if (not remote or _matches(str(row["reference"]), patterns)) and _passes(row, filters)
        ),
        key=lambda row: str(row["reference"]),
    )
    lines = [row["reference"] for row in rows]
    if not is_quiet():
        timestamp = time.time()
        rows, lines = build_table(
            _TITLES,
            rows,
            lambda row: _format_cells(row, timestamp, is_whole=no_trunc),
            _OPTIONAL,
            is_whole=no_trunc,
        )
    if rows or not is_quiet() or wants_json():
        print_result(rows, lines)
    if rows:
        return
    if patterns or filters:
        fields = (f"{field}={text}" for field, texts in filters.items() for text in texts)
        remark(f"no names match {' '.join([*patterns, *fields])}")
    elif not remote:
        root = get_settings().stores[0]
        text = "no names in the store" if root.exists() else "no store at"
        remark(f"{text} {root}; 'aimage create' and 'aimage pull' add names")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return True
    head, slash, component = name.rpartition("/")
    spelt = {name, f"{head}{slash}{component.partition('@')[0].partition(':')[0]}"}
    return any(fnmatchcase(spelling, pattern) for spelling in spelt for pattern in patterns)


def _passes(row: dict[str, Any], filters: Mapping[str, tuple[str, ...]]) -> bool:
    """Return True if one pattern of each filtered field matches; only names have a case."""

    def passes(field: str, patterns: tuple[str, ...]) -> bool:
        if field == "reference":
            return _matches(str(row[field]), patterns)
        text = str(row.get(field) or ("false" if field == "partial" else "")).lower()
        return any(fnmatchcase(text, pattern.lower()) for pattern in patterns)

    return all(passes(field, patterns) for field, patterns in filters.items())


def _iter_remote_rows() -> Iterator[dict[str, Any]]:
    from clowder_aimage.cli.console.worker_connection import (
        connect_worker,
        get_detail,
        list_models,
        refuse_options,
    )

    hint = "omit --remote to list a store on this machine"
    refuse_options(hint, exclude=("filters", "no_trunc"))
    for model in list_models(connect_worker(), "/api/tags"):
        row = {"reference": model["name"], "digest": model["digest"], "size": model["size"]}
        row |= {"family": get_detail(model, "family")}
        row |= {"type": get_detail(model, "quantization_level")}
        yield row | {"created": None, "added": model.get("modified_at")}


def _iter_rows(layout: ImageLayout, patterns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    has_capabilities = wants_value()
    with SummaryReader(layout, layout.root) as summaries:
        for name, descriptor in layout.list_tags():
            if not _matches(name, patterns):
                continue
            row: dict[str, Any] = {"reference": name, "digest": str(descriptor.digest)}
            row |= summaries.read(descriptor) | {"added": None}
            if (stored_at := layout.find_write_time(descriptor)) is not None:
                row["added"] = datetime.fromtimestamp(int(stored_at), UTC).isoformat()
            if has_capabilities:
                row["capabilities"] = _list_capabilities(layout, descriptor)
            yield row | {"partial": True} if is_partial(layout, descriptor) else row


def _list_capabilities(layout: ImageLayout, descriptor: Descriptor) -> list[str]:
    """Return the capabilities of a model here; none if it is not a readable AImage."""
    from clowder_aimage.layout.stored_aimage import interpret, read_manifest
    from clowder_aimage.model.stored_ability import find_ability

    with contextlib.suppress(AImageError):
        stored = interpret(layout, descriptor, read_manifest(layout, descriptor))
        return [*find_ability(layout, descriptor.digest, stored.aimage).list_capabilities()]
    return []


def _format_cells(row: dict[str, Any], timestamp: float, *, is_whole: bool) -> tuple[str, ...]:
    length = "-" if row["size"] is None else format_size(row["size"])
    if "partial" in row:
        length += " (partial)"
    created = _format_age(row["created"], timestamp) or _format_age(row["added"], timestamp) or "-"
    kind, name = row["family"] or "-", row["type"] or "-"
    digest = row["digest"] if is_whole else row["digest"][7:19]
    return row["reference"], kind, name, length, created, digest


def _format_age(text: object, timestamp: float) -> str | None:
    """Format the time since ``text``; None if it is not a time."""
    with contextlib.suppress(ValueError, OverflowError):
        seconds = max(0.0, timestamp - datetime.fromisoformat(str(text)).timestamp())
        for length, unit in _UNITS:
            if seconds >= length:
                return f"{format_count(int(seconds // length), unit)} ago"
        return "now"
    return None
