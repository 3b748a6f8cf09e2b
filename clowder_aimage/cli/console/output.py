"""Output: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

import click

from clowder_aimage.errors import NoSpaceError, StoreError, UsageError, describe_each

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path


# Key prefix for the common options of a command line.
META = "clowder_aimage.cli."
# The key of the verb's words on the command line.
WORDS = "clowder_aimage.words"
# A key in the meta of the command's context.
_SAID = "clowder_aimage.said"
_LEVELS = {
    "error": "error",
    "retry": "warning",
    "wait": "warning",
    "warning": "warning",
} | dict.fromkeys(("start", "skip", "done", "request", "credentials"), "debug")
_UNITS = ("B", "kB", "MB", "GB", "TB")


def print_result(value: dict[str, Any] | list[Any], text: str | Iterable[str]) -> None:
    """Print a result: ``text``, ``value`` as JSON with ``--json``, or by the given template.

    A text is one line, and several texts are several lines, so that no name, type or message from a
    registry or a model adds a line. With a template, each element of a list is a line.
    """
    if (template := _read_option("template")) is not None:
        for element in value if isinstance(value, list) else [value]:
            click.echo(template.render(element))
        return
    if not wants_json():
        lines = [text] if isinstance(text, str) else text
        click.echo("\n".join(map(clean_line, lines)))
        return
    import json

    line = json.dumps(value, ensure_ascii=False)
    # A terminal obeys some characters that JSON allows.
    if not line.isprintable():
        line = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    click.echo(line)


def clean_lines(text: str) -> str:
    """Replace the control characters in a text of a model, but not its line ends."""
    return "\n".join(map(clean_line, text.split("\n")))


def clean_line(text: str) -> str:
    """Replace the control characters and line ends in ``text``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_piece(text: str, *, is_aside: bool = False) -> None:
    """Print a piece of an answer at once: to stdout, or aside, dimmed, to stderr."""
    if is_aside:
        click.secho(clean_text(text), dim=True, err=True, nl=False)
        return
    text = clean_text(text) if sys.stdout.isatty() else text.encode("utf-8", "replace").decode()
    click.echo(text, nl=False)
    sys.stdout.flush()


def clean_text(text: str) -> str:
    """Replace the control characters of a terminal in a text of a model; lines and tabs remain.

    Directional formatting (UAX #9, 2) is replaced too: it changes the order of the text around it.
    """
    if text.isprintable():
        return text
    import unicodedata

    def is_obeyed(character: str) -> bool:
        # Control characters, and surrogates, which UTF-8 cannot encode.
        if unicodedata.category(character) in ("Cc", "Cs"):
            return character not in "\n\t"
        return "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"

    return "".join(
        "\N{REPLACEMENT CHARACTER}" if is_obeyed(character) else character for character in text
    )


def note(text: str) -> None:
    """Print a message to stderr, with ``--json`` as an event."""
    click.echo(format_event("note", message=text) if wants_json() else clean_lines(text), err=True)


def note_once(text: str) -> None:
    """Print a message as ``note``, unless the command has printed it."""
    printed: set[str] = click.get_current_context().meta.setdefault(_SAID, set())
    if text not in printed:
        printed.add(text)
        note(text)


def describe_wait(subject: str, pid: int | None) -> tuple[str, int | None]:
    """Return the message that a process is waited for, and its id if that is known."""
    name = f"process {pid}" if pid else "another process"
    return f"waiting for {name}, which is using {subject}", pid or None


def report_waits() -> None:
    """Let waits for locks of stores be printed, with ``--json`` as events."""
    from clowder_aimage.layout import lock

    is_json = wants_json()

    def print_wait(subject: str, pid: int | None) -> None:
        message, pid = describe_wait(subject, pid)
        line = format_event("wait", message=message, pid=pid) if is_json else clean_lines(message)
        click.echo(line, err=True)

    lock.ON_WAIT[:] = [] if is_quiet() else [print_wait]


def report_warnings() -> None:
    """Let warnings about files of the user be printed, with ``--json`` as events."""
    from clowder_aimage.document import optional_file

    is_json = wants_json()

    def print_warning(message: str) -> None:
        line = f"warning: {message}"
        text = format_event("note", message=line) if is_json else clean_lines(line)
        click.echo(text, err=True)

    optional_file.report_warnings(print_warning)


def report_limits(stores: Iterable[Path]) -> None:
    """Let a warning be issued if a file system lacks something, and the settings be followed."""
    from clowder_aimage.cli.console.store_limit import build_listener
    from clowder_aimage.config.user_directory import use_store_settings
    from clowder_aimage.content import file_system
    from clowder_aimage.document.optional_file import warn

    file_system.ON_LIMIT[:] = [build_listener(stores, warn)]
    use_store_settings()


def remark(text: str) -> None:
    """Print a message to stderr, unless ``-q`` is given."""
    if not is_quiet():
        note(text)


def wants_json() -> bool:
    """Return True if ``--json`` is given. Call this only in the main thread."""
    return _is_given("as_json")


def wants_value() -> bool:
    """Return True if ``--json`` or a template is given. Call this only in the main thread."""
    return wants_json() or _is_given("template")


def is_quiet() -> bool:
    """Return True if ``-q`` is given. Call this only in the main thread."""
    return _is_given("quiet")


def is_verbose() -> bool:
    """Return True if ``-v`` is given. Call this only in the main thread."""
    return _is_given("verbose")


def _is_given(option: str) -> bool:
    return bool(_read_option(option))


def _read_option(option: str) -> Any:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(META + option)


def format_event(kind: str, **fields: Any) -> str:
    """Return an event with its level as a line of ASCII JSON, without control characters."""
    import json

    is_warning = str(fields.get("message")).startswith("warning: ")
    level = "warning" if is_warning else get_event_level(kind)
    return json.dumps({"event": kind, "level": level, **fields})


def get_event_level(kind: str) -> str:
    """Return the level of a kind of event: error, warning, info or debug."""
    return _LEVELS.get(kind, "info")


def format_size(count: float) -> str:
    """Format bytes in powers of 1000."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.3g} {_UNITS[unit]}" if unit else f"{count:.0f} B"


def format_duration(seconds: float | None) -> str:
    """Format minutes and seconds, with hours if there are any."""
    if seconds is None or seconds >= 100 * 3600:
        return "-:--"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def format_number(count: int) -> str:
    """Format a count of parameters."""
    count = min(count, 10**18)
    for limit, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 blob``, ``2 blobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_table(
    rows: Sequence[Sequence[str]], optional: Sequence[str] = (), *, is_whole: bool = False
) -> list[str]:
    """Format columns as lines; the first row contains the titles.

    On a terminal the lines fit its width, unless they are to be whole: digests are shortened, the
    columns with ``optional`` titles are left out in this order, and the widest cells lose their
    middle.
    """
    from clowder_aimage.cli.console import column

    rows = [[clean_line(cell) for cell in row] for row in rows]
    width = None if is_whole else column.get_width()
    return column.align(rows if width is None else column.fit(rows, width, optional))


def build_table(
    titles: Sequence[str],
    rows: Iterable[dict[str, Any]],
    cells: Callable[[dict[str, Any]], Sequence[str]],
    optional: Sequence[str] = (),
    *,
    is_whole: bool = False,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a list and their table; leave out and note rows that cannot be shown."""
    shown_rows: list[dict[str, Any]] = []
    lines: list[Sequence[str]] = [titles]

    def show(row: dict[str, Any]) -> dict[str, Any]:
        lines.append(cells(row))
        return row

    shown_rows += describe_each(rows, show, note_left_out)
    return shown_rows, format_table(lines, optional, is_whole=is_whole)


def note_left_out(row: object, error: Exception) -> None:
    """Note that a row of a list cannot be shown."""
    name = row["reference"] if isinstance(row, dict) else row
    note(f"left out {clean_line(str(name))[:200]}: {clean_line(str(error))[:200]}")


def format_fields(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Format names and values as lines; on a terminal the values are wrapped between words."""
    from clowder_aimage.cli.console import column

    width, terminal = max(11, *(len(name) for name, _ in pairs)), column.get_width()
    lines: list[str] = []
    for name, value in pairs:
        text = clean_line(value)
        pieces = [text] if terminal is None else _wrap_value(text, terminal - width - 1)
        lines += (
            f"{title:<{width}} {piece}"
            for title, piece in zip([name, *[""] * (len(pieces) - 1)], pieces, strict=True)
        )
    return lines


def format_sentence(text: str) -> list[str]:
    """Return a sentence as one line; on a terminal it is wrapped between words."""
    from clowder_aimage.cli.console import column

    terminal = column.get_width()
    return [text] if terminal is None else column.wrap(clean_line(text), terminal)


def _wrap_value(text: str, width: int) -> list[str]:
    from clowder_aimage.cli.console import column

    is_wide = column.measure(text) > width
    return column.wrap(column.shorten_digests(text), width) if is_wide else [text]


def open_standard_stream(standard: TextIO, action: str, hint: str) -> io.FileIO:
    """Return stdin or stdout, unbuffered. Raises UsageError if it is a terminal."""
    import io

    if standard.isatty():
        raise UsageError(f"refusing to {action} a terminal", hint=hint)
    return io.FileIO(standard.fileno(), "rb" if standard is sys.stdin else "wb", closefd=False)


@contextlib.contextmanager
def open_output(name: str) -> Iterator[BinaryIO]:
    """Open a file that is written in full or not at all; ``-`` is stdout. Raises AImageError."""
    from pathlib import Path

    from clowder_aimage.content.atomic_file import DISK_FULL, open_atomic
    from clowder_aimage.content.file_system import ADVICE
    from clowder_aimage.content.open_directory import open_special, resolve

    try:
        path = resolve(Path(name))
        if name == "-":
            raw = open_standard_stream(
                sys.stdout, "write bytes to", "set a file with -o, or use a pipe"
            )
            yield cast(BinaryIO, raw)
        elif path.exists() and not path.is_file():
            # A device or a pipe.
            with open_special(path) as file:
                yield file
        else:
            with open_atomic(path) as file:
                yield file
    except BrokenPipeError:
        # The reader of the pipe has closed it, which is not an error of a verb.
        raise
    except OSError as error:
        kind = NoSpaceError if error.errno in DISK_FULL else StoreError
        advice = ADVICE.get(error.errno or 0)
        raise kind(f"cannot write {name}: {error.strerror or error}", hint=advice) from None
