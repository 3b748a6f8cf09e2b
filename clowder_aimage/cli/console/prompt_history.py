"""The history of typed prompts, in a file that only this user can read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_LINES = 1000
_MAX_FILE = 1 << 20  # bytes


@contextlib.contextmanager
def prompt_history() -> Iterator[None]:
    """Let the lines of ``input`` be edited and recalled; keep them for the next time.

    The object ``run`` of the configuration turns that off: ``"history": false``. A history that
    cannot be read or written is left out.
    """
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    from clowder_aimage.schema import read_configuration
    from clowder_aimage.user_directory import config_file, history_file

    run = read_configuration(config_file(), lambda it: it.get("run", {})) or {}
    if not run.get("history", True):
        yield
        return
    file = history_file()
    readline.clear_history()
    for line in _read(file):
        readline.add_history(line)
    try:
        yield
    finally:
        count = readline.get_current_history_length()
        lines = (readline.get_history_item(index + 1) for index in range(count))
        _write(file, [line for line in lines if line][-_LINES:])


def _read(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE).decode(errors="replace").splitlines()
    except OSError:
        return []


def _write(file: Path, lines: list[str]) -> None:
    from clowder_aimage.content.atomic_file import atomic_file

    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(file, mode=0o600, durable=False) as opened:
            opened.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
