"""Columns of text: their widths on a terminal, and the cells that a narrow one cuts."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence

# Columns of the narrowest terminal that is supported.
MIN_WIDTH = 60
_GAP = "  "
_ELLIPSIS = "…"
# Widths that cells keep while columns can be left out: the first has the name.
_FIRST, _OTHER = 20, 16
_LEAST = 4
_DIGEST = re.compile(r"(@|(?<![\w+.-]))sha256:([0-9a-f]{12})[0-9a-f]{52}(?![0-9a-f])")


def get_width() -> int | None:
    """Return the columns of the terminal that stdout is; None for a file or a pipe."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return max(MIN_WIDTH, shutil.get_terminal_size().columns)


def measure(text: str) -> int:
    """Return the number of columns that a text takes: Chinese characters, for example, take two."""
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    import unicodedata

    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, width: int) -> str:
    """Return a text with spaces at its end, up to a width."""
    return text + " " * (width - measure(text))


def cut_middle(text: str, width: int) -> str:
    """Return a text without its middle if it is wider than ``width``; its tag stays at the end."""
    if measure(text) <= width:
        return text
    tail = _take(text[::-1], width // 2)[::-1]
    return _take(text, width - 1 - measure(tail)) + _ELLIPSIS + tail


def _take(text: str, width: int) -> str:
    """Return the beginning of a text that fits a width."""
    for end, character in enumerate(text):
        width -= _measure_character(character)
        if width < 0:
            return text[:end]
    return text


def shorten_digests(text: str) -> str:
    """Return a text with 12 digits of each digest."""
    return _DIGEST.sub(lambda match: f"{'@sha256:' if match[1] else ''}{match[2]}", text)


def fit(
    rows: Sequence[Sequence[str]], width: int, optional: Collection[str] = ()
) -> list[list[str]]:
    """Return rows of a table that fit a width; the first row has the titles.

    Digests are shortened, then the ``optional`` columns are left out one by one, and then the
    widest cells lose their middle.
    """
    widths = _measure_columns(rows)
    if _sum(widths) <= width:
        return [list(row) for row in rows]
    rows = [[shorten_digests(cell) for cell in row] for row in rows]
    widths = _measure_columns(rows)
    for title in optional:
        least = [min(it, _FIRST if index == 0 else _OTHER) for index, it in enumerate(widths)]
        if _sum(least) <= width:
            break
        left_out = rows[0].index(title)
        rows = [[*row[:left_out], *row[left_out + 1 :]] for row in rows]
        del widths[left_out]
    limits = _limit(widths, width)
    return [list(map(cut_middle, row, limits)) for row in rows]


def _limit(widths: Sequence[int], width: int) -> list[int]:
    """Return widths of columns whose sum fits: the widest become narrower first."""

    def bound(limit: int, least: int) -> list[int]:
        floors = (least + _FIRST - _OTHER if index == 0 else least for index in range(len(widths)))
        return [min(it, max(limit, floor)) for it, floor in zip(widths, floors, strict=True)]

    limits = list(widths)
    for least in range(_OTHER, _LEAST - 1, -1):
        # Binary search: more columns never make the sum smaller.
        low, high = 0, max(widths)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _sum(bound(middle, least)) <= width else (low, middle - 1)
        limits = bound(low, least)
        if _sum(limits) <= width:
            break
    return limits


def _measure_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(measure, column)) for column in zip(*rows, strict=True)]


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of columns."""
    widths = _measure_columns(rows)
    return [_GAP.join(map(pad, row, widths)).rstrip() for row in rows]


def wrap(text: str, width: int) -> list[str]:
    """Return lines of whole words; a word that is too wide alone loses its middle."""
    lines: list[str] = []
    for word in text.split(" "):
        piece = cut_middle(word, width)
        if lines and measure(lines[-1]) + 1 + measure(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines


def fill(items: Sequence[str], width: int) -> list[str]:
    """Return items in columns of equal width, as many as fit a line, in the order of the lines."""
    texts = [cut_middle(item, width) for item in items]
    step = max(map(measure, texts), default=0) + len(_GAP)
    count = max(1, (width + len(_GAP)) // step)
    rows = [texts[start : start + count] for start in range(0, len(texts), count)]
    return ["".join(pad(text, step) for text in row).rstrip() for row in rows]
