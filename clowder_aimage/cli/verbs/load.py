"""The verb ``load``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, cast

import click

from clowder_aimage.cli.console.option import settings, tag_reference, verb
from clowder_aimage.cli.console.output import plain, plural, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@verb
@click.argument("file")
@click.option(
    "--as", "name", type=tag_reference, metavar="NAME", help="Name for the only AImage in FILE."
)
def load(file: str, name: Reference | None) -> None:
    """Add the AImages in FILE, an OCI image layout in a tar, to the store; print their names.

    FILE may be compressed with gzip; - is stdin. Every blob is verified before it gets its name
    in the store. An AImage gets its name when all its blobs are in the store.
    """
    from clowder_aimage.load import load as load_archive

    chosen = settings()
    archive = _stdin() if file == "-" else Path(file)
    with Progress("loading") as progress:
        loaded = load_archive(
            chosen.layout, archive, name, on_plan=progress.begin, on_read=progress.advance
        )
    for entry in loaded.unnamed:
        progress.note(f"no name for {entry}: it was added without one")
    there = f", {loaded.skipped} already there" if loaded.skipped else ""
    progress.remark(f"loaded {plural(loaded.blobs, 'blob')}{there}")
    if loaded.names or loaded.problem is None:
        value = [{"reference": str(reference), **plain(root)} for reference, root in loaded.names]
        lines = [f"{reference} {root.digest}" for reference, root in loaded.names]
        result(value, "\n".join(lines))
    if loaded.problem is not None:
        raise loaded.problem


def _stdin() -> BinaryIO:
    """Return stdin, unbuffered. Raises UsageError where it is a terminal."""
    if sys.stdin.isatty():
        raise UsageError(
            "an archive cannot be read from a terminal", hint="name a file, or pipe one in"
        )
    return cast(BinaryIO, open(sys.stdin.fileno(), "rb", buffering=0, closefd=False))
