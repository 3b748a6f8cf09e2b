"""Pictures that are shown when they were written: in the terminal, or in a viewer."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from clowder_aimage.cli.console.output import is_quiet, remark, wants_value


def choose_protocol(is_shown: bool | None) -> str:
    """Return the protocol for pictures in the terminal; empty if none are drawn."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and sys.stderr.isatty()
    if is_shown is False or not is_terminal or wants_value() or is_quiet():
        return ""
    from clowder_aimage.cli.console.terminal_picture import find_protocol

    return find_protocol(os.environ)


def draw_picture(path: Path, protocol: str, *, is_wanted: bool) -> None:
    """Draw a picture in the terminal; say if that cannot be done, and is wanted."""
    if not protocol:
        if is_wanted:
            remark("warning: the output is not a terminal that can show pictures")
        return
    from clowder_aimage.cli.console.terminal_picture import escape_picture

    # The picture has been written.
    with contextlib.suppress(OSError, ImportError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        sys.stderr.write(escape_picture(path.read_bytes(), protocol, columns or 80))
        sys.stderr.flush()


def open_picture(path: Path, is_wanted: bool | None) -> None:
    """Open a picture in a viewer; by default on macOS, if stdout is a terminal."""
    if is_wanted if is_wanted is not None else (sys.platform == "darwin" and sys.stdout.isatty()):
        if click.launch(str(path)):
            remark(f"warning: no program opens {path}")
