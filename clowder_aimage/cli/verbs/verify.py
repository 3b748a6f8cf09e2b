"""The verb ``verify``."""

from __future__ import annotations

from dataclasses import asdict

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    daemon_connection_options,
    get_settings,
    verb,
)
from clowder_aimage.cli.console.output import format_count, format_size, print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.stored_name import stored_arguments
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout.fsck import FsckProblem, FsckReport
from clowder_aimage.oci import Reference


@examples("aimage verify", "aimage verify shapes --repair")
@verb
@stored_arguments(required=False)
@click.option("--repair", is_flag=True, help="Fetch damaged and missing blobs again.")
@daemon_connection_options
def verify(references: tuple[Reference, ...], repair: bool) -> int:
    """Read and hash every byte of REF..., else of the whole store.

    The exit code is 5 if blobs are damaged or missing, or manifests cannot be read. With --repair
    they are fetched again from the registry in the name that needs them; a damaged blob that
    nothing needs is removed.
    """
    from clowder_aimage.verify import repair as repair_store
    from clowder_aimage.verify import verify as check

    chosen = get_settings()
    with Progress("verifying") as progress:
        report = check(chosen.layout, references, on_plan=progress.begin, on_read=progress.advance)
    outcome: dict[FsckProblem, str] = {}
    if repair and report.problems:
        for problem, error in repair_store(chosen.layout, report, chosen.build_client_options()):
            outcome[problem] = "" if error is None else error.message
    _print(report, outcome)
    bad = [problem for problem in report.problems if problem.kind not in ("foreign", "writable")]
    left = [problem for problem in bad if outcome.get(problem, "no") != ""]
    return VerificationError.exit_code if left else 0


def _print(report: FsckReport, outcome: dict[FsckProblem, str]) -> None:
    problems = [
        asdict(problem) | ({"mended": not outcome[problem]} if problem in outcome else {})
        for problem in report.problems
    ]
    value = {"blobs": report.blobs, "size": report.size, "problems": problems}
    lines = [f"{format_count(report.blobs, 'blob')} intact, {format_size(report.size)}"]
    for problem in report.problems:
        needed = f" (needed by {', '.join(problem.names)})" if problem.names else ""
        lines.append(f"{problem.kind}: {problem.message}{needed}")
        if problem in outcome:
            done = "repaired" if problem.names else "removed, because nothing needs it"
            lines.append(f"  {outcome[problem] or done}")
    print_result(value, lines)
