"""The verb ``gc``."""

from __future__ import annotations

from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, parse_with, verb
from clowder_aimage.cli.console.output import format_count, format_size, note, print_result
from clowder_aimage.content.unit import parse_size, parse_time
from clowder_aimage.layout.gc import Collection, Collector


@examples("aimage gc --dry-run", "aimage gc --max-size 200GB --keep 'team/*'")
@verb
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the names and blobs that would be removed, without removing them.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=parse_with(parse_size),
    help="Remove the least recently used names until the rest fits, such as 200GB.",
)
@click.option(
    "--max-age",
    metavar="TIME",
    callback=parse_with(parse_time),
    help="Remove names that have not been used for this long, such as 30d.",
)
@click.option("--keep", metavar="GLOB", multiple=True, help="Names to keep. May be repeated.")
@click.option(
    "--grace",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=parse_with(parse_time),
    help="Keep blobs younger than this, since another tool may be about to use them.",
)
def gc(
    dry_run: bool, max_size: int | None, max_age: float | None, keep: tuple[str, ...], grace: float
) -> None:
    """Remove blobs that no name in the store needs, and downloads that were interrupted a week ago.

    Pinned names, names that match --keep, and the content in use by a running pull, push or worker
    are kept.
    """
    done = Collector(get_settings().layout, grace=grace, dry_run=dry_run).run(
        max_age=max_age, max_size=max_size, keep=keep
    )
    if max_size is not None and done.left_size > max_size:
        text = f"{format_size(done.left_size)} kept, more than {format_size(max_size)}"
        if needed := done.left_size - done.young_size:
            text += f": {format_size(needed)} needed by names that are pinned, kept or in use"
        note(text)
    print_result(_encode_collection(done, dry_run), _format_collection(done, dry_run))


def _format_collection(done: Collection, dry_run: bool) -> list[str]:
    would = "would be " if dry_run else ""
    lines = [f"{would}removed: {removal.name} ({removal.reason})" for removal in done.forgotten]
    lines.append(f"{would}removed: {format_count(done.blobs, 'blob')}, {format_size(done.size)}")
    if done.partials:
        downloads = format_count(done.partials, "unfinished download")
        lines.append(f"{would}removed: {downloads}, {format_size(done.partial_size)}")
    if done.young:
        lines.append(
            f"kept: {format_count(done.young, 'blob')}, {format_size(done.young_size)}, newer than "
            "the grace period (--grace 0 removes them)"
        )
    return lines


def _encode_collection(done: Collection, dry_run: bool) -> dict[str, Any]:
    return {
        "dryRun": dry_run,
        "forgotten": [
            {"reference": removal.name, "reason": removal.reason} for removal in done.forgotten
        ],
        "blobs": done.blobs,
        "size": done.size,
        "partials": {"count": done.partials, "size": done.partial_size},
        "young": {"blobs": done.young, "size": done.young_size},
        "left": done.left_size,
    }
