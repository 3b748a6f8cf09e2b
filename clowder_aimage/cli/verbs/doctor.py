"""``aimage doctor``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import clean_line, format_count, print_result

_WIDTH = 80


@examples("aimage doctor", "aimage doctor --offline", "aimage doctor --json")
@verb
@click.option("--offline", is_flag=True, help="Make no connection: leave out those checks.")
def doctor(offline: bool) -> None:
    """Check this installation, this machine, and its connections.

    Each line is ok, a warning or an error; the line below says what to do. Registries, the hub,
    the worker and NATS have three seconds to answer. Nothing is changed, and no secret is shown.

    The exit code is 1 if there is an error.
    """
    from clowder_aimage.cli.doctor.examination import examine
    from clowder_aimage.cli.doctor.finding import Level
    from clowder_aimage.cli.doctor.machine import build_checks
    from clowder_aimage.config.user_directory import read_client_options
    from clowder_aimage.document.optional_file import report_warnings
    from clowder_aimage.errors import UsageError
    from clowder_aimage.registry import ClientOptions

    # The checks report these files.
    report_warnings(lambda _: None)
    try:
        connection = read_client_options()
    except UsageError:
        connection = ClientOptions()
    settings = get_settings()
    results = list(examine(build_checks(lambda: settings.stores, connection), is_offline=offline))
    findings = [(result.name, finding) for result in results for finding in result.findings]
    counts = {level: sum(each.level is level for _, each in findings) for level in Level}
    rows = [
        {
            "check": name,
            "level": str(finding.level),
            "message": finding.message,
            "advice": finding.advice or None,
            "facts": dict(finding.facts),
        }
        for name, finding in findings
    ]
    summary = f"{format_count(counts[Level.WARNING], 'warning')}, " + format_count(
        counts[Level.ERROR], "error"
    )
    value = {
        "ok": not counts[Level.ERROR],
        "warnings": counts[Level.WARNING],
        "errors": counts[Level.ERROR],
        "offline": offline,
        "findings": rows,
    }
    print_result(value, [*_format_rows(rows), summary])
    if counts[Level.ERROR]:
        click.get_current_context().exit(1)


def _format_rows(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield lines of up to 80 columns; only words that are longer make longer ones."""
    for row in rows:
        head = f"{row['level']:<8} {row['check']:<9} "
        yield from _wrap(head, " " * len(head), row["message"])
        if row["advice"]:
            yield from _wrap(f"{'':<18} -> ", " " * 22, row["advice"])


def _wrap(first: str, later: str, text: str) -> list[str]:
    return textwrap.wrap(
        clean_line(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
