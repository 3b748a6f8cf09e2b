"""Prompts: one of the arguments or of stdin, or line by line from a terminal."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.output import facts, note
from clowder_aimage.cli.console.remedy import advice
from clowder_aimage.errors import AImageError, UsageError

_MAX_PROMPT = 1 << 20  # bytes of stdin
_HELP = """\
Type a prompt to generate a picture.
/again           generate a picture of the last prompt again
/open            open the last picture
/set NAME VALUE  set an option: {names}
/set NAME        restore the default of an option
/show            show the options
/help            show this text
/bye             end (or Ctrl-D)"""


def read_prompt(words: tuple[str, ...]) -> str | None:
    """Return the prompt in the arguments or on stdin; None for a terminal. Raises UsageError."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not words and has_terminal:
        if not sys.stdout.isatty():
            raise UsageError("the prompt is missing", hint="aimage run REF PROMPT")
        return None
    prompt = " ".join(words)
    if words in ((), ("-",)):
        prompt = _standard_input()
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="aimage run REF PROMPT")
    return prompt


def _standard_input() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(data) > _MAX_PROMPT:
        raise UsageError(f"the prompt on stdin exceeds {_MAX_PROMPT} bytes")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not valid UTF-8 text") from None


def read_prompts(
    make: Callable[[str], tuple[str, ...]],
    values: MutableMapping[str, Any],
    options: dict[str, click.Option],
) -> None:
    """Call ``make`` with each prompt until the end of the input; set ``values`` by commands.

    Errors of ``make`` are printed; an interrupt cancels it.

    Args:
        make: Generates pictures of a prompt, and returns their paths.
        values: The values of the options, by the names of their parameters.
        options: The options that can be set, by the names that users type.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (a side effect: history and editing in input())
    prompt, paths = "", tuple[str, ...]()
    note("type a prompt, or /help")
    while True:
        try:
            line = input(">>> ").strip()
            if line in ("/bye", "/exit", "/quit"):
                return
            if line.startswith("/") and line != "/again":
                _command(line, values, options, paths)
            elif line:
                prompt = prompt if line == "/again" else line
                if not prompt:
                    raise UsageError("there is no prompt yet")
                paths = make(prompt)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\ncancelled; /bye or Ctrl-D ends")
        except UnicodeDecodeError:
            note("aimage: the line is not valid text")
        except AImageError as error:
            hint = advice(error)
            note(f"aimage: {error.message}\n  {hint}" if hint else f"aimage: {error}")


def _open(paths: tuple[str, ...]) -> None:
    if not paths:
        raise UsageError("there is no picture yet")
    for path in paths:
        if click.launch(path):
            raise UsageError(f"no program opens {path}")


def _command(
    line: str,
    values: MutableMapping[str, Any],
    options: dict[str, click.Option],
    paths: tuple[str, ...],
) -> None:
    word, *rest = line.split(maxsplit=2)
    if word == "/open" and not rest:
        _open(paths)
    elif word == "/set" and rest:
        _set(rest[0].lstrip("-"), rest[1] if len(rest) > 1 else None, values, options)
    elif word == "/show" and not rest:
        note("\n".join(facts([(name, _shown(values, each)) for name, each in options.items()])))
    elif word in ("/help", "/?", "/set"):
        note(_HELP.format(names=", ".join(options)))
    else:
        raise UsageError(f"unknown command {word}", hint="/help lists the commands")


def _set(
    name: str,
    text: str | None,
    values: MutableMapping[str, Any],
    options: dict[str, click.Option],
) -> None:
    """Set an option as on the command line. Raises UsageError."""
    option = options.get(name)
    if option is None:
        raise UsageError(f"unknown option {name}", hint=f"expected one of: {', '.join(options)}")
    if text is None:  # without a default, click has None or a sentinel of its own
        is_plain = isinstance(option.default, bool | int | float | str)
        values[str(option.name)] = () if option.multiple else option.default if is_plain else None
        return
    given = _words(text) if option.multiple else text
    try:
        values[str(option.name)] = option.process_value(click.get_current_context(), given)
    except click.BadParameter as error:
        raise UsageError(f"invalid value for {name}: {error.message}") from None


def _words(text: str) -> list[str]:
    """Return words, or one file whose name has spaces; quotes work as in a shell."""
    try:
        return [text] if Path(text).is_file() else shlex.split(text)
    except ValueError as error:
        raise UsageError(f"invalid quotes: {error}") from None


def _shown(values: MutableMapping[str, Any], option: click.Option) -> str:
    value = values[str(option.name)]
    if option.multiple:
        return " ".join(map(str, value)) or "none"
    if isinstance(value, tuple):
        return ("x" if option.name == "size" else ",").join(map(str, value))
    return "default" if value is None else str(value)
