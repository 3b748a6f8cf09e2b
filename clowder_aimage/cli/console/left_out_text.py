"""The files of a model that were not packed, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clowder_aimage.formats.left_out import LeftOut

# Paths in a line, and their characters.
_SHOWN, _WIDE = 6, 100


def describe_left_out(files: Iterable[LeftOut]) -> Iterator[str]:
    """Yield a line for each reason to leave out files, with the first of them."""
    by_reason: dict[str, list[str]] = {}
    for file in files:
        by_reason.setdefault(file.reason, []).append(file.path)
    for reason, paths in sorted(by_reason.items()):
        shown = ", ".join(
            path if len(path) <= _WIDE else f"{path[:_WIDE]}…" for path in paths[:_SHOWN]
        )
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        yield f"left out, {reason}: {shown}{more}"
