"""The verb ``load``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, cast

import click

from clowder_aimage.cli.console.option import common_options, settings
from clowder_aimage.cli.console.output import plain, plural, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@click.command()
@click.argument("file")
@click.option("--as", "name", metavar="NAME", help="What to call the one AImage in it.")
@common_options
def load(file: str, name: str | None) -> None:
    """Take the AImages in FILE, an OCI image layout in a tar, into the store; print their names.

    FILE may be compressed with gzip; - is stdin. Every blob is verified before it gets its name
    in the store, and a name is given once all that it needs is there.
    """
    from clowder_aimage.load import load as load_archive

    chosen = settings()
    wanted = None if name is None else _wanted(name)
    archive = _stdin() if file == "-" else Path(file)
    with Progress("loading", quiet=chosen.quiet) as progress:
        loaded = load_archive(
            chosen.layout, archive, wanted, on_plan=progress.begin, on_read=progress.advance
        )
    for entry in loaded.unnamed:
        progress.note(f"no name for {entry}: it was taken in without one")
    if not chosen.quiet:
        there = f", {loaded.skipped} already there" if loaded.skipped else ""
        progress.note(f"loaded {plural(loaded.blobs, 'blob')}{there}")
    if loaded.names or loaded.problem is None:
        value = [{"reference": str(reference), **plain(root)} for reference, root in loaded.names]
        lines = [f"{reference} {root.digest}" for reference, root in loaded.names]
        result(value, "\n".join(lines), as_json=chosen.as_json)
    if loaded.problem is not None:
        raise loaded.problem


def _wanted(name: str) -> Reference:
    """Parse the name to give. Raises UsageError."""
    reference = Reference.parse(name)
    if reference.digest is not None:
        raise UsageError(f"{name} names a digest: a tag is needed", hint="leave the @... away")
    return reference


def _stdin() -> BinaryIO:
    """stdin, unbuffered. Raises UsageError where it is a terminal."""
    if sys.stdin.isatty():
        raise UsageError("an archive cannot be typed", hint="name a file, or pipe one in")
    return cast(BinaryIO, open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))
