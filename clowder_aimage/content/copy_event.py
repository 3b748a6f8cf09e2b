"""Events of a copy, for a progress display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.oci import Descriptor


@dataclass(frozen=True, slots=True)
class CopyEvent:
    """A step of a copy.

    ``kind`` is ``plan`` (blobs and bytes of the whole), ``skip`` (already there), ``start``,
    ``progress`` (``count`` more bytes; negative when a retry begins again) or ``done``. A blob that
    is mounted starts, is skipped, and is then done. A ``progress`` of more than a chunk is what an
    earlier run left.
    """

    kind: str
    content: Descriptor | None = None
    count: int = 0
    blobs: int = 0


OnEvent = Callable[[CopyEvent], None]


def ignore(_: CopyEvent) -> None:
    """Do nothing with an event."""
