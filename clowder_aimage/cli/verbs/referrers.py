"""``aimage referrers``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import (
    connection_options,
    reference_argument,
    settings,
    verb,
)
from clowder_aimage.cli.console.output import result, size, table
from clowder_aimage.oci import Reference


@verb
@reference_argument
@click.option(
    "--type", "artifact_type", metavar="MEDIA/TYPE", default="", help="Only artifacts of this type."
)
@connection_options
def referrers(reference: Reference, artifact_type: str) -> None:
    """List the artifacts whose subject is REF in its registry. There may be none."""
    from clowder_aimage.registry import Repository

    with Repository(reference, settings().connection()) as repository:
        subject = reference.digest or repository.resolve(reference).digest
        found = repository.referrers(subject, artifact_type)
    rows = [{"reference": str(reference.with_digest(one.digest)), **one.to_json()} for one in found]
    cells = [("DIGEST", "TYPE", "SIZE")] + [
        (row["digest"], row.get("artifactType") or "?", size(row["size"])) for row in rows
    ]
    result(rows, table(cells))
