"""Archives of AImages: ``aimage save`` and ``aimage load``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import click

from clowder_aimage.cli.console.option import references_argument, settings, tag_reference, verb
from clowder_aimage.cli.console.output import event, plain, plural, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@verb
@references_argument(required=True)
@click.option(
    "-o", "--output", "file", required=True, metavar="FILE", help="The file to write; - is stdout."
)
def save(references: tuple[Reference, ...], file: str) -> None:
    """Write the AImages REF... of the store to a tar file, an OCI image layout; print its path.

    Shared blobs are written once, and every blob is verified. FILE is written whole or not at all;
    a FILE that exists is replaced. The same content gives the same bytes.
    """
    from clowder_aimage.save import save as save_archive

    chosen = settings()
    hint = "name a file with -o, or pipe it on"
    target = _stream(sys.stdout, "written to", hint) if file == "-" else Path(file)
    subject = references[0] if len(references) == 1 else None
    with Progress("saving", subject) as progress:
        saved = save_archive(
            chosen.layout, references, target, is_hashed=chosen.as_json, on_event=progress.on_event
        )
    if saved.absent:
        digests = ", ".join(str(left.digest) for left in saved.absent)
        are = "is" if len(saved.absent) == 1 else "are"
        progress.note(
            f"left out: {plural(len(saved.absent), 'manifest')} of an index that {are} not "
            f"in the store: {digests}"
        )
    progress.say("saved")
    names = [{"reference": str(reference), **plain(root)} for reference, root in saved.names]
    value = {"file": file, "size": saved.size, "digest": str(saved.digest), "references": names}
    if file != "-":
        result(value, file)
    elif chosen.as_json:
        click.echo(event("saved", **value), err=True)


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

    layout = settings().layout
    hint = "name a file, or pipe one in"
    archive = _stream(sys.stdin, "read from", hint) if file == "-" else Path(file)
    with Progress("loading") as progress:
        loaded = load_archive(
            layout, archive, name, on_plan=progress.begin, on_read=progress.advance
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


def _stream(standard: TextIO, action: str, hint: str) -> BinaryIO:
    """Return stdin or stdout, unbuffered. Raises UsageError where it is a terminal."""
    if standard.isatty():
        raise UsageError(f"an archive cannot be {action} a terminal", hint=hint)
    mode = "rb" if standard is sys.stdin else "wb"
    return cast(BinaryIO, open(standard.fileno(), mode, buffering=0, closefd=False))
