"""Pictures in a terminal: detection, and the escape sequences, decoded again."""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from clowder_aimage.cli.console.terminal_picture import (
    ITERM2,
    KITTY,
    SIXEL,
    escape_picture,
    find_protocol,
)
from tests.cli.test_remote_verbs import at, drawing
from tests.process import PROGRAM, Aimage, spawn_at
from tests.scripted_worker import ScriptedWorker
from tests.wait import until

__all__ = ["at"]
XTERM = {"TERM": "xterm-256color"}


def picture(kind: str = "PNG") -> bytes:
    """Return 40 x 15 pixels: red, green and blue bars, with a black line below."""
    image = Image.new("RGB", (40, 15))
    for left, colour in ((0, (255, 0, 0)), (10, (0, 255, 0)), (20, (0, 0, 255))):
        image.paste(colour, (left, 0, 40, 14))
    buffer = io.BytesIO()
    image.save(buffer, kind, **({} if kind == "PNG" else {"quality": 95}))
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, KITTY),
        (XTERM | {"KITTY_WINDOW_ID": "1"}, KITTY),
        (XTERM | {"TERM_PROGRAM": "ghostty"}, KITTY),
        *((XTERM | {"TERM_PROGRAM": p}, ITERM2) for p in ("iTerm.app", "WezTerm", "vscode")),
        (XTERM | {"LC_TERMINAL": "iTerm2"}, ITERM2),
        ({"TERM": "dumb", "TERM_PROGRAM": "WezTerm"}, ""),
        ({}, ""),
    ],
)
def test_the_environment_names_the_terminal(environment: dict[str, str], protocol: str) -> None:
    assert find_protocol(environment) == protocol


def test_kitty_is_sent_a_png_in_chunks() -> None:
    data = picture() + bytes(9000)  # what follows the end of a PNG is ignored
    shown = escape_picture(data, KITTY, 80)
    parts = re.findall("\x1b_G([^;]*);([^\x1b]*)\x1b\\\\", shown)
    assert shown == "".join(f"\x1b_G{keys};{text}\x1b\\" for keys, text in parts) + "\n"
    assert parts[0][0] == "a=T,f=100,q=2,c=4,m=1"
    assert [keys for keys, _ in parts[1:]] == ["m=1"] * (len(parts) - 2) + ["m=0"]
    assert all(len(text) <= 4096 for _, text in parts)
    assert base64.b64decode("".join(text for _, text in parts)) == data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_iterm2_is_sent_a_png(kind: str) -> None:
    shown = escape_picture(picture(kind), ITERM2, 3)
    found = re.fullmatch("\x1b]1337;File=inline=1;size=([0-9]+);width=2;[^:]*:(.*)\x07\n", shown)
    assert found is not None
    data = base64.b64decode(found[2])
    assert len(data) == int(found[1])
    assert (pixels(data) == pixels(picture(kind))).all()


def decode_sixel(text: str) -> np.ndarray:
    """Return the pixels of sixels (DEC STD 070)."""
    head = re.match('\x1bPq"1;1;([0-9]+);([0-9]+)', text)
    assert head is not None and text.endswith("\x1b\\\n")
    width, height = int(head[1]), int(head[2])
    canvas = np.full((height + 6, width, 3), 77, int)
    palette: dict[str, list[int]] = {}
    x = y = 0
    colour = ""
    token = r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|!(\d+)([?-~])|([?-~])|([$-])"
    for match in re.finditer(token, text[head.end() : -3]):
        number, red, green, blue, chosen, count, repeated, single, move = match.groups()
        if number:
            palette[number] = [round(int(each) * 2.55) for each in (red, green, blue)]
        elif chosen:
            colour = chosen
        elif move:
            x, y = 0, y + (6 if move == "-" else 0)
        for _ in range(int(count or 1) if repeated or single else 0):
            for bit in range(6):
                if (ord(repeated or single) - 63) >> bit & 1:
                    canvas[y + bit, x] = palette[colour]
            x += 1
    assert (canvas[height:] == 77).all()
    return canvas[:height]


def test_sixels_are_the_picture() -> None:
    assert (decode_sixel(escape_picture(picture(), SIXEL, 80)) == pixels(picture())).all()
    assert decode_sixel(escape_picture(picture(), SIXEL, 3)).shape == (8, 20, 3)


ASK = """
import sys, termios
from clowder_aimage.cli.console.terminal_picture import find_protocol
before = termios.tcgetattr(0)
print("found", repr(find_protocol({"TERM": "xterm", "TMUX": "x", "KITTY_WINDOW_ID": "1"})))
print("same", termios.tcgetattr(0) == before)
"""


@pytest.mark.parametrize(
    ("answer", "protocol"),
    [
        (b"\x1b_Gi=31;OK\x1b\\\x1b[?62;4c", KITTY),
        (b"", ""),
    ],
)
def test_a_terminal_is_asked(answer: bytes, protocol: str) -> None:
    master, slave = pty.openpty()
    child = spawn_at(slave, [sys.executable, "-c", ASK])
    shown = screen_of(master, answer)
    assert child.wait(60) == 0
    assert f"found {protocol!r}" in shown
    assert "same True" in shown


def screen_of(master: int, answer: bytes = b"") -> str:
    """Return what a child writes to a terminal, which answers a query once."""
    shown = b""
    try:
        while data := os.read(master, 1 << 16):
            shown += data
            if answer and b"\x1b[c" in shown:
                os.write(master, answer)
                answer = b""
    except OSError:  # the end of file of a pseudo-terminal
        pass
    finally:
        os.close(master)
    return shown.decode()


@pytest.mark.parametrize(
    ("terminal", "options", "shape"),
    [
        ({"TERM_PROGRAM": "WezTerm"}, (), "\x1b]1337;File=inline=1;[^:]*:(.*)\x07"),
        ({"KITTY_WINDOW_ID": "1"}, (), "\x1b_Ga=T,f=100,q=2[^;]*;([^\x1b]*)\x1b"),
        ({}, ("--open",), '\x1bPq"1;1;'),  # it answers that it shows sixels
        ({"TERM_PROGRAM": "WezTerm"}, ("--no-show",), ""),
        ({"TERM_PROGRAM": "WezTerm"}, ("--json",), ""),
    ],
    ids=["iterm2", "kitty", "sixel", "no-show", "json"],
)
def test_run_draws_the_picture_in_the_terminal(
    at: Callable[[ScriptedWorker], Aimage],
    terminal: dict[str, str],
    options: tuple[str, ...],
    shape: str,
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        viewer = here.home / "bin" / "xdg-open"
        viewer.parent.mkdir()
        viewer.write_text('#!/bin/sh\nprintf %s "$1" >>opened.part; mv opened.part opened\n')
        viewer.chmod(0o755)
        path = {"PATH": f"{viewer.parent}:{os.environ['PATH']}"}
        master, slave = pty.openpty()
        # The terminal ends with the program: its signal must not end the viewer
        command = ["/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *PROGRAM]
        command += ["run", "tiny", "a fox", "--seed", "7", *options]
        child = spawn_at(slave, command, env=here.env() | XTERM | terminal | path, cwd=here.home)
        shown = screen_of(master, b"\x1b[?62;4;22c")
    assert child.wait(60) == 0
    (written,) = here.home.glob("*.png")
    assert written.name in shown
    drawn = re.search(shape or "\x1b(P|]1337|_Ga)", shown)
    assert (drawn is not None) == bool(shape)
    if drawn and "--open" in options:
        assert escape_picture(written.read_bytes(), SIXEL, 80).strip() in shown
        opened = here.home / "opened"
        until(opened.exists, "the file of the viewer")  # a program that is not waited for
        assert (here.home / opened.read_text()).samefile(written)
    elif drawn:
        assert base64.b64decode(drawn[1]) == written.read_bytes()


def test_show_without_a_terminal_is_a_warning(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        done = at(worker)("run", "tiny", "a fox", "--show")
    assert "not a terminal that can show pictures" in done.err
    assert "\x1b" not in done.out + done.err
