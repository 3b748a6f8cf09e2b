"""The verb ``df``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.option import settings, verb
from clowder_aimage.cli.console.output import plural, result, size

if TYPE_CHECKING:
    from clowder_aimage.usage import DiskUsage


@verb
def df() -> None:
    """Show what lies in the store, what of it nothing needs, and how much more would fit.

    Where there are several stores, each is shown by itself.
    """
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.usage import disk_usage

    chosen = settings()
    found = [disk_usage(ImageLayout(root)) for root in chosen.stores]
    text = "\n\n".join(_text(one) for one in found)
    result([_plain(one) for one in found], text)


def _text(found: DiskUsage) -> str:
    facts = [
        ("store", str(found.root)),
        ("names", str(found.names)),
        ("blobs", f"{plural(found.blobs, 'blob')}, {size(found.size)}"),
        ("on disk", size(found.allocated)),
        ("unneeded", f"{plural(found.unneeded, 'blob')}, {size(found.unneeded_size)}"),
        ("unfinished", f"{plural(found.partials, 'download')}, {size(found.partial_size)}"),
        ("free", size(found.free)),
    ]
    return "\n".join(f"{key:<11} {value}" for key, value in facts)


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
