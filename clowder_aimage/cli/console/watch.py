"""A result that is shown again and again: ``--watch``."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.console.output import clean_line, print_result, wants_value
from clowder_aimage.errors import AImageError

if TYPE_CHECKING:
    from typing import TextIO

Result = dict[str, Any] | list[Any]
# Seconds between two readings, and the least of them
INTERVAL, LEAST = 2.0, 0.1
# Readings that a chart shows
SPAN = 60
_BLOCKS = "▁▂▃▄▅▆▇█"
# Cursor to the corner; the rest of a line, and of the screen, is erased
_HOME, _END_LINE, _END_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reading:
    """A result, its text, and the numbers whose last values are drawn as charts.

    ``charts`` has the number and its text by name; a number of None is a gap.
    """

    value: Result
    lines: Sequence[str]
    charts: Mapping[str, tuple[float | None, str]] = field(default_factory=dict)


def watch_option(function: _F) -> _F:
    """Add ``--watch [SECONDS]``."""
    option = click.option(
        "--watch",
        type=click.FloatRange(LEAST, 3600),
        is_flag=False,
        flag_value=INTERVAL,
        metavar="[SECONDS]",
        help="Show it again every 2 seconds, or every SECONDS, until Ctrl-C.",
    )
    return option(function)


def show(read: Callable[[], Reading], interval: float | None) -> None:
    """Print a result, or with an ``interval`` again and again until Ctrl-C."""
    if interval is None:
        reading = read()
        print_result(reading.value, reading.lines)
        return
    from clowder_aimage.cli.console.interruption import interruption

    watch = Watch(read, interval, stream=sys.stdout, is_screen=_has_screen(), pause=sleep)
    try:
        watch.run()
    except KeyboardInterrupt:
        # It is the way to end the verb, and not a failure of it.
        interruption.is_pending = False


def _has_screen() -> bool:
    return sys.stdout.isatty() and not wants_value()


class Watch:
    """The loop of ``--watch``: on a terminal one screen with charts, else a block each time.

    A server that does not answer is shown, and the next reading follows: it may be back then. Other
    errors are raised.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        interval: float,
        *,
        stream: TextIO,
        is_screen: bool,
        pause: Callable[[float], object],
        clock: Callable[[], float] = monotonic,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._read, self._interval, self._stream = read, interval, stream
        self._is_screen, self._pause, self._clock = is_screen, pause, clock
        self._size = size or _measure_terminal
        self._charts: dict[str, deque[float | None]] = {}
        self._last: Reading | None = None

    def run(self) -> None:
        """Show readings until KeyboardInterrupt."""
        if self._is_screen:
            self._write(_HIDE + _HOME + _END_SCREEN)
        try:
            while True:
                begun = self._clock()
                self.step()
                self._pause(max(0.0, self._interval - (self._clock() - begun)))
        finally:
            if self._is_screen:
                self._write(_SHOW)

    def step(self) -> None:
        """Take a reading and show it."""
        failure = None
        try:
            reading = self._read()
        except AImageError as error:
            if not _is_transient(error):
                raise
            failure = error.message
            for values in self._charts.values():
                values.append(None)
        else:
            self._last = reading
            for name, (number, _) in reading.charts.items():
                self._charts.setdefault(name, deque(maxlen=SPAN)).append(number)
        if self._is_screen:
            self._draw(failure)
        elif failure is not None:
            print_result({"error": failure}, f"{failure}; trying again")
        elif self._last is not None:
            # Blocks of several lines are separated; a line of JSON or of a template is not.
            end = () if wants_value() else ("",)
            print_result(self._last.value, [*self._last.lines, *end])
        if not self._is_screen:
            self._stream.flush()

    def _draw(self, failure: str | None) -> None:
        columns, rows = self._size()
        lines = [*self._format_charts(columns)]
        if failure is not None:
            lines += [f"{failure}; trying again", ""]
        if self._last is not None:
            lines += self._last.lines
        # The last line stays empty: a line end there would move the screen.
        shown = [_fit(clean_line(line), columns) for line in lines[: max(1, rows - 1)]]
        self._write(_HOME + "".join(f"{line}{_END_LINE}\n" for line in shown) + _END_SCREEN)

    def _format_charts(self, columns: int) -> Iterable[str]:
        current = self._last.charts if self._last is not None else {}
        names = [name for name in self._charts if name in current]
        if not names:
            return
        width, texts = max(map(len, names)), {name: current[name][1] for name in names}
        room = max(8, min(SPAN, columns - width - max(map(len, texts.values())) - 4))
        for name in names:
            line = draw_sparkline([*self._charts[name]][-room:])
            yield f"{name:<{width}}  {line:<{room}}  {texts[name]}"
        yield ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def draw_sparkline(values: Sequence[float | None]) -> str:
    """Draw numbers as blocks: the lowest block is 0, the highest the greatest of them."""
    top = max((value for value in values if value is not None), default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round(max(0.0, value) / top * steps) if top > 0 else 0]
        for value in values
    )


def _fit(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


def _is_transient(error: AImageError) -> bool:
    from clowder_aimage.errors import NetworkError

    return isinstance(error, NetworkError) or getattr(error, "status", 0) in (429, 502, 503, 504)


def _measure_terminal() -> tuple[int, int]:
    import shutil

    columns, rows = shutil.get_terminal_size()
    return columns, rows
