"""Prompts: one of the arguments or of stdin, or line by line from a terminal."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console import column
from clowder_aimage.cli.console.interruption import interruption
from clowder_aimage.cli.console.output import clean_line, note
from clowder_aimage.cli.console.prompt_completion import completing
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import AImageError, UsageError

# Bytes of stdin.
_MAX_PROMPT = 1 << 20
# Quotes around a prompt of several lines.
_QUOTES = '"""'
# Lines that are kept.
_HISTORY = 1000
# Bytes of the file of the history.
_MAX_HISTORY = 1 << 20
_ENDS = ("/bye", "/exit", "/quit")
_INDENT = 17  # columns of commands in the help
_WIDTH = 80  # columns of an output that is not a terminal
_COMMON = {
    '"""': 'begin a text of several lines, which ends with """',
    "/set NAME VALUE": "set an option: {names}",
    "/set NAME": "restore the default of an option",
    "/set": "show the options (or /show)",
    "/help": "show this text",
    "/bye": "end (or Ctrl-D)",
}

# A line in the help, and a function.
Command = tuple[str, Callable[[], None]]


def read_prompt(words: tuple[str, ...]) -> str | None:
    """Return the prompt in the arguments or on stdin; None for a terminal. Raises UsageError."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not words and has_terminal:
        if not sys.stdout.isatty():
            raise UsageError("the prompt is missing", hint="aimage run REF PROMPT")
        return None
    return _read_stdin() if words in ((), ("-",)) else " ".join(words)


def check_prompt(prompt: str) -> None:
    """Raise UsageError for an empty prompt."""
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="aimage run REF PROMPT")


def _read_stdin() -> str:
    if sys.stdin is None:
        return ""
    # One byte more shows that the prompt is too long.
    data = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(data) > _MAX_PROMPT:
        raise UsageError(f"the prompt on stdin exceeds {_MAX_PROMPT} bytes")
    try:
        return recode_file(data).decode().strip()
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not valid UTF-8 text") from None


@dataclass(slots=True)
class PromptLoop:
    """Prompts that are read until the end of the input, and the commands between them.

    introduction: the line of the help about prompts. make: called with each prompt; its errors are
    printed, and an interrupt cancels it. values: the options by the names of their parameters, set
    by commands; options: those that can be set, by the names that users type. commands: others.
    """

    introduction: str
    make: Callable[[str], object]
    values: MutableMapping[str, Any]
    options: Mapping[str, click.Option]
    commands: Mapping[str, Command] = field(default_factory=dict)

    def run(self) -> None:
        """Read until the end of the input."""
        note("type a prompt, or /help; Tab completes commands and options")
        words = ["/set", "/show", "/help", *self.commands, *_ENDS]
        with keep_history(), completing(self.options, words):
            while self._step():
                pass

    def _step(self) -> bool:
        """Read and handle a line; return False at the end."""
        try:
            line = _read()
            if line in _ENDS:
                return False
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self.make(line)
        except EOFError:
            note("")
            return False
        except KeyboardInterrupt:
            # The loop goes on: a later error is not caused by this interruption.
            interruption.is_pending = False
            note("\ncancelled; /bye or Ctrl-D ends")
        except UnicodeDecodeError:
            note("aimage: the line is not valid text")
        except AImageError as error:
            hint = format_advice(error)
            note(f"aimage: {error.message}\n  {hint}" if hint else f"aimage: {error}")
        return True

    def _run_command(self, line: str) -> None:
        word, *arguments = line.split(maxsplit=2)
        if word in self.commands and not arguments:
            self.commands[word][1]()
        elif word == "/set" and arguments:
            self._set(arguments[0].lstrip("-"), arguments[1] if len(arguments) > 1 else None)
        elif word in ("/set", "/show") and not arguments:
            note("\n".join(self._format_values()))
        elif word in ("/help", "/?"):
            note("\n".join([self.introduction, *self._format_help()]))
        else:
            raise UsageError(f"unknown command {word}", hint="/help lists the commands")

    def _format_values(self) -> list[str]:
        """Return the options with their values in columns."""
        width = column.get_width() or _WIDTH
        values = [
            f"{name} {clean_line(_format_value(self.values, option))}"
            for name, option in self.options.items()
        ]
        return column.fill([column.cut_middle(text, width // 2 - 2) for text in values], width)

    def _format_help(self) -> list[str]:
        loop_commands = {name: text for name, (text, _) in self.commands.items()}
        names, width = ", ".join(self.options), column.get_width() or _WIDTH
        lines: list[str] = []
        for name, text in (loop_commands | _COMMON).items():
            first, *others = column.wrap(text.format(names=names), width - _INDENT)
            lines += [f"{name:<{_INDENT}}{first}", *(f"{'':{_INDENT}}{line}" for line in others)]
        return lines

    def _set(self, name: str, text: str | None) -> None:
        """Set an option as on the command line. Raises UsageError."""
        option = self.options.get(name)
        if option is None:
            nearest = find_nearest(name, self.options)
            hint = f"did you mean {nearest}?" if nearest else "/set alone lists the options"
            raise UsageError(f"unknown option {name}", hint=hint)
        key = str(option.name)
        # Without a default, click has None or a sentinel of its own.
        if text is None:
            is_plain = isinstance(option.default, bool | int | float | str)
            self.values[key] = () if option.multiple else option.default if is_plain else None
            return
        argument = _split_words(text) if option.multiple else text
        try:
            self.values[key] = option.process_value(click.get_current_context(), argument)
        except click.BadParameter as error:
            raise UsageError(f"invalid value for {name}: {error.message}") from None


def list_settable_options(names: Sequence[str]) -> dict[str, click.Option]:
    """Return options of the verb by the names that users type."""
    return {
        max(option.opts, key=len).lstrip("-"): option
        for option in click.get_current_context().command.params
        if isinstance(option, click.Option) and option.name in names
    }


def _read() -> str:
    """Return a line, or the text of several lines in triple quotes."""
    line = _read_line(">>> ").strip()
    if not line.startswith(_QUOTES):
        return line
    text = line.removeprefix(_QUOTES)
    while not text.endswith(_QUOTES):
        text += f"\n{_read_line('... ').rstrip()}"
    return text.removesuffix(_QUOTES).strip()


def _read_line(prompt: str) -> str:
    """Return a line. A timer interrupts ``input``: it misses a Ctrl-C just before it waits."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        return input(prompt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@dataclass(slots=True)
class PictureLoop:
    """The last prompt of pictures, and the files made of it."""

    make: Callable[[str], tuple[str, ...]]
    prompt: str = ""
    paths: tuple[str, ...] = ()

    def draw(self, prompt: str) -> None:
        """Generate pictures of a prompt."""
        self.prompt = prompt
        self.paths = self.make(prompt)

    def draw_again(self) -> None:
        """Generate pictures of the last prompt. Raises UsageError."""
        if not self.prompt:
            raise UsageError("there is no prompt yet")
        self.draw(self.prompt)

    def open(self) -> None:
        """Open the last pictures. Raises UsageError."""
        if not self.paths:
            raise UsageError("there is no picture yet")
        for path in self.paths:
            if click.launch(path):
                raise UsageError(f"no program opens {path}")


def read_prompts(
    make: Callable[[str], tuple[str, ...]],
    values: MutableMapping[str, Any],
    options: Mapping[str, click.Option],
) -> None:
    """Generate pictures of prompts until the end of the input; ``make`` returns their paths."""
    loop = PictureLoop(make)
    commands = {
        "/again": ("generate a picture of the last prompt again", loop.draw_again),
        "/open": ("open the last picture", loop.open),
    }
    PromptLoop("Type a prompt to generate a picture.", loop.draw, values, options, commands).run()


def _split_words(text: str) -> list[str]:
    """Return words, or one file whose name has spaces; quotes work as in a shell."""
    try:
        return [text] if Path(text).is_file() else shlex.split(text)
    except ValueError as error:
        raise UsageError(f"invalid quotes: {error}") from None


def _format_value(values: Mapping[str, Any], option: click.Option) -> str:
    value = values[str(option.name)]
    if option.multiple:
        return " ".join(map(str, value)) or "none"
    if isinstance(value, tuple):
        return ("x" if option.name == "size" else ",").join(map(str, value))
    return "default" if value is None else str(value)


@contextlib.contextmanager
def keep_history() -> Iterator[None]:
    """Let the lines of ``input`` be edited and recalled; keep them for the next time.

    The object ``run`` of the configuration turns that off: ``"history": false``. A history that
    cannot be read or written is left out.
    """
    try:
        import readline
    except ImportError:
        # Python may be built without readline.
        yield
        return
    from clowder_aimage.config.user_directory import read_user_configuration, resolve_history_file

    run = read_user_configuration(lambda it: it.get("run", {})) or {}
    file = resolve_history_file()
    if file is None or not run.get("history", True):
        yield
        return
    readline.clear_history()
    for line in _read_history(file):
        readline.add_history(line)
    try:
        yield
    finally:
        count = readline.get_current_history_length()
        lines = (readline.get_history_item(index + 1) for index in range(count))
        _write_history(file, [line for line in lines if line][-_HISTORY:])


def _read_history(file: Path) -> list[str]:
    from clowder_aimage.document.optional_file import read_optional

    text = read_optional(file, lambda raw: raw[:_MAX_HISTORY].decode(errors="replace"))
    return (text or "").splitlines()


def _write_history(file: Path, lines: list[str]) -> None:
    from clowder_aimage.content.atomic_file import open_atomic

    with contextlib.suppress(OSError):
        # Prompts are private.
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_atomic(file, mode=0o600, durable=False) as opened:
            opened.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
