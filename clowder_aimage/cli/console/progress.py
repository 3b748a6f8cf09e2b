"""Progress on stderr: bars on a terminal, lines elsewhere, events with --json, nothing with -q."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TextIO

from clowder_aimage.cli.console import output
from clowder_aimage.cli.console.interruption import interruption
from clowder_aimage.cli.console.meter import BlobProgress, Meter, name_of
from clowder_aimage.cli.console.output import (
    clean_line,
    clean_lines,
    format_count,
    format_size,
    is_quiet,
    is_verbose,
    wants_json,
)
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.oci import Digest, Reference

if TYPE_CHECKING:
    from rich.progress import TaskID

# Events shown on terminals and in logs.
_MESSAGES = ("note", "wait", "summary")
# Seconds to wait for a terminal that blocks.
_STOP_TIMEOUT = 1.0
# Seconds before a copy or a blob gets a bar.
_MIN_AGE = 0.5
_MAX_BLOBS = 8
# Cells; the rest of the line is for the bar.
_MIN_TITLE, _MAX_TITLE = 12, 40
# Cells for the position, rate and time.
_FIGURES = 40


class LineView:
    """Prints a line at intervals, for logs."""

    interval = 5.0  # seconds

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._line = ""

    def update(self, meter: Meter) -> None:
        """Store the counts to show. The meter is not modified during the call."""
        if meter.total:
            figures = ", ".join(" ".join(text.split()) for text in meter.figures.values())
            subject = f"{meter.task} {meter.subject}".strip()
            self._line = f"{subject}: {100 * meter.shown // meter.total}%, {figures}"

    def draw(self) -> None:
        """Show the counts. Transfers do not wait for this."""
        if self._line:
            self._write(self._line)

    def send(self, kind: str, **fields: Any) -> None:
        """Show an event. Thread-safe."""
        if kind in _MESSAGES:
            self._write(clean_lines(fields["message"]))

    def close(self) -> None:
        """Erase the drawing."""

    def _write(self, line: str) -> None:
        with self._lock:
            self._stream.write(f"{line}\n")
            self._stream.flush()


class JsonView(LineView):
    """Prints lines of JSON, for programs; those of level debug only with ``-v``."""

    interval = 0.5

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        super().__init__(stream)
        self._is_verbose = verbose

    def update(self, meter: Meter) -> None:
        eta = meter.eta
        self._line = output.format_event(
            "progress",
            done=meter.shown,
            total=meter.total,
            rate=round(meter.rate, 3) if meter.stepwise else round(meter.rate),
            eta=None if eta is None else round(eta, 1),
        )

    def send(self, kind: str, **fields: Any) -> None:
        if output.get_event_level(kind) == "debug" and not self._is_verbose:
            return
        stated = {key: value for key, value in fields.items() if value is not None}
        # A closed pipe does not stop a transfer.
        with contextlib.suppress(OSError, ValueError):
            self._write(output.format_event(kind, **stated))


class BarView(LineView):
    """Draws bars at the bottom of a terminal: the total first, then the slowest blobs."""

    interval = 0.1

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        def build_text_column(
            field: str, justify: Literal["left", "right"], column: Column
        ) -> TextColumn:
            template = f"{{task.{field}}}"
            return TextColumn(template, justify=justify, markup=False, table_column=column)

        class PlainConsole(Console):
            """A console that never hides the cursor, so that it need not be restored."""

            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
                return False

        self._title = Column(no_wrap=True, overflow="ellipsis")
        self._bars = Bars(
            build_text_column("description", "left", self._title),
            BarColumn(),
            build_text_column("fields[position]", "right", Column(no_wrap=True)),
            build_text_column("fields[rate]", "right", Column(no_wrap=True)),
            build_text_column("fields[eta]", "left", Column(no_wrap=True)),
            console=PlainConsole(file=stream, force_terminal=True, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._total: TaskID | None = None
        self._blobs: dict[Digest, TaskID] = {}

    def update(self, meter: Meter) -> None:
        if meter.elapsed < _MIN_AGE:
            return
        room = self._bars.console.width - _FIGURES
        self._title.max_width = max(_MIN_TITLE, min(_MAX_TITLE, room * 6 // 10))
        count = f" {meter.finished}/{meter.blobs} blobs" if meter.blobs else ""
        self._total = self._show(self._total, f"{meter.task}{count}", meter)
        for digest in self._blobs.keys() - meter.active.keys():
            self._bars.remove_task(self._blobs.pop(digest))
        for digest, blob in meter.active.items():
            is_slow = meter.now - blob.begun >= _MIN_AGE
            if digest in self._blobs or (is_slow and len(self._blobs) < _MAX_BLOBS):
                title = f"  {clean_line(blob.label)}"
                self._blobs[digest] = self._show(self._blobs.get(digest), title, blob)

    def _show(self, task: TaskID | None, title: str, count: Meter | BlobProgress) -> TaskID:
        fields: dict[str, Any] = {"completed": count.shown, "total": count.total, **count.figures}
        if task is None:
            return self._bars.add_task(title, **fields)
        self._bars.update(task, description=title, **fields)
        return task

    def draw(self) -> None:
        if self._total is not None:
            self._bars.start()
            self._bars.refresh()

    def send(self, kind: str, **fields: Any) -> None:
        if kind in _MESSAGES:
            self._bars.console.print(clean_lines(fields["message"]), markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def create_view(stream: TextIO) -> LineView | None:
    """Return the view for ``stream``; None with ``-q``."""
    if is_quiet():
        return None
    if wants_json():
        return JsonView(stream, verbose=is_verbose())
    if stream.isatty() and not is_verbose() and os.environ.get("TERM", "dumb") != "dumb":
        return BarView(stream)
    return LineView(stream)


class Progress:
    """The bytes or steps done of a total. Thread-safe.

    The methods only count. A thread shows the counts at intervals, so that a slow terminal does not
    delay a transfer and the rate of a stalled transfer falls to zero.
    """

    def __init__(
        self,
        task: str,
        reference: Reference | None = None,
        *,
        unit: str = "bytes",
        view: LineView | None = None,
        clock: Callable[[], float] = time.monotonic,
        keeps_blobs: bool = True,
    ) -> None:
        """``keeps_blobs``: an interrupted copy keeps its complete blobs for the next one."""
        self._reference = None if reference is None else str(reference)
        self._meter = Meter(task, self._reference or "", stepwise=unit != "bytes")
        self._view = view or create_view(sys.stderr)
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._keeps_blobs = keeps_blobs

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_copying in interruption.copies:
            interruption.copies.remove(self._is_copying)
        with self._lock:
            self._meter.sample(self._clock())
            self._ended.set()
            thread = self._thread
        if thread is None or self._view is None:
            return
        try:
            # Interrupted before it started.
            with contextlib.suppress(RuntimeError):
                thread.join(_STOP_TIMEOUT)
        finally:
            # A blocked terminal would block this thread, too.
            if not thread.is_alive():
                with contextlib.suppress(OSError, ValueError):
                    self._view.close()

    def begin(self, total: int) -> None:
        """Set the total. A second call starts over."""
        with self._lock:
            self._meter.begin(total, self._clock())
        self._send_plan(**{"steps" if self._meter.stepwise else "size": total})

    def rename(self, task: str) -> None:
        """Set the task that is shown, for the next phase of the same count."""
        with self._lock:
            self._meter.task = task

    def advance(self, count: int) -> None:
        """Add to the count; a negative count must be repeated."""
        with self._lock:
            self._meter.advance(count)

    def show(self, done: object, total: object) -> None:
        """Show the count and the total that a worker reports; ignore other values."""
        if type(done) is not int or type(total) is not int or total < 0:
            return
        if total != self._meter.total:
            self.begin(total)
        self.advance(done - self._meter.done)

    def _is_copying(self) -> bool:
        return self._meter.finished < self._meter.blobs

    def on_event(self, event: CopyEvent) -> None:
        """Count and show an event of a copy."""
        if event.kind == "plan" and self._keeps_blobs:
            interruption.copies.append(self._is_copying)
        with self._lock:
            is_event = self._meter.watch(event, self._clock())
        content = event.content
        if not is_event or content is None or self._view is None or self._ended.is_set():
            return
        digest = str(content.digest)
        if event.kind == "plan":
            self._send_plan(digest=digest, blobs=event.blobs, size=event.count)
            return
        fields = {"digest": digest, "size": content.size, "name": name_of(content)}
        if event.kind == "wait":
            message, pid = output.describe_wait(f"blob {fields['name'] or digest}", event.count)
            self._view.send("wait", message=message, pid=pid, **fields)
        elif event.kind == "progress":
            # A negative count: a retry starts over.
            self._view.send("retry", **fields, lost=-event.count)
        else:
            self._view.send(event.kind, **fields)

    def _send_plan(self, **fields: Any) -> None:
        if self._view is None:
            return
        self._view.send("plan", task=self._meter.task, reference=self._reference, **fields)
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        assert self._view is not None  # noqa: S101 (for mypy)
        # The terminal is closed.
        with contextlib.suppress(OSError, ValueError):
            while not self._ended.wait(self._view.interval):
                self.refresh()

    def refresh(self) -> None:
        """Show the current counts."""
        if self._view is None:
            return
        with self._lock:
            self._meter.sample(self._clock())
            self._view.update(self._meter)
        self._view.draw()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        if self._view is None:
            output.note(text)
        self.remark(text)

    def remark(self, text: str) -> None:
        """Print a line above the bars, unless ``-q`` is given."""
        if self._view is not None:
            self._view.send("note", message=text)

    def summarize(self, verb: str) -> None:
        """Print the outcome of a copy; nothing with ``-q``."""
        meter = self._meter
        if self._view is None:
            return
        present = f", {meter.skipped} already there" if meter.skipped else ""
        moved = format_count(meter.blobs - meter.skipped, "blob")
        self._view.send(
            "summary",
            message=f"{verb} {moved}{present}, {format_size(meter.total)} in all",
            task=meter.task,
            reference=self._reference,
            blobs=meter.blobs - meter.skipped,
            alreadyThere=meter.skipped,
            size=meter.total,
            seconds=round(meter.elapsed, 3),
        )


def build_callbacks(progress: Progress) -> dict[str, Any]:
    """Return the callbacks that show the progress of packing."""
    return {
        "on_survey": progress.begin,
        "on_surveyed": progress.advance,
        **build_write_callbacks(progress),
    }


def build_write_callbacks(progress: Progress) -> dict[str, Any]:
    """Return the callbacks that show the progress of writing."""
    return {
        "on_plan": lambda plan: progress.begin(plan.size),
        "on_written": lambda written: progress.advance(written.layer.descriptor.size),
    }
