"""Sizes and durations as text."""

from __future__ import annotations

_SIZES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)},
}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Parse a size: 500k, 20M, 1.5GB in powers of 1000, KiB, MiB, GiB in powers of 1024.

    Raises ValueError: it is not a size.
    """
    plain = text.strip().lower().removesuffix("b")
    number = plain.rstrip("kmgti").rstrip()
    try:
        size = int(float(number) * _SIZES[plain[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(f"invalid size {text!r}: expected a value such as 500k, 20M or 1.5GiB")
    return size


def parse_time(text: str) -> float:
    """Parse a duration in seconds: 90s, 30m, 12h, 7d, 2w; a bare 0. Raises ValueError."""
    plain = text.strip().lower()
    try:
        seconds = 0.0 if plain == "0" else float(plain[:-1]) * _TIMES[plain[-1:]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < 1e11:
        raise ValueError(f"invalid time {text!r}: expected a value such as 90s, 12h or 7d")
    return seconds
