"""Bars: lines at the bottom of a terminal that are drawn over and over.

ASCII alone, since terminals disagree on how wide anything prettier is; no colour; the cursor stays
where it can be seen.
"""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from clowder_aimage.cli.console.meter import Meter
from clowder_aimage.cli.console.output import duration, position, printable, size, speed

_WIDEST = 110  # cells: the eye has to find the end of a line
_LONGEST_NAME = 40
_MOST_BLOBS = 8
_PATIENCE = 0.5  # seconds that a blob must be under way to get a line, or all of it a total


@dataclass(frozen=True, slots=True)
class Row:
    """What stands in a line. The columns are the same in all lines of a frame."""

    label: str
    share: float
    figures: str
    rate: str
    eta: str = ""


def frame(meter: Meter, columns: int, lines: int) -> list[str]:
    """The lines to show: a total first, so that it keeps its place, and the slower blobs."""
    if meter.elapsed < _PATIENCE:
        return []
    slow = [blob for blob in meter.active.values() if meter.now - blob.begun >= _PATIENCE]
    rows = [total(meter)]
    for blob in slow[: max(0, min(_MOST_BLOBS, lines - 3))]:
        whole = blob.content.size
        done = max(0, min(blob.done, whole))
        rows.append(
            Row(
                f"  {printable(blob.label)}".replace("\n", " "),
                done / whole if whole else 1.0,
                f"{size(done):>7} of {size(whole):>7}",
                f"{size(blob.speed.value):>7}/s",
            )
        )
    return table(rows, min(columns - 1, _WIDEST))


def total(meter: Meter) -> Row:
    """The row of the whole."""
    count = f" {meter.finished}/{meter.blobs} blobs" if meter.blobs else ""
    return Row(
        f"{meter.task}{count}",
        meter.shown / meter.total if meter.total else 1.0,
        position(meter.shown, meter.total, stepwise=meter.stepwise),
        speed(meter.rate, stepwise=meter.stepwise).rjust(9),
        f"ETA {duration(meter.eta)}",
    )


def table(rows: Sequence[Row], width: int) -> list[str]:
    """The rows in ``width`` cells. Where that is little, first the bar goes, then the rest."""
    least = min(cells(rows[0].label), _LONGEST_NAME)
    figures, rate, eta = (
        max(len(getattr(row, column)) for row in rows) + 2 for column in ("figures", "rate", "eta")
    )
    if width - least - figures - rate < eta:
        eta = 0
    if width - least - figures - rate < 0:
        rate = 0
    if width - least - figures < 0:
        figures = 0
    room = width - figures - rate - eta
    label = max(least, min(_LONGEST_NAME, room * 6 // 10))
    bar = room - label - 4
    if bar < 6:
        label, bar = room, 0
    lines = []
    for row in rows:
        text = fit(row.label, label)
        text += f"  {drawn(row.share, bar)}" if bar else ""
        text += row.figures.rjust(figures) if figures else ""
        text += row.rate.rjust(rate) if rate else ""
        text += f"  {row.eta}" if eta else ""
        lines.append(clip(text.rstrip(), width))
    return lines


def drawn(share: float, width: int) -> str:
    """``[====>   ]`` with ``width`` cells inside."""
    full = int(max(0.0, min(1.0, share)) * width)
    return f"[{('=' * full + '>' * (full < width)).ljust(width)}]"


def cells(text: str) -> int:
    """How many columns of a terminal printable text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(text: str, room: int) -> str:
    """``text``, or as much of its beginning and its end as ``room`` cells hold."""
    if cells(text) <= room:
        return text
    if room < 8:
        return _start(text, room)
    head = _start(text, (room - 2) // 2)
    tail = _start(text[::-1], room - 2 - cells(head))[::-1]
    return f"{head}..{tail}"


def _start(text: str, room: int) -> str:
    for index, character in enumerate(text):
        room -= _cells(character)
        if room < 0:
            return text[:index]
    return text


def fit(text: str, room: int) -> str:
    """``text`` in exactly ``room`` cells."""
    text = clip(text, room)
    return text + " " * (room - cells(text))


class Screen:
    """Lines that take the place of those before them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._lines: list[str] = []

    def size(self) -> os.terminal_size:
        """Columns and lines, as they are now."""
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            found = os.terminal_size((0, 0))
        return found if found.columns > 0 and found.lines > 0 else os.terminal_size((80, 24))

    def draw(self, lines: Sequence[str]) -> None:
        """Show ``lines`` instead of what is shown. They must be narrower than the terminal."""
        encoding = self._stream.encoding or "ascii"
        lines = [line.encode(encoding, "replace").decode(encoding) for line in lines]
        with self._lock:
            if lines != self._lines:
                self._show(lines)

    def print(self, text: str) -> None:
        """Say something above the lines; they come back when they are drawn again."""
        with self._lock:
            if self._lines:
                self._show([])
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def _show(self, lines: list[str]) -> None:
        """In one write, so that nothing flickers; the cursor rests at the last line's start."""
        above = self._above()
        text = "\r" + (f"\x1b[{above}A" if above else "")
        text += "\n".join(f"{line}\x1b[K" for line in lines)
        text += "\x1b[J\r" if lines else "\x1b[J"
        self._lines = lines  # before the write: an interrupt must not find the old ones
        self._stream.write(text)
        self._stream.flush()

    def _above(self) -> int:
        """How many rows of the terminal are between the first line and the cursor.

        Where the terminal became narrower, it has broken longer lines into several rows.
        """
        columns, lines = self.size()
        rows = sum(max(1, -(-cells(line) // columns)) for line in self._lines[:-1])
        return min(rows, lines - 1)
