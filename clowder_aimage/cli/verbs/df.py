"""``aimage df``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import format_count, format_fields, format_size, print_result
from clowder_aimage.layout import ImageLayout
from clowder_aimage.usage import DiskUsage, measure_disk_usage


@examples("aimage df")
@verb
def df() -> None:
    """Show the size of the store, the part that no name needs, and the free space.

    Several stores are shown one by one.
    """
    usages = [measure_disk_usage(ImageLayout(root)) for root in get_settings().stores]
    print_result([_encode_usage(usage) for usage in usages], _format_usages(usages))


def _format_usages(usages: Sequence[DiskUsage]) -> list[str]:
    stores = [["", *format_fields(_list_facts(usage))] for usage in usages]
    return [line for lines in stores for line in lines][1:]


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
        ("free", format_size(usage.free)),
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
