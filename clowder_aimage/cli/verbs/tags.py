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
    if reference.name != repo:
        raise UsageError(
            f"{repo} is more than a repository", hint=f"try: aimage tags {reference.name}"
        )
    if reference.registry is None:
        raise UsageError(
            f"{repo} has no registry host, and tags are listed by a registry",
            hint="the names in the store are listed by: aimage ls",
        )
    with Repository(reference, chosen.connection()) as repository:
        found = repository.tag_names()
    if found or chosen.as_json:
        value = {"repository": reference.name, "tags": found}
        result(value, "\n".join(found))
    elif not chosen.quiet:
        note(f"{reference.name} has no tags")
