"""Progress: bars on a terminal, lines in logs, events for programs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from clowder_aimage.cli.console.output import format_duration
from clowder_aimage.cli.console.progress import BarView, JsonView, LineView, Progress
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.oci import Descriptor, Digest, Reference
from tests.process import PROGRAM, Aimage, run, spawn

REFERENCE = Reference.parse("registry.example.com/team/model:v1")
NEVER = 3600.0  # the tests redraw themselves


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the environment of a terminal of 80 by 24, without colours."""
    for name, value in {"COLUMNS": "80", "LINES": "24", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A terminal of 80 by 24 that records what is written to it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()

    @property
    def screen(self) -> list[str]:
        return shown(self.getvalue())


def shown(text: str) -> list[str]:
    """Return the final screen; only the cursor movements of bars are interpreted."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", text, re.DOTALL):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part.startswith("\x1b"):
            assert part.endswith("A"), f"the cursor is moved by {part!r}"
            row = max(0, row - int(part[2:-1]))
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
    while rows and not rows[-1].strip():
        rows.pop()
    return [line.rstrip() for line in rows]


def blob(number: int, size: int, **annotations: str) -> Descriptor:
    digest = Digest.of(str(number).encode())
    return Descriptor("application/octet-stream", digest, size, annotations)


def plan(*blobs: Descriptor) -> CopyEvent:
    return CopyEvent("plan", blob(-1, 1), sum(b.size for b in blobs), len(blobs))


class Watched:
    """A progress with an injected clock and manual redraws."""

    def __init__(self, kind: type[BarView | LineView | JsonView]) -> None:
        self.stream = Terminal()
        self.clock = Clock()
        view = JsonView(self.stream, verbose=True) if kind is JsonView else kind(self.stream)
        view.interval = NEVER
        self.progress = Progress("pulling", REFERENCE, view=view, clock=self.clock)

    def tell(self, kind: str, content: Descriptor, count: int = 0) -> None:
        self.progress.on_event(CopyEvent(kind, content, count))

    def after(self, seconds: float) -> list[str]:
        """Return the screen after that time."""
        self.clock.now += seconds
        self.progress.refresh()
        return self.stream.screen

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


def test_many_small_blobs_share_one_line() -> None:
    watched = Watched(BarView)
    blobs = [blob(i, 10_000) for i in range(1200)]
    frames = []
    with watched.progress as progress:
        progress.on_event(plan(*blobs))
        for number, content in enumerate(blobs):
            watched.tell("start", content, content.size)
            watched.tell("progress", content, content.size)
            watched.tell("done", content, content.size)
            watched.clock.now += 0.005
            if number % 20 == 19:  # every tenth of a second, like the thread
                frames.append(watched.after(0))
    assert watched.stream.getvalue().count("pulling") <= 62  # one frame each, and not 3600
    drawn = [lines for lines in frames if lines]
    assert {len(lines) for lines in drawn} == {1}
    assert "1180/1200 blobs" in drawn[-2][0]
    assert watched.stream.screen == []


def test_slow_blobs_have_a_line_each_until_they_complete() -> None:
    watched = Watched(BarView)
    named = blob(1, 50_000_000, **{"org.opencontainers.image.title": "vae/weights.safetensors"})
    nameless = blob(2, 50_000_000)
    with watched.progress as progress:
        progress.on_event(plan(named, nameless))
        for content in (named, nameless):
            watched.tell("start", content, content.size)
        assert watched.after(0.4) == []
        for _ in range(25):
            watched.tell("progress", named, 1_000_000)
        lines = watched.after(0.6)
        assert lines[0].startswith("pulling 0/2 blobs")
        assert re.search(r"25 MB of  100 MB +26 MB/s +ETA 0:03$", lines[0])
        assert re.search(r"^  vae/weights.+ ━+╸? +25 MB of   50 MB +26 MB/s$", lines[1])
        assert nameless.digest.encoded[:12] in lines[2]
        watched.tell("done", named, named.size)
        lines = watched.after(0.1)
        assert len(lines) == 2
        assert lines[0].startswith("pulling 1/2 blobs")
    progress.summarize("pulled")
    assert watched.stream.screen == ["pulled 2 blobs, 100 MB in all"]


def test_a_stalled_transfer_shows_no_speed() -> None:
    watched = Watched(BarView)
    content = blob(1, 100_000_000)
    with watched.progress as progress:
        progress.on_event(plan(content))
        watched.tell("start", content, content.size)
        for _ in range(10):
            watched.tell("progress", content, 1_000_000)
        assert "10 MB/s" in watched.after(1)[0]
        watched.after(60)
        assert "ETA -:--" in watched.after(100)[0]


def test_a_retry_does_not_decrease_the_total() -> None:
    watched = Watched(BarView)
    content = blob(1, 10_000_000)
    with watched.progress as progress:
        progress.on_event(plan(content))
        watched.tell("start", content, content.size)
        for _ in range(6):
            watched.tell("progress", content, 1_000_000)
        before = watched.after(1)
        watched.tell("progress", content, -6_000_000)
        total, line = watched.after(1)
        assert "6 MB of   10 MB" in before[0]
        assert "6 MB of   10 MB" in total
        assert "0 B of   10 MB" in line
        for _ in range(7):
            watched.tell("progress", content, 1_000_000)
        assert "7 MB of   10 MB" in watched.after(1)[0]


def test_a_retry_does_not_decrease_event_progress() -> None:
    """Programs draw bars of events, so repeated bytes have their own event."""
    watched = Watched(JsonView)
    content = blob(1, 10_000_000)
    with watched.progress as progress:
        progress.on_event(plan(content))
        watched.tell("start", content, content.size)
        for count in (6_000_000, -6_000_000, 5_000_000, 2_000_000):
            watched.tell("progress", content, count)
            watched.clock.now += 1
            progress.refresh()
    done = [event["done"] for event in watched.events if event["event"] == "progress"]
    assert done == [6_000_000, 6_000_000, 6_000_000, 7_000_000]
    assert [event["lost"] for event in watched.events if event["event"] == "retry"] == [6_000_000]


def test_bytes_of_an_earlier_run_do_not_count_as_speed() -> None:
    watched = Watched(BarView)
    content = blob(1, 10_000_000_000)
    with watched.progress as progress:
        progress.on_event(plan(content))
        watched.tell("start", content, content.size)
        watched.tell("progress", content, 5_000_000_000)
        watched.tell("progress", content, 1_000_000)
        assert re.search(r"5 GB of   10 GB +1 MB/s", watched.after(1)[0])


def test_a_mounted_blob_counts_once() -> None:
    watched = Watched(JsonView)
    content = blob(1, 100)
    with watched.progress as progress:
        progress.on_event(plan(content))
        for kind in ("start", "skip", "done"):
            watched.tell(kind, content, content.size)
        watched.after(1)
    progress.summarize("copied")
    kinds = [event["event"] for event in watched.events]
    assert kinds == ["plan", "start", "skip", "progress", "summary"]
    assert watched.events[-2]["done"] == 100
    assert watched.events[-1]["message"] == "copied 0 blobs, 1 already there, 100 B in all"


def test_events_have_stable_names() -> None:
    watched = Watched(JsonView)
    named = blob(1, 3_000_000, **{"vnd.clowder.aimage.name": "x\x1b.wei\u202eght"})
    with watched.progress as progress:
        progress.on_event(plan(named, blob(2, 5)))
        watched.tell("start", named, named.size)
        watched.tell("progress", named, 1_000_000)
        watched.after(1)
        watched.tell("progress", named, -1_000_000)
        progress.note("trying another dialect")
        watched.tell("skip", blob(2, 5), 5)
        watched.tell("done", named, named.size)
    progress.summarize("pulled")
    assert watched.stream.getvalue().isascii()
    assert "\x1b" not in watched.stream.getvalue()
    digest = str(named.digest)
    about = {"digest": digest, "size": 3_000_000, "name": "x\x1b.wei\u202eght"}
    assert watched.events == [
        {
            "event": "plan",
            "level": "info",
            "task": "pulling",
            "reference": str(REFERENCE),
            "digest": str(blob(-1, 1).digest),
            "blobs": 2,
            "size": 3_000_005,
        },
        {"event": "start", "level": "debug", **about},
        {
            "event": "progress",
            "level": "info",
            "done": 1_000_000,
            "total": 3_000_005,
            "rate": 1_000_000,
            "eta": 2.0,
        },
        {"event": "retry", "level": "warning", **about, "lost": 1_000_000},
        {"event": "note", "level": "info", "message": "trying another dialect"},
        {"event": "skip", "level": "debug", "digest": str(blob(2, 5).digest), "size": 5},
        {"event": "done", "level": "debug", **about},
        {
            "event": "summary",
            "level": "info",
            "message": "pulled 1 blob, 1 already there, 3 MB in all",
            "task": "pulling",
            "reference": str(REFERENCE),
            "blobs": 1,
            "alreadyThere": 1,
            "size": 3_000_005,
            "seconds": 1.0,
        },
    ]


def test_a_log_file_receives_lines() -> None:
    watched = Watched(LineView)
    content = blob(1, 10_000_000)
    with watched.progress as progress:
        progress.on_event(plan(content))
        watched.tell("start", content, content.size)
        watched.tell("progress", content, 1_000_000)
        watched.after(5)
    task = f"pulling {REFERENCE}"
    assert watched.stream.getvalue() == f"{task}: 10%, 1 MB of 10 MB, 200 kB/s, ETA 0:45\n"


def test_steps_have_a_position_a_rate_and_an_eta() -> None:
    clock, stream = Clock(), Terminal()
    view = BarView(stream)
    view.interval = NEVER
    with Progress("rendering", unit="steps", view=view, clock=clock) as progress:
        progress.begin(8)
        progress.advance(2)
        clock.now += 5
        progress.refresh()
        assert re.search(r"^rendering .*2 of 8 steps +2.5 s/step +ETA 0:15$", stream.screen[0])
        progress.rename("decoding")
        progress.refresh()
        assert re.search(r"^decoding .*2 of 8 steps", stream.screen[0])
    assert stream.screen == []


def test_an_interrupt_while_a_bar_starts_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    terminal = Terminal()
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        Progress("pulling", REFERENCE, view=LineView(terminal)) as progress,
    ):
        progress.begin(3)


def test_updates_of_several_threads_are_all_counted() -> None:
    blobs = [blob(i, 100_000) for i in range(8)]
    with Progress("pulling") as progress:
        progress.on_event(plan(*blobs))
        view = JsonView(Terminal())

        def move(content: Descriptor) -> None:
            progress.on_event(CopyEvent("start", content, content.size))
            for _ in range(1000):
                progress.on_event(CopyEvent("progress", content, 100))

        threads = [threading.Thread(target=move, args=(content,)) for content in blobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        view.update(progress._meter)
    assert json.loads(view._line)["done"] == 800_000


def test_a_closed_terminal_does_not_stop_the_transfer() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    for kind in (JsonView, BarView):
        view = kind(stream)
        view.interval = 0.0
        with Progress("pulling", REFERENCE, view=view) as progress:
            progress.on_event(plan(blob(1, 5)))
            progress.on_event(CopyEvent("skip", blob(1, 5), 5))
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize("columns", [20, 80])
def test_titles_are_truncated_to_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    watched = Watched(BarView)
    titles = ["模型" * 40, "e\u0301" * 60, "[red]\x1b[2J\nb", "long/name" * 30]
    blobs = [blob(i, 10**10, **{"org.opencontainers.image.title": t}) for i, t in enumerate(titles)]
    with watched.progress as progress:
        progress.on_event(plan(*blobs))
        for content in blobs:
            watched.tell("start", content, content.size)
        lines = watched.after(1.0)
    assert len(lines) == 5
    assert all(cell_len(line) <= columns and line.isprintable() for line in lines)


def test_duration_formats_seconds() -> None:
    assert [format_duration(s) for s in (0, 59.4, 61, 3700, 1e9, None)] == [
        *("0:00", "0:59", "1:01", "1:01:40", "-:--", "-:--")
    ]


class OnTerminal:
    """A command whose stderr is a pseudo-terminal of 80 by 24."""

    def __init__(self, here: Aimage, *arguments: object) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = spawn(
            [*PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=slave,
            stdin=subprocess.DEVNULL,
            env=here.env() | {"TERM": "xterm", "NO_COLOR": "1"},
            cwd=here.home,
        )
        os.close(slave)
        self.text = ""

    def read_until(self, pattern: str) -> bool:
        """Read until the text appears or the command ends."""
        while not re.search(pattern, self.text):
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the end of file of a pseudo-terminal
                data = b""
            if not data:
                return False
            self.text += data.decode()
        return True

    def end(self) -> tuple[int, list[str]]:
        """Return the exit code and the final screen."""
        self.read_until("(?!)")
        os.close(self._master)
        self.process.communicate(timeout=60)
        assert not re.search(r"\x1b\[[\d;]*m", self.text), "colour"
        assert "\x1b[?25l" not in self.text, "the cursor is hidden"
        return self.process.returncode, shown(self.text)


def test_a_pull_on_a_terminal(aimage: Callable[..., Aimage], pushed: str) -> None:
    run = OnTerminal(aimage("there"), "pull", pushed, "--limit-rate", "800k")
    assert run.read_until(r"pulling \d+/13 blobs +[━╸╺ ]* +[\d.]+ .?B of +1.2 MB")
    code, screen = run.end()
    assert code == 0
    assert len(screen) == 1
    assert re.fullmatch("pulled 13 blobs, .* in all", screen[0])


@pytest.mark.integration
def test_an_interrupt_leaves_the_terminal_clean(aimage: Callable[..., Aimage], pushed: str) -> None:
    run = OnTerminal(aimage("there"), "pull", pushed, "--limit-rate", "20k")
    assert run.read_until(r"pulling \d+/13 blobs")
    run.process.send_signal(signal.SIGINT)
    code, screen = run.end()
    assert code == 130
    assert [line for line in screen if line] == ["aimage: interrupted; complete blobs are kept"]


def test_an_up_to_date_pull_draws_nothing(aimage: Callable[..., Aimage], pushed: str) -> None:
    aimage("there")("pull", pushed, "-q")
    done = aimage("there")("pull", pushed)
    assert re.fullmatch("pulled 0 blobs, 13 already there, .* in all\n", done.err)


@pytest.mark.integration
def test_a_dumb_terminal_receives_no_cursor_movements(
    aimage: Callable[..., Aimage], pushed: str
) -> None:
    here = aimage("there")
    here.environment["TERM"] = "dumb"
    master, slave = pty.openpty()
    command = [*PROGRAM, "pull", pushed, "--limit-rate", "500k"]
    done = run(command, stderr=slave, env=here.env(), cwd=here.home, timeout=60)
    os.close(slave)
    text = os.read(master, 65536).decode()
    os.close(master)
    assert done.returncode == 0
    assert "\x1b" not in text
    assert text.splitlines()[-1].startswith("pulled 13 blobs")


def test_a_pull_with_json(aimage: Callable[..., Aimage], pushed: str) -> None:
    done = aimage("there")("pull", pushed, "--json", "-v", "--limit-rate", "2M")
    assert done.value["reference"].startswith(pushed)
    events = [json.loads(line) for line in done.err.splitlines()]
    events = [event for event in events if event["event"] != "request"]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "plan"
    assert kinds[-1] == "summary"
    assert kinds.count("start") == kinds.count("done") == 13
    assert 1 <= kinds.count("progress") <= 2 * events[-1]["seconds"] + 1
    assert events[0]["blobs"] == events[-1]["blobs"] == 13
    assert events[0]["size"] == events[-1]["size"]


@pytest.mark.integration
def test_notes_and_summaries_are_events_with_json(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    here = aimage()
    custom = ("--whole-files", "--manifest-type", "custom")
    done = here("create", repository, tiny, "--json", *custom)
    events = [json.loads(line) for line in done.err.splitlines()]
    assert {event["event"] for event in events} >= {"plan", "note"}
    done = here("push", repository, "--json")
    events = [json.loads(line) for line in done.err.splitlines()]
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert any("trying the clowder dialect" in note for note in notes)
    assert [event["event"] for event in events].count("plan") == 2


@pytest.mark.integration
@pytest.mark.parametrize("options", [("-q",), ("-q", "--json")], ids=" ".join)
def test_quiet_prints_nothing(
    options: tuple[str, ...], aimage: Callable[..., Aimage], pushed: str
) -> None:
    assert aimage("there")("pull", pushed, *options).err == ""


def test_bars_are_only_imported_on_a_terminal() -> None:
    code = "import clowder_aimage.cli.verbs.pull, sys; print('rich' in sys.modules)"
    done = run([sys.executable, "-c", code], text=True, check=True)
    assert done.stdout == "False\n"
