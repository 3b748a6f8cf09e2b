"""The verb ``completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import verb

SHELLS = ("bash", "zsh", "fish")
# A colon is part of a name, and not the end of a word.
_BASH = "COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}\n"


@examples(
    "source <(aimage completion bash)        # in ~/.bashrc",
    "source <(aimage completion zsh)         # in ~/.zshrc",
    "aimage completion fish | source         # in ~/.config/fish/config.fish",
)
@verb
@click.argument("shell", metavar="|".join(SHELLS), type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes verbs, options, names and tags in a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click supports all of SHELLS
    script = kind(context.find_root().command, {}, "aimage", "_AIMAGE_COMPLETE")
    prefix = _BASH if shell == "bash" else ""
    click.echo(prefix + (script.source_template % script.source_vars()).strip())
