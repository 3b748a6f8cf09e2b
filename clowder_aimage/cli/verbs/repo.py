"""The verb ``repo ls``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    connection_options,
    get_settings,
    parse_reference,
)
from clowder_aimage.cli.console.output import note, print_result, wants_value
from clowder_aimage.errors import UsageError


@click.group(cls=VerbGroup)
def repo() -> None:
    """List the repositories of a registry."""


@examples("aimage repo ls registry.example.com", "aimage repo ls registry.example.com/team")
@common_options
@repo.command(short_help="List the repositories of a registry.")
@click.argument("registry", metavar="HOST[/PREFIX]")
@connection_options
def ls(registry: str) -> None:
    """List the repositories of the registry HOST, one per line, in the registry's order.

    With PREFIX, list PREFIX itself and the repositories below it. Not every registry has such a
    list, and the list may have only the repositories that your account can read.
    """
    from clowder_aimage.registry import list_repositories

    host, _, prefix = registry.partition("/")
    reference = parse_reference(f"{host}/{prefix or 'x'}")
    if reference.registry is None or ":" in prefix or "@" in prefix:
        raise UsageError(f"expected HOST[/PREFIX], not {registry}")
    chosen = get_settings()
    repository_names = [
        f"{host}/{name}"
        for name in list_repositories(host, chosen.build_client_options())
        if not prefix or name == prefix or name.startswith(f"{prefix}/")
    ]
    if repository_names or wants_value():
        print_result({"registry": host, "repositories": repository_names}, repository_names)
    elif not chosen.quiet:
        note(f"{registry} has no repositories")
