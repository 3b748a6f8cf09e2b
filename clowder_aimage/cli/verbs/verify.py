"""The verb ``verify``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    complete_name,
    daemon_connection_options,
    get_settings,
    in_section,
    jobs_option,
    verb,
)
from clowder_aimage.cli.console.output import format_count, format_size, print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.cli.console.signer_option import (
    SECTION,
    file_path,
    read_signers,
    signer_options,
)
from clowder_aimage.cli.console.stored_name import stored_arguments
from clowder_aimage.errors import SignatureError, UsageError, VerificationError
from clowder_aimage.layout.fsck import FsckProblem, FsckReport
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.rederive import RederiveReport
    from clowder_aimage.trust.acceptance import AcceptedSignature

_REDERIVE = "Derivations"


@examples(
    "aimage verify",
    "aimage verify shapes --repair",
    f"aimage verify {NAME} --signature --key signer.pub",
    "aimage verify --directory model --bundle model.sig --key signer.pub",
    "aimage verify shapes:int8 --rederive",
)
@verb
@stored_arguments(required=False)
@click.option("--repair", is_flag=True, help="Fetch damaged and missing blobs again.")
@in_section(
    _REDERIVE,
    click.option(
        "--rederive",
        is_flag=True,
        help="Compute REF... again from the AImage that it states as its parent.",
    ),
    click.option(
        "--sample",
        type=click.IntRange(1),
        metavar="N",
        help="Compute N of the changed tensors only, chosen at random.",
    ),
    click.option(
        "--lora",
        "loras",
        multiple=True,
        metavar="REF|FILE",
        shell_complete=complete_name,
        help="An adapter that REF was made with, if the store lacks it. May be repeated.",
    ),
    jobs_option,
)
@in_section(
    SECTION,
    click.option(
        "--signature",
        is_flag=True,
        help="Check who has signed REF..., in the store or else in its registry.",
    ),
    click.option(
        "--directory",
        metavar="DIR",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Check the files of DIR with the signature in --bundle (OpenSSF Model Signing).",
    ),
    click.option("--bundle", metavar="FILE", type=file_path, help="The signature of --directory."),
)
@signer_options
@daemon_connection_options
def verify(
    references: tuple[Reference, ...],
    repair: bool,
    rederive: bool,
    sample: int | None,
    loras: tuple[str, ...],
    signature: bool,
    directory: Path | None,
    bundle: Path | None,
    **expected: Any,
) -> int:
    """Read and hash every byte of REF..., else of the whole store.

    The exit code is 5 if blobs are damaged or missing, or manifests cannot be read. With --repair
    they are fetched again from the registry in the name that needs them; a damaged blob that
    nothing needs is removed.

    With --signature the signatures of REF are checked instead, and with --directory those of files.
    The exit code is 5 if none is of an expected signer.

    With --rederive an AImage that was converted, or made with adapters, is computed again from its
    parent, as the statement attached to it says. The exit code is 5 if a tensor differs; the first
    one is named. The parent is that in the store, else it is pulled from the repository of REF.
    """
    if rederive:
        if (
            repair
            or signature
            or directory is not None
            or bundle is not None
            or any(expected.values())
        ):
            raise UsageError("--rederive cannot be combined with other checks")
        return _rederive(references, sample, loras)
    if sample is not None or loras:
        raise UsageError("--sample and --lora require --rederive")
    if signature or directory is not None:
        if repair:
            raise UsageError("--repair cannot be combined with --signature or --directory")
        return _check_signatures(references, directory, bundle, expected)
    if bundle is not None or any(expected.values()):
        raise UsageError("options of signatures require --signature or --directory")
    return _check_content(references, repair)


def _check_signatures(
    references: tuple[Reference, ...],
    directory: Path | None,
    bundle: Path | None,
    expected: dict[str, Any],
) -> int:
    from datetime import UTC, datetime

    from clowder_aimage.check_signature import check_directory, check_signature
    from clowder_aimage.content.gate import unchecked

    signers, now = read_signers(**expected), datetime.now(UTC)
    if directory is not None:
        if references or bundle is None:
            raise UsageError("--directory requires --bundle, and no REF")
        accepted = check_directory(directory, bundle, signers, now)
        print_result(
            {"directory": str(directory), **accepted.to_json()}, _format_signature(accepted)
        )
        return 0
    if bundle is not None or not references:
        raise UsageError("--signature requires REF, and --bundle requires --directory")
    chosen = get_settings()
    connection = None if signers.offline else chosen.build_client_options()
    values, lines = list[dict[str, Any]](), list[str]()
    for reference in references:
        with unchecked():
            report = check_signature(chosen.layout, reference, connection, signers, now)
        lines += [
            f"{reference}: {_format_signature(accepted)}" for accepted in report.accepted
        ] or [f"{reference}: no signature of an expected signer"]
        lines += [f"  not accepted: {reason}" for reason in report.reasons]
        values.append(
            {
                "reference": str(reference),
                "digest": str(report.subject.digest),
                "signatures": [accepted.to_json() for accepted in report.accepted],
                "refused": report.reasons,
            }
        )
    print_result(values, lines)
    return 0 if all(value["signatures"] for value in values) else SignatureError.exit_code


def _rederive(references: tuple[Reference, ...], sample: int | None, loras: tuple[str, ...]) -> int:
    from secrets import SystemRandom

    from clowder_aimage.errors import needs
    from clowder_aimage.pull import PullOptions

    if not references:
        raise UsageError("--rederive requires REF")
    chosen = get_settings()

    def choose(names: Sequence[str]) -> Collection[str]:
        return SystemRandom().sample(names, min(sample or 0, len(names)))

    values, lines, is_derived = list[dict[str, Any]](), list[str](), True
    with needs("--rederive", "mlx"):
        from clowder_aimage.cli.console.lora_option import find_uses
        from clowder_aimage.rederive import RederiveOptions, rederive

        adapters = [entry for entry, _ in find_uses(loras)] if loras else []
        for reference in references:
            with Progress("re-deriving", reference) as progress:
                options = RederiveOptions(
                    choose=None if sample is None else choose,
                    adapters=adapters,
                    threads=chosen.jobs,
                    pull=PullOptions(on_event=progress.on_event),
                    on_plan=progress.begin,
                    on_compared=progress.advance,
                )
                report = rederive(chosen.layout, reference, chosen.build_client_options(), options)
            values.append({"reference": str(reference), **report.to_json()})
            lines += _format_rederived(reference, report)
            is_derived = is_derived and report.is_derived
    print_result(values, lines)
    return 0 if is_derived else VerificationError.exit_code


def _format_rederived(reference: Reference, report: RederiveReport) -> list[str]:
    """Return a line for each statement: its result, or why it cannot be computed."""
    lines = list[str]()
    for digest, error in report.problems:
        advice = format_advice(error)
        text = f"{error.message}; {advice}" if advice else error.message
        lines.append(f"{reference}: statement {digest.short}: {text}")
    for result in report.statements:
        derivation, difference = result.derivation, result.difference
        made = f"{derivation.recipe.summary} of {derivation.parent} (from the {result.place})"
        if difference is None:
            count = format_count(len(result.compared), "layer")
            lines.append(f"{reference}: equal to {made}: {count} computed again")
            continue
        extent = ""
        if difference.changed is not None and difference.size is not None:
            extent = f" ({difference.changed} of {format_count(difference.size, 'byte')})"
        text = f"{difference.layer}: {difference.reason}{extent}"
        lines.append(f"{reference}: differs from {made}: {text}")
    return lines


def _format_signature(accepted: AcceptedSignature) -> str:
    """Return by whom, since when, in which form and over what a signature is."""
    issuer = f" by {accepted.issuer}" if accepted.issuer else ""
    since = f"{accepted.time:%Y-%m-%d %H:%M} UTC" if accepted.time else "at an unknown time"
    files = f"{format_count(accepted.files, 'file')} of " if accepted.files else ""
    over = f"{files}{accepted.subject}" if accepted.subject else files.removesuffix(" of ")
    return (
        f"signed by {accepted.method} {accepted.signer}{issuer}, {since}, as {accepted.format}, "
        f"over {over}"
    )


def _check_content(references: tuple[Reference, ...], repair: bool) -> int:
    from clowder_aimage.content.gate import unchecked
    from clowder_aimage.verify import repair as repair_store
    from clowder_aimage.verify import verify as check

    chosen = get_settings()
    with Progress("verifying") as progress, unchecked():
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
