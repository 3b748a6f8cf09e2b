"""The verb ``referrers``."""

from __future__ import annotations

from collections.abc import Sequence

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
    is_too_wide,
    print_result,
    remark,
)
from clowder_aimage.content.platform import format_cell
from clowder_aimage.oci import Descriptor, Digest, Reference


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
    from clowder_aimage.registry import Repository

    with Repository(reference, get_settings().build_client_options()) as repository:
        # A digest needs no request, and its manifest may be missing: referrers may come before it.
        subject = reference.digest or repository.resolve(reference).digest
        if recursive:
            entries = [
                entry
                for entry in repository.iter_referrers(subject)
                if artifact_type in ("", entry[2].extra.get("artifactType"))
            ]
        else:
            direct = repository.list_referrers(subject, artifact_type)
            entries = [(0, subject, descriptor) for descriptor in direct]
    rows = [
        {
            "reference": str(reference.with_digest(descriptor.digest)),
            **descriptor.to_json(),
            **({"subject": str(parent)} if recursive else {}),
        }
        for _, parent, descriptor in entries
    ]
    if entries or get_settings().as_json:
        lines = _format_table(entries, is_short=False)
        print_result(rows, _format_table(entries, is_short=True) if is_too_wide(lines) else lines)
    else:
        remark(f"nothing is attached to {reference}")


def _format_table(
    entries: Sequence[tuple[int, Digest, Descriptor]], *, is_short: bool
) -> list[str]:
    cells = [("DIGEST", "TYPE", "SIZE", "ANNOTATIONS")] + [
        (
            "  " * level + (entry.digest.short if is_short else str(entry.digest)),
            str(entry.extra.get("artifactType") or "?"),
            format_size(entry.size),
            format_cell(", ".join(f"{key}={text}" for key, text in entry.annotations.items())),
        )
        for level, _, entry in entries
    ]
    return format_table(cells)
