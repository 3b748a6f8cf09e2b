"""Progress on stderr: a bar on a terminal, plain lines otherwise, nothing with -q."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

import click

from clowder_aimage.cli.output import note, plural, size
from clowder_aimage.content.event import Event

_LINE_EVERY = 5.0  # seconds between plain lines


class Progress:
    """Bytes (or steps) done of a total. Calls may come from any thread."""

    def __init__(self, label: str, *, quiet: bool, unit: str = "bytes") -> None:
        self._label = label
        self._quiet = quiet
        self._bytes = unit == "bytes"
        self._bar: Any = None
        self._lock = threading.Lock()
        self._done = self._total = self._skipped = self._blobs = 0
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def begin(self, total: int) -> None:
        """Say how much there is to do. A second beginning starts over."""
        self._done, self._total, self._skipped = 0, total, 0
        if self._quiet or not total or not sys.stderr.isatty():
            return
        self._bar = click.progressbar(
            length=total,
            label=self._label,
            file=sys.stderr,
            item_show_func=(lambda _: f"{size(self._done)} of {size(total)}")
            if self._bytes
            else None,
            show_pos=not self._bytes,
        )
        self._bar.render_progress()

    def advance(self, count: int) -> None:
        """Count what was done; negative where it must be done again."""
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(count, "")
            elif not self._quiet and time.monotonic() - self._last_line >= _LINE_EVERY:
                self._last_line = time.monotonic()
                note(f"{self._label}: {self.position}")

    @property
    def position(self) -> str:
        """How far it is, in words."""
        if self._bytes:
            return f"{size(self._done)} of {size(self._total)}"
        return f"{self._done} of {self._total}"

    def on_event(self, event: Event) -> None:
        """Watch a copy."""
        if event.kind == "plan":
            self._blobs = event.blobs
            self.begin(event.count)
        elif event.kind == "skip":
            with self._lock:
                self._skipped += 1
            self.advance(event.count)
        elif event.kind == "progress":
            self.advance(event.count)

    def summary(self, verb: str) -> str:
        """One line on how a copy ended."""
        moved = self._blobs - self._skipped
        there = f", {self._skipped} already there" if self._skipped else ""
        return f"{verb} {plural(moved, 'blob')}{there}, {size(self._total)} in all"
