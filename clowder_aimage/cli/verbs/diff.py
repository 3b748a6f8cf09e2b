"""The verb ``diff``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import connection_options, get_settings, verb
from clowder_aimage.cli.console.output import (
    format_count,
    format_sentence,
    format_size,
    format_table,
    print_result,
)
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.dialect import Layer
    from clowder_aimage.diff import Change, Difference, FieldChange

# Differences of each kind that are listed; --all lists all.
_LISTED = 20
# Characters of a value in a config that are shown.
_WIDTH = 60


@examples("aimage diff shapes shapes:int8", f"aimage diff --exit-code shapes {NAME}")
@verb
@stored_argument("a", None)
@stored_argument("b", None)
@click.option("--all", "lists_all", is_flag=True, help="List all differences.")
@click.option(
    "--remote",
    is_flag=True,
    is_eager=True,
    help="Read A and B from their registries, not from the store.",
)
@click.option("--exit-code", "has_code", is_flag=True, help="Exit with 1 if they differ.")
@connection_options
def diff(a: Reference, b: Reference, lists_all: bool, remote: bool, has_code: bool) -> int:
    """Show the tensors, files and fields of the config that differ between A and B.

    A and B are read from the store, else from the registry in their names. Only manifests and
    configs are read, no weights are fetched.
    """
    from clowder_aimage.diff import diff as compare

    chosen = get_settings()
    difference = compare(
        a, b, chosen.layout, chosen.build_client_options(a.registry, b.registry), remote=remote
    )
    print_result(difference.to_json(), _iter_lines(difference, None if lists_all else _LISTED))
    return 1 if has_code and not difference.is_empty else 0


def _iter_lines(difference: Difference, limit: int | None) -> Iterator[str]:
    for key, side in (("a", difference.a), ("b", difference.b)):
        digest = side.manifest.digest
        place = f"{side.dialect}, in the {side.where}"
        yield from format_table([(key, str(side.reference), digest.short, place)])
    yield ""
    for title, is_tensor in (("tensors", True), ("files", False)):
        counts = ", ".join(_iter_counts(difference, is_tensor))
        yield from format_sentence(f"{title}: {counts}")
    for title, fields in (("config", difference.config), ("annotations", difference.annotations)):
        if fields or title == "config":
            differ = "differs" if len(fields) == 1 else "differ"
            yield f"{title}: {format_count(len(fields), 'field')} {differ}"
    size, blobs = sum(difference.fetch.values()), format_count(len(difference.fetch), "blob")
    old, new = difference.a.reference, difference.b.reference
    fetched = f"{format_size(size)} in {blobs}"
    yield from format_sentence(f"pulling {new} where {old} is present fetches {fetched}")
    sections = (
        ("changed", map(_format_change, difference.changed)),
        ("added", map(_format_layer, difference.added)),
        ("removed", map(_format_layer, difference.removed)),
        ("config", map(_format_field, difference.config)),
        ("annotations", map(_format_field, difference.annotations)),
    )
    for title, lines in sections:
        yield from _iter_section(title, list(lines), limit)


def _iter_counts(difference: Difference, is_tensor: bool) -> Iterator[str]:
    """Yield counts: ``280 shared (1.2 GB), 4 changed (3 MB, were 2 MB), ...``."""
    from clowder_aimage.diff import KINDS

    for kind in KINDS:
        changes, before, after = difference.sum_changes(kind, is_tensor=is_tensor)
        text = format_size(before if kind == "removed" else after)
        if kind == "changed" and before != after:
            text += f", were {format_size(before)}"
        yield f"{len(changes)} {kind} ({text})" if changes else f"0 {kind}"


def _iter_section(title: str, rows: list[tuple[str, ...]], limit: int | None) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{title}:"
    for name, *cells in rows[:limit]:
        # Names may come from another tool.
        yield from format_table([(f"  {' '.join(name.splitlines())}", *cells)])
    if limit is not None and len(rows) > limit:
        yield f"  ... and {len(rows) - limit} more (--all lists them)"


def _format_layer(change: Change) -> tuple[str, ...]:
    bytes_ = format_size(change.after if change.b else change.before)
    return change.name, *filter(None, (_format_shape(change.b or change.a), bytes_))


def _format_change(change: Change) -> tuple[str, ...]:
    """Format a change; a value that is equal on both sides is shown once."""
    shapes, sizes = (
        (_format_shape(change.a), _format_shape(change.b)),
        (format_size(change.before), format_size(change.after)),
    )
    pairs = (new if old == new else f"{old or '-'} -> {new or '-'}" for old, new in (shapes, sizes))
    return change.name, *filter(None, pairs)


def _format_shape(layer: Layer | None) -> str:
    """Format the shape, ``BF16 16x16``; empty for a file."""
    if layer is None or layer.dtype is None:
        return ""
    return f"{layer.dtype} {'x'.join(map(str, layer.shape or ()))}".strip()


def _format_field(field: FieldChange) -> tuple[str, ...]:
    return (f"{'.'.join(field.path)}: {_format_value(field.a)} -> {_format_value(field.b)}",)


def _format_value(value: tuple[Any, ...]) -> str:
    if not value:
        return "(none)"
    text = json.dumps(value[0], ensure_ascii=False)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
