"""``aimage df``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import settings, verb
from clowder_aimage.cli.console.output import facts, plural, result, size
from clowder_aimage.layout import ImageLayout
from clowder_aimage.usage import DiskUsage, disk_usage


@examples("aimage df")
@verb
def df() -> None:
    """Show the size of the store, the part that no name needs, and the free space.

    Several stores are shown one by one.
    """
    usages = [disk_usage(ImageLayout(root)) for root in settings().stores]
    result([_plain(usage) for usage in usages], _lines(usages))


def _lines(usages: Sequence[DiskUsage]) -> list[str]:
    stores = [["", *facts(_facts(usage))] for usage in usages]
    return [line for lines in stores for line in lines][1:]


def _facts(usage: DiskUsage) -> list[tuple[str, str]]:
    return [
        ("store", str(usage.root)),
        ("names", str(usage.names)),
        ("blobs", f"{plural(usage.blobs, 'blob')}, {size(usage.size)}"),
        ("on disk", size(usage.allocated)),
        ("unneeded", f"{plural(usage.unneeded, 'blob')}, {size(usage.unneeded_size)}"),
        ("unfinished", f"{plural(usage.partials, 'download')}, {size(usage.partial_size)}"),
        ("free", size(usage.free)),
    ]


def _plain(usage: DiskUsage) -> dict[str, Any]:
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
