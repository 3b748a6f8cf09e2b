"""``aimage``: the group of all verbs, and what becomes of errors."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import click

from clowder_aimage import __version__
from clowder_aimage.cli.console.option import common_options
from clowder_aimage.cli.console.output import printable
from clowder_aimage.cli.console.remedy import advice
from clowder_aimage.errors import AImageError

# verb: (module, first line of its help); the module is imported when the verb is used
VERBS = {
    "create": ("create", "Pack a model as an AImage."),
    "convert": ("convert", "Make an AImage with other types of weights."),
    "export": ("export", "Write an AImage as the directory it was made from."),
    "validate": ("validate", "Check a document against its schema."),
    "push": ("push", "Send an AImage to the registry in its name."),
    "pull": ("pull", "Fetch an AImage from the registry in its name."),
    "copy": ("copy", "Copy an AImage from a registry to a registry."),
    "tags": ("tags", "List the tags of a repository in a registry."),
    "attach": ("attach", "Attach files to what a registry holds."),
    "referrers": ("referrers", "List what is attached."),
    "run": ("run", "Make a picture from a prompt."),
    "replay": ("replay", "Render a picture again and compare."),
    "ls": ("ls", "List the AImages in the store."),
    "show": ("show", "Show what an AImage consists of."),
    "diff": ("diff", "Show how two AImages differ."),
    "du": ("du", "Show what the names in the store take on disk."),
    "df": ("df", "Show how full the store is."),
    "tag": ("tag", "Give an AImage another name."),
    "rm": ("rm", "Forget a name."),
    "save": ("save", "Write AImages to a tar file."),
    "load": ("load", "Read AImages from a tar file."),
    "pin": ("pin", "Let no collection take a name."),
    "unpin": ("pin", "Let a pinned name go."),
    "gc": ("gc", "Remove what nothing in the store needs."),
    "verify": ("verify", "Check every byte of the store."),
    "login": ("login", "Keep credentials for a registry."),
    "logout": ("login", "Forget the credentials of a registry."),
    "registry": ("registry", "Be a registry."),
    "serve": ("serve", "Make pictures for clients."),
    "node": ("node", "Keep models on this machine."),
    "ps": ("ps", "List the models that a worker has loaded."),
    "stop": ("stop", "Have a worker let a model go."),
    "config": ("config", "Show the configuration."),
}

EXIT_CODES = """\b
Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 not authorised,
5 verification failed, 6 no space, 130 interrupted.
"""


class _Verbs(click.Group):
    """A group that knows its verbs' names and imports only the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"clowder_aimage.cli.verbs.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(
    cls=_Verbs,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="aimage")
@common_options
def cli() -> None:
    """AI models as OCI artifacts: create, push, pull and run them.

    A name is [HOST/]REPOSITORY[:TAG][@DIGEST]. Without a host it is local.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its documented exit code.

    Args:
        arguments: What follows the program's name; by default those of this process.
    """
    try:
        code = cli.main(arguments, prog_name="aimage", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except AImageError as error:
        text = advice(error)
        _print_error(f"{error.message}\n  {text}" if text else error.message)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted; what was complete is kept")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Run the command line and leave the process, without waiting for threads on a dead network."""
    code = run()
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _print_error(message: str) -> None:
    click.echo(f"aimage: {printable(message)}", err=True)
