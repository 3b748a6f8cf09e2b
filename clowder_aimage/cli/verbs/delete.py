"""The verb ``delete``."""

from __future__ import annotations

import sys

import click

from clowder_aimage.cli.console.example import NAME, REPOSITORY, examples
from clowder_aimage.cli.console.option import (
    complete_name,
    connection_options,
    get_settings,
    parse_reference,
    verb,
)
from clowder_aimage.cli.console.output import note, print_result, remark
from clowder_aimage.errors import UsageError
from clowder_aimage.oci.descriptor import to_plain


@examples(f"aimage delete {NAME}", f"aimage delete --yes {REPOSITORY}@sha256:...")
@verb
@click.argument("name", metavar="REF", shell_complete=complete_name)
@click.option("-y", "--yes", "-f", "--force", "is_sure", is_flag=True, help="Do not ask.")
@connection_options
def delete(name: str, is_sure: bool) -> int:
    """Delete REF from its registry: a tag, or with a digest a manifest and all its tags.

    The registry frees the space when it collects garbage. The store is not changed: 'aimage rm'
    removes a name from it. It asks first; without a terminal it requires --yes.
    """
    from clowder_aimage.registry import Repository

    chosen, reference = get_settings(), parse_reference(name)
    connection = chosen.build_client_options()
    if connection.expand(reference).registry is None:
        raise UsageError(
            f"{name} has no registry host", hint=f"to remove it from the store: aimage rm {name}"
        )
    if name == reference.name:
        raise UsageError(f"{name} has neither tag nor digest", hint="add :TAG or @DIGEST")
    with Repository(reference, connection) as repository:
        content = repository.describe(reference)
        if reference.digest is None:
            kind, subject = "tag", f"the tag {reference} ({content.digest})"
        else:
            reference = reference.with_digest(content.digest)
            kind, subject = "manifest", f"the manifest {reference} and all its tags"
        if not is_sure and not sys.stdin.isatty():
            raise UsageError(
                f"{subject} is not deleted: stdin is not a terminal, so that nobody can confirm it",
                hint="--yes deletes without asking",
            )
        if not is_sure and not click.confirm(f"Delete {subject}?", err=True):
            note("nothing was deleted")
            return 1
        content = repository.delete(reference)
    remark(f"deleted {subject}")
    print_result({"deleted": str(reference), "kind": kind, **to_plain(content)}, str(reference))
    return 0
