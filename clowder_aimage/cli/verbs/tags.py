"""The verb ``tags``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import connection_options, settings, verb
from clowder_aimage.cli.console.output import note, result
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@verb
@click.argument("repo")
@connection_options
def tags(repo: str) -> None:
    """List all tags of the repository REPO, one a line, in the registry's order."""
    from clowder_aimage.registry import Repository

    chosen = settings()
    reference = Reference.parse(repo)
    if reference.registry is None:
        raise UsageError(
            f"expected HOST/REPOSITORY, not {repo}", hint="'aimage ls' lists the names in the store"
        )
    if reference.name != repo:
        raise UsageError(
            f"expected HOST/REPOSITORY without a tag or digest, not {repo}",
            hint=f"use: aimage tags {reference.name}",
        )
    with Repository(reference, chosen.connection()) as repository:
        found = repository.tag_names()
    if found or chosen.as_json:
        value = {"repository": reference.name, "tags": found}
        result(value, "\n".join(found))
    elif not chosen.quiet:
        note(f"{reference.name} has no tags")
