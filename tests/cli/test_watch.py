"""``--watch``: the loop, its screen, and the verbs that have it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest

from clowder_aimage.cli.console import watch
from clowder_aimage.cli.console.watch import Reading, Watch, draw_sparkline
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError
from tests.process import Aimage

LOST = NetworkError("the worker does not answer")


def build_reading(number: int) -> Reading:
    lines = [f"{number} jobs", "x" * 100]
    return Reading({"jobs": number}, lines, {"queue": (number, f"{number} jobs")})


class Scene:
    """A watch on a terminal of 40 columns and 6 rows, which is interrupted after its readings."""

    def __init__(self, *steps: Reading | AImageError, is_screen: bool = True) -> None:
        self.stream, self.pauses, self.now = io.StringIO(), list[float](), 0.0
        self._steps: Iterator[Reading | AImageError] = iter(steps)
        self._left = len(steps)
        self.watch = Watch(
            self._read,
            2.0,
            stream=self.stream,
            is_screen=is_screen,
            pause=self._pause,
            clock=lambda: self.now,
            size=lambda: (40, 6),
        )

    def _read(self) -> Reading:
        # A reading takes time, which the pause makes up for
        self.now += 0.5
        step = next(self._steps)
        if isinstance(step, AImageError):
            raise step
        return step

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt

    def run(self) -> list[list[str]]:
        """Return the lines of each screen."""
        with pytest.raises(KeyboardInterrupt):
            self.watch.run()
        _, *screens = self.stream.getvalue().split("\x1b[H")
        assert self.stream.getvalue().endswith("\x1b[?25h")
        return [
            screen.split("\x1b[J")[0].replace("\x1b[K", "").splitlines() for screen in screens[1:]
        ]


def test_a_screen_is_drawn_in_place_with_charts() -> None:
    scene = Scene(*map(build_reading, (0, 4, 8)))
    *_, last = scene.run()
    assert scene.pauses == [1.5, 1.5, 1.5]
    assert last[0].split() == ["queue", "▁▅█", "8", "jobs"]
    assert last[1:] == ["", "8 jobs", "x" * 39 + "…"]


def test_a_screen_is_not_longer_than_the_terminal() -> None:
    reading = Reading({}, [f"line {number}" for number in range(50)])
    (lines,) = Scene(reading).run()
    assert lines == [f"line {number}" for number in range(5)]


def test_control_characters_of_a_result_do_not_reach_the_terminal() -> None:
    (lines,) = Scene(Reading({}, ["a\x1b[2Jb"])).run()
    assert lines == ["a\ufffd[2Jb"]


def test_a_server_that_is_away_is_shown_and_asked_again() -> None:
    first, second, third = Scene(build_reading(2), LOST, build_reading(2)).run()
    assert "the worker does not answer" not in "".join(first + third)
    assert second[2].startswith("the worker does not answer")
    assert "2 jobs" in second
    assert third[0].split() == ["queue", "█", "█", "2", "jobs"]


def test_a_server_may_be_away_at_first() -> None:
    first, second = Scene(LOST, build_reading(1)).run()
    assert first == ["the worker does not answer; trying again"[:40], ""]
    assert "1 jobs" in second


def test_an_error_that_waiting_does_not_repair_ends_the_watch() -> None:
    scene = Scene(NotFoundError("no node"))
    with pytest.raises(NotFoundError):
        scene.watch.run()
    # The cursor is shown again
    assert scene.stream.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([0.0, 0.0], "▁▁"),
        ([0.0, 1.0, 2.0, 7.0], "▁▂▃█"),
        ([5.0, None, 5.0], "█ █"),
        ([1e300, -1.0], "█▁"),
        ([None], " "),
    ],
)
def test_numbers_are_drawn_as_blocks(values: list[float | None], drawn: str) -> None:
    assert draw_sparkline(values) == drawn


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses of a watch that is interrupted in its second one."""
    seconds: list[float] = []

    def pause(duration: float) -> None:
        seconds.append(duration)
        if len(seconds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "sleep", pause)
    return seconds


def test_without_a_terminal_there_is_a_block_for_each_reading(
    aimage: Callable[..., Aimage], pauses: list[float]
) -> None:
    out = aimage()("df", "--watch").out
    assert out.count("on disk") == 2
    assert out.endswith("\n\n")
    assert "\x1b" not in out
    assert max(pauses) <= 2


def test_with_json_there_is_a_line_for_each_reading(
    aimage: Callable[..., Aimage], pauses: list[float]
) -> None:
    first, second = map(json.loads, aimage()("df", "--json", "--watch", "30").out.splitlines())
    assert first[0]["store"] == second[0]["store"]
    assert len(pauses) == 2


@pytest.mark.parametrize("verb", [("ps",), ("node", "status")])
def test_an_unreachable_worker_is_asked_again(
    aimage: Callable[..., Aimage], pauses: list[float], verb: tuple[str, ...]
) -> None:
    here = aimage()
    here.environment["AIMAGE_HOST"] = "127.0.0.1:1"
    out = here(*verb, "--watch").out
    assert out.count("cannot connect to") == 2
    assert out.count("trying again") == 2
    assert ("the node at" in out) == (verb[0] == "node")


def test_a_pause_must_be_a_number_of_seconds(aimage: Callable[..., Aimage]) -> None:
    assert "--watch" in aimage()("df", "--watch", "0", code=2).err
