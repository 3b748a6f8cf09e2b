"""The ``aimage`` command: the group of all verbs and its exit codes."""

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

# verb: (module, first line of its help); modules are imported on use
VERBS = {
    "create": ("create", "Pack a model as an AImage."),
    "convert": ("convert", "Convert the weights of an AImage."),
    "export": ("export", "Write an AImage as a model directory."),
    "validate": ("validate", "Validate a document against its schema."),
    "push": ("push", "Push an AImage to its registry."),
    "pull": ("pull", "Pull an AImage from its registry."),
    "copy": ("copy", "Copy an AImage from one registry to another."),
    "tags": ("tags", "List the tags of a repository in a registry."),
    "attach": ("attach", "Attach files to an artifact in a registry."),
    "referrers": ("referrers", "List the artifacts attached to an artifact."),
    "run": ("run", "Generate a picture from a prompt."),
    "replay": ("replay", "Generate a picture again, and compare."),
    "ls": ("ls", "List the AImages in the store."),
    "show": ("show", "Show the content of an AImage."),
    "diff": ("diff", "Show the differences between two AImages."),
    "du": ("du", "Show the disk usage of each name."),
    "df": ("df", "Show the disk space of the store."),
    "tag": ("tag", "Give an AImage another name."),
    "rm": ("rm", "Remove a name from the store."),
    "save": ("save", "Write AImages to a tar file."),
    "load": ("load", "Read AImages from a tar file."),
    "pin": ("pin", "Protect a name from gc and rm."),
    "unpin": ("pin", "Remove the protection of a name."),
    "gc": ("gc", "Remove content that no name needs."),
    "verify": ("verify", "Verify every byte of the store."),
    "login": ("login", "Store credentials for a registry."),
    "logout": ("login", "Remove the credentials of a registry."),
    "registry": ("registry", "Serve the store as an OCI registry."),
    "serve": ("serve", "Serve models to clients."),
    "node": ("node", "Keep specified models on this machine."),
    "ps": ("ps", "List the models that a worker has loaded."),
    "stop": ("stop", "Unload a model from a worker."),
    "config": ("config", "Show the configuration."),
}

EXIT_CODES = """\b
Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 not authorised,
5 verification failed, 6 no space, 130 interrupted.
"""


class _Verbs(click.Group):
    """A group that imports only the verb that is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"clowder_aimage.cli.verbs.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@common_options
@click.command(
    cls=_Verbs,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="aimage")
def cli() -> None:
    """AI models as OCI artifacts: create, push, pull and run them.

    A name is [HOST/]REPOSITORY[:TAG][@DIGEST]. Without a host it is local.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its documented exit code.

    Args:
        arguments: The arguments after the program name; by default those of this process.
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
        _print_error("interrupted; complete blobs are kept")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Run the command line and exit without joining threads that wait for the network."""
    code = run()
    if threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _print_error(message: str) -> None:
    click.echo(f"aimage: {printable(message)}", err=True)
