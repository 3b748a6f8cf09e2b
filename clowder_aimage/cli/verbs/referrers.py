"""The verb ``referrers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import connection_options, reference_argument, settings, verb
from clowder_aimage.cli.console.output import result, size, table
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.oci import Descriptor


@verb
@reference_argument
@click.option(
    "--type", "artifact_type", metavar="MEDIA/TYPE", default="", help="Only artifacts of this type."
)
@connection_options
def referrers(reference: Reference, artifact_type: str) -> None:
    """List the artifacts whose subject is REF in its registry. There may be none."""
    from clowder_aimage.registry import Repository

    chosen = settings()
    with Repository(reference, chosen.connection()) as repository:
        subject = reference.digest or repository.resolve(reference).digest
        found = repository.referrers(subject, artifact_type)
    value = [_row(reference, descriptor) for descriptor in found]
    cells = [("DIGEST", "TYPE", "SIZE")] + [
        (row["digest"], row.get("artifactType") or "?", size(row["size"])) for row in value
    ]
    result(value, table(cells))


def _row(reference: Reference, descriptor: Descriptor) -> dict[str, Any]:
    return {"reference": str(reference.with_digest(descriptor.digest)), **descriptor.to_json()}
