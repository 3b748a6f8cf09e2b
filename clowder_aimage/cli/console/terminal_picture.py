"""Pictures in a terminal, by the protocol that it supports.

Kitty's graphics protocol (kitty, Ghostty, Konsole), iTerm2's inline images (also WezTerm, VS Code,
mintty) and sixel (DEC STD 070, "Sixel Graphics"). Environment variables name the terminal; any
other is asked.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import select
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

KITTY, ITERM2, SIXEL = "kitty", "iterm2", "sixel"
_PROGRAMS = {
    **dict.fromkeys(("kitty", "ghostty"), KITTY),
    **dict.fromkeys(("iTerm.app", "iTerm2", "WezTerm", "vscode", "mintty"), ITERM2),
}
_TERMS = {"xterm-kitty": KITTY, "xterm-ghostty": KITTY}
# a query of kitty's protocol, then of the terminal's attributes (DA1), which every terminal answers
_QUERY = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\\x1b[c"
_ATTRIBUTES = re.compile(rb"\x1b\[\?([0-9;]*)c")
# Seconds for an answer, also over a network.
_TIMEOUT = 0.3
# Bytes of base64 in an escape sequence of kitty.
_CHUNK = 4096
# Approximate number of pixels in a column.
_CELL = 10
_COLUMNS = 60
_COLOURS = 256
_REPEATED = re.compile(r"(.)\1{3,}")


def find_protocol(environment: Mapping[str, str]) -> str:
    """Return the protocol of the terminal of this process; empty if it shows no pictures."""
    term = environment.get("TERM", "dumb")
    if term in ("dumb", "linux", ""):
        return ""
    # a multiplexer hides the terminal that the variables name
    if "TMUX" not in environment and not term.startswith(("screen", "tmux")):
        names = (environment.get("TERM_PROGRAM", ""), environment.get("LC_TERMINAL", ""))
        protocols = [_TERMS.get(term, ""), *(_PROGRAMS.get(name, "") for name in names)]
        if "KITTY_WINDOW_ID" in environment:
            protocols.append(KITTY)
        if protocol := next(filter(None, protocols), ""):
            return protocol
    with contextlib.suppress(OSError, ImportError):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            return ask(terminal)
        finally:
            os.close(terminal)
    return ""


def ask(terminal: int, timeout: float = _TIMEOUT) -> str:
    """Return the protocol that the terminal with this descriptor states; empty for none.

    Raises:
        OSError: It is not a terminal.
    """
    import termios

    # A write would stop a process in the background.
    if os.tcgetpgrp(terminal) != os.getpgrp():
        return ""
    try:
        saved = termios.tcgetattr(terminal)
        raw = termios.tcgetattr(terminal)
        # The answer has no line end, and must not appear on the screen.
        raw[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(terminal, termios.TCSANOW, raw)
        try:
            os.write(terminal, _QUERY)
            answer = _read(terminal, time.monotonic() + timeout)
        finally:
            termios.tcsetattr(terminal, termios.TCSANOW, saved)
    except termios.error as error:
        raise OSError(str(error)) from None
    if b"\x1b_Gi=31;OK" in answer:
        return KITTY
    attributes = _ATTRIBUTES.search(answer)
    return SIXEL if attributes and b"4" in attributes[1].split(b";") else ""


def _read(terminal: int, end: float) -> bytes:
    answer = b""
    while _ATTRIBUTES.search(answer) is None:
        if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            break
        data = os.read(terminal, 1024)
        if not data:
            break
        answer += data
    return answer


def escape_picture(data: bytes, protocol: str, columns: int) -> str:
    """Return the escape sequences that show a PNG, JPEG or WebP file, and a newline."""
    from PIL import Image as Images

    with Images.open(io.BytesIO(data)) as image:
        width, kind = image.width, image.format
        cells = max(1, min(columns - 1, _COLUMNS, width // _CELL))
        if protocol == SIXEL:
            image.thumbnail((cells * _CELL, image.height))
            return _encode_sixel(image.convert("RGB")) + "\n"
        if kind != "PNG":
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            data = buffer.getvalue()
    text = base64.b64encode(data).decode()
    if protocol == ITERM2:
        shape = f"inline=1;size={len(data)};width={cells};preserveAspectRatio=1"
        return f"\x1b]1337;File={shape}:{text}\x07\n"
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    sequences = [
        f"\x1b_Gm={int(n < len(chunks))};{chunk}\x1b\\" for n, chunk in enumerate(chunks, 1)
    ]
    # Only the first sequence has the parameters of the picture.
    sequences[0] = sequences[0].replace("\x1b_G", f"\x1b_Ga=T,f=100,q=2,c={cells},", 1)
    return "".join(sequences) + "\n"


def _encode_sixel(image: Image.Image) -> str:
    """Return an RGB picture as sixels: bands of six rows, drawn colour by colour."""
    indexed = image.quantize(_COLOURS)
    palette, pixels, width = indexed.getpalette() or [], indexed.tobytes(), indexed.width
    colours = range(len(palette) // 3)
    out = [f'\x1bPq"1;1;{width};{indexed.height}']
    for number in colours:
        red, green, blue = (round(channel * 100 / 255) for channel in palette[3 * number :][:3])
        out.append(f"#{number};2;{red};{green};{blue}")
    for top in range(0, indexed.height, 6):
        rows: dict[int, bytearray] = {}
        band = pixels[top * width : (top + 6) * width]
        for offset, colour in enumerate(band):
            row = rows.get(colour)
            if row is None:
                row = rows[colour] = bytearray(b"?" * width)
            # A sixel is a character for six rows: "?" and a bit for the pixel of each row.
            row[offset % width] += 1 << offset // width
        out.append("$".join(f"#{c}{_REPEATED.sub(_run, r.decode())}" for c, r in rows.items()))
        out.append("-")
    return "".join(out) + "\x1b\\"


def _run(match: re.Match[str]) -> str:
    return f"!{len(match[0])}{match[1]}"
