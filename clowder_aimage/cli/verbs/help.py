"""The verbs ``help`` and ``version``."""

from __future__ import annotations

import click

from clowder_aimage import __version__
from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import verb
from clowder_aimage.cli.console.output import print_result


@examples("aimage help push", "aimage help registry serve")
@verb
@click.argument("words", metavar="[VERB]", nargs=-1)
@click.pass_context
def help(context: click.Context, words: tuple[str, ...]) -> None:  # noqa: A001 - the name of the verb
    """Show the help of VERB; without it, list the verbs."""
    root = context.find_root().command
    context.exit(root.main([*words, "--help"], prog_name="aimage", standalone_mode=False) or 0)


@examples("aimage version")
@verb
def version() -> None:
    """Print the version."""
    print_result({"version": __version__}, __version__)
