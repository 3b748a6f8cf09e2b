"""The name that is nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def find_nearest(
    name: str,
    names: Iterable[str],
    *,
    cutoff: float = 0.6,
    prefix: str = "",
    suffix: str = "",
) -> str | None:
    """Return the name that resembles ``name`` most, or None.

    ``prefix`` and ``suffix`` are not compared: names that share them would all be similar. Of names
    that resemble it equally, the one with more characters at the same positions is returned.
    """
    # Only a mistake needs it.
    import difflib

    def shorten(text: str) -> str:
        return text.removeprefix(prefix).removesuffix(suffix)

    full_names, typed = {shorten(text): text for text in names}, shorten(name)

    def rank(text: str) -> tuple[float, int]:
        equal_count = sum(a == b for a, b in zip(text, typed, strict=False))
        return difflib.SequenceMatcher(None, text, typed).ratio(), equal_count

    close = difflib.get_close_matches(typed, full_names, cutoff=cutoff)
    return full_names[max(close, key=rank)] if close else None
