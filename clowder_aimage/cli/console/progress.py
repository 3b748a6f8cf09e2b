"""Progress on stderr: bars on a terminal, lines elsewhere, events with --json, nothing with -q."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, TextIO

from clowder_aimage.cli.console import output
from clowder_aimage.cli.console.meter import Meter, name_of
from clowder_aimage.cli.console.output import (
    duration,
    plural,
    position,
    printable,
    size,
    speed,
    wants_json,
)
from clowder_aimage.content.copy_event import CopyEvent
from clowder_aimage.oci import Reference

_SAID = ("note", "summary")  # what people are told, besides how far it is
_PARTING = 1.0  # seconds that a terminal that takes no more is waited for


class ProgressView(Protocol):
    """A way to show progress. ``every`` is the time between two looks, in seconds."""

    every: float

    def compose(self, meter: Meter) -> Sequence[str]:
        """What to show now. The meter is held still meanwhile."""
        ...

    def show(self, lines: Sequence[str]) -> None:
        """Show it. Whoever counts does not wait for this."""
        ...

    def tell(self, kind: str, **fields: Any) -> None:
        """Something happened. Calls may come from any thread."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class BarView:
    """Lines on a terminal that change in place."""

    every = 0.1

    def __init__(self, stream: TextIO) -> None:
        from clowder_aimage.cli.console.bar import Screen, frame

        self._screen = Screen(stream)
        self._frame = frame

    def compose(self, meter: Meter) -> Sequence[str]:
        return self._frame(meter, *self._screen.size())

    def show(self, lines: Sequence[str]) -> None:
        self._screen.draw(lines)

    def tell(self, kind: str, **fields: Any) -> None:
        if kind in _SAID:
            self._screen.print(printable(fields["message"]))

    def close(self) -> None:
        self._screen.draw([])


class LineView:
    """A line now and then, for logs."""

    every = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def compose(self, meter: Meter) -> Sequence[str]:
        if not meter.total:
            return []
        task = f"{meter.task} {meter.subject}".strip()
        where = " ".join(position(meter.shown, meter.total, stepwise=meter.stepwise).split())
        return [
            f"{task}: {100 * meter.shown // meter.total}%, {where}, "
            f"{speed(meter.rate, stepwise=meter.stepwise)}, ETA {duration(meter.eta)}"
        ]

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def tell(self, kind: str, **fields: Any) -> None:
        if kind in _SAID:
            self.show([printable(fields["message"])])

    def close(self) -> None:
        pass


class JsonView:
    """Lines of JSON, for programs."""

    every = 0.5

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def compose(self, meter: Meter) -> Sequence[str]:
        eta = meter.eta
        fields = {
            "done": meter.shown,
            "total": meter.total,
            "rate": round(meter.rate, 3) if meter.stepwise else round(meter.rate),
            "eta": None if eta is None else round(eta, 1),
        }
        return [output.event("progress", **fields)]

    def show(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()

    def tell(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody listens: no reason to stop
            known = {key: value for key, value in fields.items() if value is not None}
            self.show([output.event(kind, **known)])

    def close(self) -> None:
        pass


def view_of(stream: TextIO, *, quiet: bool) -> ProgressView | None:
    """How to show progress on ``stream``."""
    if quiet:
        return None
    if wants_json():
        return JsonView(stream)
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return BarView(stream)
    return LineView(stream)


class Progress:
    """Bytes (or steps) done of a total. Calls may come from any thread.

    They only count. A thread of its own looks at the counts now and then and shows them, so that a
    slow terminal holds nobody up, and a transfer that hangs is seen to hang.
    """

    def __init__(
        self,
        task: str,
        reference: Reference | None = None,
        *,
        quiet: bool,
        unit: str = "bytes",
        view: ProgressView | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._reference = None if reference is None else str(reference)
        self._meter = Meter(task, self._reference or "", stepwise=unit != "bytes")
        self._view = view or view_of(sys.stderr, quiet=quiet)
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._meter.sample(self._clock())
            self._ended.set()
            thread = self._thread
        if thread is None or self._view is None:
            return
        try:
            with contextlib.suppress(RuntimeError):  # an interrupt came before it had begun
                thread.join(_PARTING)
        finally:
            if not thread.is_alive():  # else the terminal takes nothing, and would hold us too
                with contextlib.suppress(OSError, ValueError):
                    self._view.close()

    def begin(self, total: int) -> None:
        """Say how much there is to do. A second beginning starts over."""
        with self._lock:
            self._meter.begin(total, self._clock())
        self._begun(**{"steps" if self._meter.stepwise else "size": total})

    def advance(self, count: int) -> None:
        """Count what was done; negative where it must be done again."""
        with self._lock:
            self._meter.advance(count)

    def on_event(self, event: CopyEvent) -> None:
        """Watch a copy."""
        with self._lock:
            news = self._meter.watch(event, self._clock())
        content = event.content
        if not news or content is None or self._view is None or self._ended.is_set():
            return
        digest = str(content.digest)
        if event.kind == "plan":
            self._begun(digest=digest, blobs=event.blobs, size=event.count)
            return
        fields = {"digest": digest, "size": content.size, "name": name_of(content)}
        if event.kind == "progress":  # less than there was: a retry begins again
            self._view.tell("retry", **fields, lost=-event.count)
        else:
            self._view.tell(event.kind, **fields)

    def _begun(self, **fields: Any) -> None:
        if self._view is None:
            return
        self._view.tell("plan", task=self._task, reference=self._reference, **fields)
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._look, name="progress", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        assert self._view is not None
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: show nothing more
            while not self._ended.wait(self._view.every):
                self.refresh()

    def refresh(self) -> None:
        """Look at the clock, and show how far it is."""
        if self._view is None:
            return
        with self._lock:
            self._meter.sample(self._clock())
            lines = self._view.compose(self._meter)
        self._view.show(lines)

    def note(self, text: str) -> None:
        """Say something without disturbing what is shown."""
        if self._view is None:
            output.note(text)
        else:
            self._view.tell("note", message=text)

    def say(self, verb: str) -> None:
        """Say in a line how a copy ended, now that it has; nothing with ``-q``."""
        meter = self._meter
        if self._view is None:
            return
        self._view.tell(
            "summary",
            message=self.summary(verb),
            task=self._task,
            reference=self._reference,
            blobs=meter.blobs - meter.skipped,
            alreadyThere=meter.skipped,
            size=meter.total,
            seconds=round(meter.elapsed, 3),
        )

    def summary(self, verb: str) -> str:
        """One line on how a copy ended."""
        moved = self._meter.blobs - self._meter.skipped
        there = f", {self._meter.skipped} already there" if self._meter.skipped else ""
        return f"{verb} {plural(moved, 'blob')}{there}, {size(self._meter.total)} in all"
