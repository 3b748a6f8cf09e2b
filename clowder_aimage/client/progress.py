"""Progress of calls: for a function of the caller, or as a bar of rich."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.oci import Digest

OnProgress = Callable[[int, int], object]
# True shows a bar.
Progress = OnProgress | bool | None


class ProgressCounter:
    """The bytes or steps done of a total, reported to a callback, one call at a time."""

    def __init__(self, progress: OnProgress | None) -> None:
        self._report = progress or (lambda _, __: None)
        # Several threads transfer blobs, but a caller's function need not be thread-safe.
        self._lock = threading.Lock()
        self._done = self._total = 0
        # The bytes of each unfinished blob.
        self._active: dict[Digest, int] = {}

    def begin(self, total: int) -> None:
        """Start over with a total."""
        with self._lock:
            self._done, self._total = 0, total
            self._report(0, total)

    def advance(self, count: int) -> None:
        """Add to the count."""
        with self._lock:
            self._done += count
            self._report(self._done, self._total)

    def show(self, done: object, total: object) -> None:
        """Report the count and the total that a worker states; ignore other values."""
        if type(done) is not int or type(total) is not int or not 0 <= done <= total:
            return
        if total != self._total:
            self.begin(total)
        if done != self._done:
            self.advance(done - self._done)

    def on_event(self, event: CopyEvent) -> None:
        """Count an event of a copy."""
        if event.kind == "plan" or event.content is None:
            self.begin(event.count)
            return
        digest = event.content.digest
        if event.kind == "start":
            self._active[digest] = 0
        elif event.kind == "progress":
            self._active[digest] = self._active.get(digest, 0) + event.count
            self.advance(event.count)
        elif event.kind == "skip" or digest in self._active:
            # A blob is done. After a mount it was counted as skipped.
            self.advance(event.content.size - self._active.pop(digest, 0))


@contextmanager
def count_progress(
    progress: Progress, task: str, *, is_bytes: bool = True
) -> Iterator[ProgressCounter]:
    """Yield a counter that calls a function; for True it shows a bar of a task until the end."""
    if progress is True:
        with _show_bar(task, is_bytes=is_bytes) as show:
            yield ProgressCounter(show)
    else:
        yield ProgressCounter(progress or None)


@contextmanager
def _show_bar(task: str, *, is_bytes: bool) -> Iterator[OnProgress]:
    """Show a bar on a terminal, or in a notebook as a widget; yield a function that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if is_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
        # What the program prints stays on its own stream.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bars:
        number = bars.add_task(task, total=None)
        yield lambda done, total: bars.update(number, completed=done, total=total)
