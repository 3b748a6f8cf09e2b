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
    found = [disk_usage(ImageLayout(root)) for root in settings().stores]
    result([_plain(one) for one in found], _lines(found))


def _lines(found: Sequence[DiskUsage]) -> list[str]:
    stores = [["", *facts(_facts(one))] for one in found]
    return [line for lines in stores for line in lines][1:]


def _facts(found: DiskUsage) -> list[tuple[str, str]]:
    return [
        ("store", str(found.root)),
        ("names", str(found.names)),
        ("blobs", f"{plural(found.blobs, 'blob')}, {size(found.size)}"),
        ("on disk", size(found.allocated)),
        ("unneeded", f"{plural(found.unneeded, 'blob')}, {size(found.unneeded_size)}"),
        ("unfinished", f"{plural(found.partials, 'download')}, {size(found.partial_size)}"),
        ("free", size(found.free)),
    ]


def _plain(found: DiskUsage) -> dict[str, Any]:
    return {
        "store": str(found.root),
        "names": found.names,
        "blobs": found.blobs,
        "size": found.size,
        "allocated": found.allocated,
        "unneeded": {"blobs": found.unneeded, "size": found.unneeded_size},
        "unfinished": {"downloads": found.partials, "size": found.partial_size},
        "free": found.free,
    }
