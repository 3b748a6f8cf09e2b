"""``aimage df``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import format_count, format_fields, format_size
from clowder_aimage.cli.console.store_limit import WORDS, describe
from clowder_aimage.cli.console.watch import Reading, show, watch_option
from clowder_aimage.content.file_system import collect_limits
from clowder_aimage.content.mount import find_mount
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.limit import find_limits
from clowder_aimage.usage import DiskUsage, measure_disk_usage


@examples("aimage df")
@verb
@watch_option
def df(watch: float | None) -> None:
    """Show the size of the store, the part that no name needs, the free space and the file system.

    Several stores are shown one by one.
    """
    show(_read, watch)


def _read() -> Reading:
    roots = get_settings().stores
    # The table shows what is missing
    with collect_limits():
        usages = [measure_disk_usage(ImageLayout(root)) for root in roots]
    values = [_encode_usage(usage) | _encode_file_system(usage.root) for usage in usages]
    tables = [
        ["", *format_fields([*_list_facts(usage), *_list_file_system(value["fileSystem"])])]
        for usage, value in zip(usages, values, strict=True)
    ]
    return Reading(values, [line for lines in tables for line in lines][1:], _list_charts(usages))


def _list_charts(usages: list[DiskUsage]) -> dict[str, tuple[float | None, str]]:
    size = sum(usage.allocated for usage in usages)
    charts: dict[str, tuple[float | None, str]] = {"on disk": (size, format_size(size))}
    free = [usage.free for usage in usages if usage.free is not None]
    return charts | ({"free": (min(free), format_size(min(free)))} if free else {})


def _encode_file_system(root: Path) -> dict[str, Any]:
    mount, limits = find_mount(root), find_limits(root)
    return {
        "fileSystem": {
            "type": mount.type or None,
            "network": mount.is_network,
            # null if the store is missing or cannot be written
            "limits": None if limits is None else sorted(limits),
        }
    }


def _list_file_system(value: dict[str, Any]) -> list[tuple[str, str]]:
    kind = (value["type"] or "unknown") + (", of a network" if value["network"] else "")
    limits = value["limits"] or ()
    return [
        ("file system", kind),
        *(("", describe([limit])) for limit in WORDS if limit in limits),
    ]


def _list_facts(usage: DiskUsage) -> list[tuple[str, str]]:
    return [
        ("store", str(usage.root)),
        ("names", str(usage.names)),
        ("blobs", f"{format_count(usage.blobs, 'blob')}, {format_size(usage.size)}"),
        ("on disk", format_size(usage.allocated)),
        ("unneeded", f"{format_count(usage.unneeded, 'blob')}, {format_size(usage.unneeded_size)}"),
        (
            "unfinished",
            f"{format_count(usage.partials, 'download')}, {format_size(usage.partial_size)}",
        ),
        ("free", "unknown" if usage.free is None else format_size(usage.free)),
    ]


def _encode_usage(usage: DiskUsage) -> dict[str, Any]:
    return {
        "store": str(usage.root),
        "names": usage.names,
        "blobs": usage.blobs,
        "size": usage.size,
        "allocated": usage.allocated,
        "unneeded": {"blobs": usage.unneeded, "size": usage.unneeded_size},
        "unfinished": {"downloads": usage.partials, "size": usage.partial_size},
        "free": usage.free,
    }
