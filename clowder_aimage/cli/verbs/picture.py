"""``aimage picture``: show and verify what pictures say about their origin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    connection_options,
    get_settings,
    in_section,
)
from clowder_aimage.cli.console.output import format_table, print_result
from clowder_aimage.cli.verbs.replay import Comparison, replay_options, replay_picture
from clowder_aimage.errors import UsageError, VerificationError, build_extra_error, needs

if TYPE_CHECKING:
    from clowder_aimage.pictures.provenance.manifest_report import ManifestReport
    from clowder_aimage.pictures.provenance.picture_report import PictureReport

# Bytes of certificates
_MAX_ROOTS = 1 << 20
# Facts that a person looks for first
_SHOWN = ("reference", "digest", "prompt", "negative", "seed", "steps", "guidance", "backend")
_file_argument = click.argument("picture", metavar="FILE", type=click.Path(path_type=Path))


@click.group(cls=VerbGroup, short_help="Show and verify the origin of a picture.")
def picture() -> None:
    """Show and verify what picture files say about their origin."""


@examples("aimage picture show circles.png")
@common_options
@picture.command(short_help="Show the mark, the signature and the settings in a picture.")
@_file_argument
def show(picture: Path) -> None:
    """Show what FILE, a PNG, JPEG or WebP file, says about its origin.

    That is its mark, by which programs know that a machine made it; its signature, with the result
    of its check, which requires the extra [c2pa]; and the settings that it was made with.
    """
    _, report = _read(picture)
    print_result(_encode_report(picture, report), _format_report(picture, report))


@examples(
    "aimage picture verify circles.png",
    "aimage picture verify circles.png --trust roots.pem --replay",
)
@common_options
@picture.command(short_help="Verify the signature of a picture, and make it again.")
@_file_argument
@click.option(
    "--trust",
    metavar="ROOTS",
    type=click.Path(path_type=Path),
    help="A file of certificates in PEM: one of them must vouch for the signer.",
)
@click.option(
    "--replay", "is_replayed", is_flag=True, help="Generate the picture again, and compare."
)
@click.option(
    "--pull", "may_pull", is_flag=True, help="Pull a model that the store lacks, for --replay."
)
@in_section("Options of --replay", replay_options)
@connection_options
def verify(
    picture: Path, trust: Path | None, is_replayed: bool, may_pull: bool, **values: Any
) -> int:
    """Verify that FILE, a PNG, JPEG or WebP file, is as its signer signed it.

    Anybody can sign: --trust names the certificates that vouch for signers. --replay also generates
    the picture again from the settings that are signed, else from those in FILE, with a model of
    the store. The exit code is 5 if FILE is not signed, or one of these checks fails.
    """
    _check_options(values, is_replayed=is_replayed, may_pull=may_pull)
    roots = "" if trust is None else _read_roots(trust)
    data, report = _read(picture, roots)
    if report.has_manifest and report.manifest is None and not _has_library():
        raise build_extra_error("checking the signature of a picture", "c2pa")
    checks = [*_iter_checks(report)]
    comparison = None
    if is_replayed:
        comparison = _replay(picture, data, report, {**values, "may_pull": may_pull})
        checks.append(("replay", comparison.is_equal, comparison.text))
    is_valid = all(passed for _, passed, _ in checks)
    value = {
        "picture": str(picture),
        "valid": is_valid,
        "checks": [
            {"check": name, "passed": passed, "message": text} for name, passed, text in checks
        ],
        "signature": _encode_signature(report),
        "replay": None if comparison is None else comparison.value,
    }
    print_result(value, [f"{name}: {text}" for name, _, text in checks])
    return 0 if is_valid else VerificationError.exit_code


def _check_options(values: dict[str, Any], *, is_replayed: bool, may_pull: bool) -> None:
    """Refuse options without effect. Raises UsageError."""
    if not is_replayed and (may_pull or any(values.values())):
        raise UsageError("the options of --replay, and --pull, require --replay")
    if not may_pull and get_settings().has_connection:
        raise UsageError("the options of connections require --pull")


def _has_library() -> bool:
    from clowder_aimage.pictures.provenance.manifest_report import has_library

    return has_library()


def _read(path: Path, roots: str = "") -> tuple[bytes, PictureReport]:
    """Return a file and its report. Raises as ``read_file`` and ``read_report``."""
    from clowder_aimage.model.picture_file import read_file

    with needs("reading a picture", "c2pa"):
        from clowder_aimage.pictures.provenance.picture_report import read_report

    data = read_file(path)
    return data, read_report(data, str(path), roots)


def _read_roots(path: Path) -> str:
    """Return a file of certificates. Raises UsageError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_ROOTS + 1).decode("ascii", "replace")
    except OSError as error:
        raise UsageError(f"--trust: cannot read {path}: {error.strerror or error}") from None
    if len(text) > _MAX_ROOTS or "-----BEGIN CERTIFICATE-----" not in text:
        raise UsageError(f"--trust: {path} has no certificates in PEM")
    return text


def _iter_checks(report: PictureReport) -> Iterator[tuple[str, bool, str]]:
    """Yield the checks of a signature: their names, whether they passed, and words."""
    manifest = report.manifest
    if manifest is None:
        text = report.fault if report.has_manifest else "the picture is not signed"
        yield "signature", False, text
        return
    yield "signature", manifest.is_valid, _describe_signature(manifest)
    if manifest.is_trusted is not None:
        vouches = "a root vouches" if manifest.is_trusted else "no root vouches"
        yield "trust", manifest.is_trusted, f"{vouches} for {manifest.signer!r}"


def _replay(path: Path, data: bytes, report: PictureReport, options: dict[str, Any]) -> Comparison:
    """Generate the picture again by the signed settings, else by those in the file."""
    with needs("running a model", "mlx"):
        from clowder_aimage.model.picture import build_metadata_error, read_picture
    from clowder_aimage.pictures.provenance.claim import restore_facts

    read = read_picture(data, str(path))
    manifest = report.manifest
    signed = restore_facts(manifest.generation) if manifest and manifest.is_valid else {}
    if not (signed or read.metadata):
        raise build_metadata_error(str(path))
    return replay_picture(str(path), replace(read, metadata=signed or read.metadata), **options)


def _encode_report(path: Path, report: PictureReport) -> dict[str, Any]:
    mark = report.mark and {
        "digitalSourceType": report.mark.source_type,
        "softwareAgent": report.mark.agent,
    }
    return {
        "picture": str(path),
        "format": report.kind,
        "width": report.width,
        "height": report.height,
        "mark": mark,
        "markTurnedOff": report.is_unmarked_on_purpose,
        "signature": _encode_signature(report),
        "metadata": dict(report.metadata),
    }


def _encode_signature(report: PictureReport) -> dict[str, Any] | None:
    """Return the signature as JSON: its check, or the name of the signer, who is not checked."""
    if not report.has_manifest:
        return None
    manifest = report.manifest
    if manifest is None:
        return {"valid": None, "signer": report.signer, "message": report.fault}
    return {
        "valid": manifest.is_valid,
        "faults": list(manifest.faults),
        "trusted": manifest.is_trusted,
        "signer": manifest.signer,
        "organization": manifest.organization,
        "algorithm": manifest.algorithm,
        "time": manifest.time or None,
        "softwareAgent": manifest.agent,
        "actions": list(manifest.actions),
        "inputs": list(manifest.inputs),
        "generation": manifest.generation,
    }


def _format_report(path: Path, report: PictureReport) -> list[str]:
    mark = "none: programs cannot tell that a machine made the picture"
    if report.is_unmarked_on_purpose:
        mark = "none: it was turned off when the picture was made"
    if report.mark is not None:
        by = f", by {report.mark.agent}" if report.mark.agent else ""
        mark = f"{report.mark.short_type}{by}"
    rows = [
        ("picture", f"{path}: {report.kind.upper()}, {report.width}x{report.height}"),
        ("mark", mark),
        *_iter_signature_rows(report),
    ]
    metadata = report.metadata
    rows += [(name, str(metadata[name])) for name in _SHOWN if metadata.get(name) is not None]
    return format_table(rows)


def _iter_signature_rows(report: PictureReport) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    if manifest is None:
        by = f"by {report.signer!r}; " if report.signer else ""
        yield "signature", f"{by}{report.fault}" if report.has_manifest else "none"
        return
    yield "signature", _describe_signature(manifest)
    yield "agent", manifest.agent
    for action in manifest.actions:
        yield "action", " ".join(filter(None, (action["action"], action["sourceType"])))
    for entry in manifest.inputs:
        signer = f", signed by {entry['signer']!r}" if "signer" in entry else ", not signed"
        faults = f" ({', '.join(entry['faults'])})" if entry.get("faults") else ""
        yield "input", f"{entry['title']}, {entry['relationship']}{signer}{faults}"


def _describe_signature(manifest: ManifestReport) -> str:
    """Return the signature in words."""
    if not manifest.is_valid:
        return f"not valid: {', '.join(manifest.faults)}"
    of = f" of {manifest.organization!r}" if manifest.organization != manifest.signer else ""
    when = f", stamped {manifest.time}" if manifest.time else ", without a time stamp"
    unchecked = "" if manifest.is_trusted is not None else "; whose identity is not checked"
    return f"valid, {manifest.algorithm}{when}, by {manifest.signer!r}{of}{unchecked}"
