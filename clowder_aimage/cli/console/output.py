"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from clowder_aimage.oci import Descriptor

META = "clowder_aimage.cli."  # where a command line keeps the common options
_UNITS = ("B", "kB", "MB", "GB", "TB")


def result(value: dict[str, Any] | list[Any], text: str, *, as_json: bool) -> None:
    """Print a result: ``text`` for people and shells, ``value`` for programs."""
    if not as_json:
        click.echo(printable(text))
        return
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half a surrogate pair, out of somebody's JSON
        line = json.dumps(value)
    click.echo(line)


def printable(text: str) -> str:
    """``text`` without control characters: what a model says must not move a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain(descriptor: Descriptor) -> dict[str, Any]:
    """What of a descriptor is true wherever it lies: not the names that an index gave it."""
    value = descriptor.to_json()
    return {key: value[key] for key in ("mediaType", "digest", "size") if key in value}


def note(text: str) -> None:
    """Say something that is not the result; with ``--json`` as an event."""
    click.echo(event("note", message=text) if wants_json() else text, err=True)


def wants_json() -> bool:
    """Whether this command line has ``--json``. Only its own thread knows."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(f"{META}as_json"))


def event(kind: str, **fields: Any) -> str:
    """A line of JSON on something that happens; in ASCII, so that nothing in it moves a cursor."""
    return json.dumps({"event": kind, **fields})


def size(count: float) -> str:
    """Bytes for people, in powers of 1000 as disks and networks count."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.3g} {_UNITS[unit]}" if unit else f"{count:.0f} B"


def speed(rate: float, *, stepwise: bool = False) -> str:
    """Bytes or steps per second for people."""
    if not stepwise:
        return f"{size(rate)}/s"
    if 0 < rate < 1:
        return f"{1 / rate:.3g} s/step"
    return f"{rate:.3g} steps/s"


def position(done: int, total: int, *, stepwise: bool = False) -> str:
    """How much of how much, always as wide."""
    if not stepwise:
        return f"{size(done):>7} of {size(total):>7}"
    return f"{done:>{len(str(total))}} of {plural(total, 'step')}"


def duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours where there are any."""
    if seconds is None or seconds >= 100 * 3600:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(count: int) -> str:
    """A count of parameters for people."""
    count = min(count, 10**18)
    for limit, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def plural(count: int, noun: str) -> str:
    """``1 blob``, ``2 blobs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first row being their titles."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
