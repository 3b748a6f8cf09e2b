"""The verb ``referrers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    connection_options,
    get_settings,
    reference_argument,
    verb,
)
from clowder_aimage.cli.console.output import (
    format_size,
    format_table,
    print_result,
    remark,
)
from clowder_aimage.content.platform import format_cell
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.attach import AttachedArtifact


@examples(f"aimage referrers {NAME} --type application/spdx+json")
@verb
@reference_argument
@click.option(
    "--type", "artifact_type", metavar="MEDIA/TYPE", default="", help="Only artifacts of this type."
)
@click.option("-r", "--recursive", is_flag=True, help="List what is attached to them too.")
@connection_options
def referrers(reference: Reference, artifact_type: str, recursive: bool) -> None:
    """List the artifacts whose subject is REF in its registry. There may be none."""
    from clowder_aimage.attach import list_attached

    connection = get_settings().build_client_options()
    entries = list_attached(reference, connection, artifact_type, is_recursive=recursive)
    rows = [entry.to_json(reference, has_subject=recursive) for entry in entries]
    if entries or get_settings().as_json:
        print_result(rows, _format_table(entries))
    else:
        remark(f"nothing is attached to {reference}")


def _format_table(entries: Sequence[AttachedArtifact]) -> list[str]:
    cells = [("DIGEST", "TYPE", "SIZE", "ANNOTATIONS")] + [
        (
            "  " * level + str(entry.digest),
            str(entry.extra.get("artifactType") or "?"),
            format_size(entry.size),
            format_cell(", ".join(f"{key}={text}" for key, text in entry.annotations.items())),
        )
        for level, _, entry in entries
    ]
    return format_table(cells)
