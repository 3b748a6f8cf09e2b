"""``aimage load``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import complete_path, get_settings, tag_reference, verb
from clowder_aimage.cli.console.output import (
    format_count,
    open_standard_stream,
    print_result,
)
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


@examples("aimage load shapes.tar", "aimage load - --as shapes:copy < shapes.tar")
@verb
@click.argument("file", default="", shell_complete=complete_path)
@click.option("-i", "--input", "input_file", metavar="FILE", help="The same as the argument FILE.")
@click.option(
    "--as", "name", type=tag_reference, metavar="NAME", help="Name for the only AImage in FILE."
)
def load(file: str, input_file: str | None, name: Reference | None) -> None:
    """Add the AImages in FILE, an OCI image layout in a tar, to the store; print their names.

    FILE may be compressed with gzip; without it, or with -, stdin is read. Every blob is verified
    before it gets its name in the store. An AImage gets its name when all its blobs are there.
    """
    from clowder_aimage.load import load as load_archive

    if file and input_file:
        raise UsageError(f"--input {input_file} cannot be combined with the argument {file}")
    layout, file = get_settings().layout, file or input_file or "-"
    task, hint = "read an archive from", "give a file, or pipe one in"
    archive = open_standard_stream(sys.stdin, task, hint) if file == "-" else Path(file)
    with Progress("loading") as progress:
        loaded = load_archive(
            layout, archive, name, on_plan=progress.begin, on_read=progress.advance
        )
    for entry in loaded.unnamed:
        progress.note(f"added without a name: {entry}")
    present = f", {loaded.skipped} already there" if loaded.skipped else ""
    progress.remark(f"loaded {format_count(loaded.blobs, 'blob')}{present}")
    if loaded.names or loaded.problem is None:
        value = [
            {"reference": str(reference), **to_plain(root)} for reference, root in loaded.names
        ]
        lines = [f"{reference} {root.digest}" for reference, root in loaded.names]
        print_result(value, lines)
    if loaded.problem is not None:
        raise loaded.problem
