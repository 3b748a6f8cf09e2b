"""Words that Tab completes while prompts are read: commands, options and their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from types import ModuleType

_SET = "/set"
# readline of macOS is libedit, whose file of settings has another syntax.
_BINDINGS = {False: "tab: complete", True: "bind ^I rl_complete"}


def list_completions(
    line: str, options: Mapping[str, click.Option], commands: Sequence[str]
) -> list[str]:
    """Return the words that may replace the last word of a line; none in a prompt."""
    words = line.split(" ")
    last = words[-1]
    if len(words) == 1:
        found = [command for command in commands if command.startswith("/")]
        texts = [f"{_SET} " if command == _SET else command for command in found]
        return [text for text in texts if last and text.startswith(last)]
    if words[0] != _SET:
        return []
    if len(words) == 2:
        return [f"{name} " for name in options if name.startswith(last)]
    option = options.get(words[1])
    return [] if option is None else _list_values(option, last)


def _list_values(option: click.Option, start: str) -> list[str]:
    """Return the values of an option that begin with a text: choices, names or files."""
    if option.is_flag:
        return [text for text in ("true", "false") if text.startswith(start)]
    items = option.shell_complete(click.get_current_context(), start)
    texts = [item.value for item in items if item.type not in ("file", "dir")]
    if any(item.type in ("file", "dir") for item in items):
        texts += _list_files(start)
    return texts


def _list_files(start: str) -> list[str]:
    """Return files whose names begin with a text; directories end with a slash.

    Names with spaces are left out: a space ends the word that is completed.
    """
    head, slash, tail = start.rpartition("/")
    with contextlib.suppress(OSError):
        return sorted(
            f"{head}{slash}{path.name}{'/' if path.is_dir() else ''}"
            for path in Path(f"{head}{slash}" or ".").expanduser().iterdir()
            if path.name.startswith(tail)
            and " " not in path.name
            and (tail or not path.name.startswith("."))
        )
    return []


@contextlib.contextmanager
def completing(options: Mapping[str, click.Option], commands: Sequence[str]) -> Iterator[None]:
    """Let Tab complete the words of ``input``, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    matches: list[str] = []

    def complete(_: str, state: int) -> str | None:
        # readline asks for one match after another.
        if state == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            matches[:] = list_completions(line, options, commands)
        return matches[state] if state < len(matches) else None

    before = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind(_BINDINGS[_is_libedit(readline)])
    try:
        yield
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])


def _is_libedit(readline: ModuleType) -> bool:
    return "libedit" in (readline.__doc__ or "")
