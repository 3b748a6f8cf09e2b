"""What a copy tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.oci import Descriptor


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """``kind`` is ``plan`` (blobs and bytes of the whole), ``skip`` (already there), ``start``,
    ``progress`` (``count`` more bytes; negative where a retry begins again), ``done``.

    A blob that is mounted starts, is skipped, and then done. More ``progress`` at once than a chunk
    is what an earlier run left.
    """

    kind: str
    content: Descriptor | None = None
    count: int = 0
    blobs: int = 0


OnEvent = Callable[[CopyEvent], None]


def ignore(_: CopyEvent) -> None:
    """Watch nothing."""
