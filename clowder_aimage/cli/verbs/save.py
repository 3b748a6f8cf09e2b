"""``aimage save``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    complete_path,
    get_settings,
    output_option,
    parse_with,
    verb,
)
from clowder_aimage.cli.console.output import (
    format_count,
    format_event,
    format_size,
    open_standard_stream,
    print_result,
    wants_value,
)
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.stored_name import stored_arguments
from clowder_aimage.content.unit import parse_size
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


@examples(
    "aimage save shapes shapes:int8 -o shapes.tar",
    "aimage save shapes -o - | ssh host aimage load -",
)
@verb
@stored_arguments(required=True)
@output_option
@click.option(
    "--since",
    metavar="LIST|TAR",
    type=Path,
    shell_complete=complete_path,
    help="Leave out blobs that the receiver has: those in this archive, or listed in this text.",
)
@click.option(
    "--volume",
    metavar="SIZE",
    callback=parse_with(parse_size),
    help="Write files of at most SIZE, such as 4G, and FILE.list, which 'aimage load' reads.",
)
def save(
    references: tuple[Reference, ...], file: str, since: Path | None, volume: int | None
) -> None:
    """Write the AImages REF... to a tar file, which 'aimage load' reads; print its path.

    The tar is an OCI image layout. Shared blobs are written once, and all are verified. A FILE that
    exists is replaced. The same content gives the same bytes.
    """
    from clowder_aimage.content.volume import MIN_SIZE, build_list_name, build_name
    from clowder_aimage.save import read_known
    from clowder_aimage.save import save as save_archive

    if volume is not None and file == "-":
        raise UsageError("--volume requires a file", hint="give one with -o")
    if volume is not None and volume < MIN_SIZE:
        raise UsageError(f"--volume must be at least {MIN_SIZE} bytes")
    chosen = get_settings()
    task, hint = "write an archive to", "give a file with -o, or pipe the output"
    target = open_standard_stream(sys.stdout, task, hint) if file == "-" else Path(file)
    subject = references[0] if len(references) == 1 else None
    with Progress("saving", subject, keeps_blobs=False) as progress:
        saved = save_archive(
            chosen.layout,
            references,
            target,
            is_hashed=wants_value(),
            known=read_known(since) if since else (),
            volume=volume,
            on_event=progress.on_event,
        )
    if volume is not None:
        following = build_name(Path(file), -(-saved.size // volume) + 1)
        if following.exists():
            progress.note(f"{following} is of an earlier archive, and not of this one")
        file = str(build_list_name(Path(file)))
    if saved.left_out:
        progress.note(
            f"left out: {format_count(len(saved.left_out), 'blob')} that {since} has, "
            f"{format_size(sum(blob.size for blob in saved.left_out))}"
        )
    if saved.absent:
        digests = ", ".join(str(left.digest) for left in saved.absent)
        are = "is" if len(saved.absent) == 1 else "are"
        progress.note(
            f"left out: {format_count(len(saved.absent), 'manifest')} of an index that {are} not "
            f"in the store: {digests}"
        )
    progress.summarize("saved")
    names = [{"reference": str(reference), **to_plain(root)} for reference, root in saved.names]
    value = {"file": file, "size": saved.size, "digest": str(saved.digest), "references": names}
    if file != "-":
        print_result(value, file)
    elif chosen.as_json:
        click.echo(format_event("saved", **value), err=True)
