"""The ``aimage`` command: the group of all verbs and its exit codes."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import click

from clowder_aimage import __version__
from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.interruption import interruption
from clowder_aimage.cli.console.option import VerbGroup, common_options, verbose_option
from clowder_aimage.cli.console.output import META, clean_lines, format_event, wants_json
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

# Group: verb: its module, which has a function of its name and is imported on use, and its line in
# the list of verbs.
GROUPS = {
    "Models": {
        "create": ("create", "Pack a model as an AImage."),
        "convert": ("convert", "Convert the weights of an AImage."),
        "export": ("export", "Write an AImage as a model directory."),
        "run": ("run", "Generate a picture or an answer from a prompt."),
        "embed": ("embed", "Compute embeddings of texts."),
        "batch": ("batch", "Send many requests from a file to a worker."),
        "replay": ("replay", "Generate a picture again, and compare."),
        "picture": ("picture", "Show and verify the origin of a picture."),
        "show": ("show", "Show the content of an AImage."),
        "bom": ("bom", "Write the bill of materials of an AImage."),
        "diff": ("diff", "Show the differences between two AImages."),
    },
    "Registries": {
        "login": ("login", "Store credentials for a registry."),
        "logout": ("login", "Remove the credentials of a registry."),
        "push": ("push", "Push an AImage to its registry."),
        "pull": ("pull", "Pull an AImage from its registry."),
        "copy": ("copy", "Copy an AImage from one registry to another."),
        "resolve": ("resolve", "Print the digest of a name in a registry."),
        "tags": ("tags", "List the tags of a repository in a registry."),
        "attach": ("attach", "Attach files to an artifact in a registry."),
        "sign": ("sign", "Sign an AImage."),
        "trust": ("trust", "Explain the policy of signatures and licences."),
        "referrers": ("referrers", "List the artifacts attached to an artifact."),
        "adapters": ("adapters", "List the adapters of a model."),
        "repo": ("repo", "List the repositories of a registry."),
        "manifest": ("manifest", "Fetch or push a manifest."),
        "blob": ("blob", "Fetch a blob."),
        "delete": ("delete", "Delete a tag or a manifest from a registry."),
    },
    "Store": {
        "ls": ("ls", "List the AImages in the store."),
        "tag": ("tag", "Give an AImage another name."),
        "rm": ("rm", "Remove a name from the store."),
        "pin": ("pin", "Protect a name from gc and rm."),
        "unpin": ("pin", "Remove the protection of a name."),
        "du": ("du", "Show the disk usage of each name."),
        "df": ("df", "Show the disk space of the store."),
        "gc": ("gc", "Remove content that no name needs."),
        "index": ("index", "Write the newest names for other tools."),
        "verify": ("verify", "Verify every byte of the store."),
        "save": ("save", "Write AImages to a tar file."),
        "load": ("load", "Read AImages from a tar file."),
        "validate": ("validate", "Validate a document against its schema."),
    },
    "Services": {
        "serve": ("serve", "Serve models to clients."),
        "ps": ("ps", "List the models that a worker has loaded."),
        "stop": ("stop", "Unload a model from a worker."),
        "sleep": ("sleep", "Let a model leave the GPU of a worker."),
        "wake": ("sleep", "Load a model into a worker."),
        "gateway": ("gateway", "Serve models to clients by the workers of a fleet."),
        "fleet": ("fleet", "Prepare and observe a fleet of workers."),
        "node": ("node", "Keep specified models on this machine."),
        "registry": ("registry", "Serve the store as an OCI registry."),
        "config": ("config", "Show the configuration."),
    },
    "Help": {
        "help": ("help", "Show the help of a verb."),
        "doctor": ("doctor", "Check this installation and this machine."),
        "version": ("help", "Print the version."),
        "completion": ("completion", "Print a completion script for a shell."),
    },
}
VERBS = {name: entry for verbs in GROUPS.values() for name, entry in verbs.items()}
# Names of docker, oras, crane and ollama: they work and are not listed.
ALIASES = {
    "catalog": "repo ls",
    "cp": "copy",
    "digest": "resolve",
    "discover": "referrers",
    "images": "ls",
    "info": "show",
    "inspect": "show",
    "list": "ls",
    "remove": "rm",
    "rmi": "rm",
    "unload": "stop",
}
# Verbs of other tools without an equal, with advice.
_PICTURE = "'aimage run' generates a picture"
_ANSWER = "'aimage run' answers with a language model"
_ELSEWHERE = {
    "build": "'aimage create' packs a model directory",
    "auth": "'aimage login' stores credentials for a registry",
    "ask": _ANSWER,
    "cat": "'aimage manifest fetch' prints a manifest, 'aimage blob fetch' a blob",
    "chat": _ANSWER,
    "clean": "'aimage gc' removes content that no name needs",
    "download": "'aimage pull' fetches an AImage; 'aimage create NAME ORG/REPO' packs a model of "
    "the Hugging Face hub",
    "draw": _PICTURE,
    "fetch": "'aimage pull' fetches an AImage, 'aimage manifest fetch' a manifest",
    "generate": _PICTURE,
    "imagine": _PICTURE,
    "import": "'aimage create' packs a model directory, 'aimage load' reads a tar file",
    "prune": "'aimage gc' removes content that no name needs",
    "quantize": "'aimage convert REF NAME --quantize int8' quantizes an AImage",
    "rename": "'aimage tag REF NAME' adds a name, 'aimage rm REF' removes one",
    "search": "'aimage tags' lists the tags of a repository, 'aimage ls' the names in the store",
    "start": "'aimage serve' starts a worker",
    "untag": "'aimage rm' removes a name from the store, 'aimage delete' a tag from a registry",
    "upload": "'aimage push' sends an AImage to its registry",
    "whoami": "'aimage login HOST' checks the stored credentials of a registry",
}

# New objects after which garbage is collected: more than imports create. They leave none, and its
# collection would take a tenth of a short command.
_MAX_NEW_OBJECTS = 50_000
_USUAL_THRESHOLDS = gc.get_threshold()
# What 'aimage' alone shows.
_FIRST_VERBS = {
    "run": "shapes two red circles",
    "create": "shapes examples/shapes/model",
    "pull": NAME,
    "push": NAME,
    "serve": "--default-model shapes",
}

_STDOUT = "<stdout>"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_CODES = """\b
Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 not authorised,
5 verification failed, 6 no space, 130 interrupted.
"""


class _Verbs(VerbGroup):
    """A group that imports only the verb that is run, and reports its errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo("\n".join(_format_introduction()))
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"clowder_aimage.cli.verbs.{VERBS[cmd_name][0]}")
        if cmd_name in GROUPS["Models"] or cmd_name in GROUPS["Services"]:
            # Their garbage may be large.
            gc.set_threshold(*_USUAL_THRESHOLDS)
        command: click.Command = getattr(module, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the verbs that begin with a text, without importing them."""
        from click.shell_completion import CompletionItem

        verbs = (entry for entry in VERBS.items() if entry[0].startswith(incomplete))
        items = [CompletionItem(name, help=text) for name, (_, text) in verbs]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb and its arguments. Raises UsageError: there is no such verb."""
        alias = ALIASES.get(args[0])
        name, *words = alias.split() if alias else args[:1]
        if name not in VERBS and not ctx.resilient_parsing and not name.startswith("-"):
            ctx.meta[META + "as_json"] = wants_json() or "--json" in args
            raise UsageError(f"unknown verb '{name}'", hint=_suggest_verb(name))
        return super().resolve_command(ctx, [name, *words, *args[1:]])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; report its errors while the common options are known."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (click.ClickException, AImageError, OSError) as error:
            # An import that Ctrl-C ended may raise another error.
            if interruption.is_pending:
                raise KeyboardInterrupt from error
            ctx.exit(_report(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name, text) for name, (_, text) in verbs.items()])


def _format_introduction() -> list[str]:
    """Return the lines that a terminal shows of five verbs, if none is stated."""
    lines = ["AI models as OCI artifacts: create, push, pull and run them.", ""]
    for name, example in _FIRST_VERBS.items():
        lines += [f"  {name:<8}{VERBS[name][1]}", f"{'':10}aimage {name} {example}"]
    return [*lines, "", "'aimage --help' lists all verbs, 'aimage run --help' the options of one."]


def _suggest_verb(name: str) -> str:
    from clowder_aimage.document.similarity import find_nearest

    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    nearest = find_nearest(name, [*VERBS, *ALIASES], cutoff=0.66)
    if nearest is None:
        return "'aimage --help' lists the verbs"
    return f"did you mean 'aimage {ALIASES.get(nearest, nearest)}'?"


@examples(
    "aimage create shapes examples/shapes/model",
    "aimage run shapes two red circles",
    f"aimage tag shapes {NAME}",
    f"aimage push {NAME}",
)
@common_options
@verbose_option
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
    except BrokenPipeError:
        _discard_output()
        code = 0
    except (click.ClickException, AImageError, OSError) as error:
        # An error in the options before the verb.
        code = _report(error)
    except BaseException as error:
        if not (interruption.is_pending or isinstance(error, KeyboardInterrupt | click.Abort)):
            raise
        if isinstance(error, click.Abort):
            # The cursor is behind a question.
            click.echo(err=True)
        kept = "; complete blobs are kept" if interruption.has_stopped_copy else ""
        _print_error(f"interrupted{kept}")
        code = 130
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Run the command line and exit without joining threads that wait for the network."""
    gc.set_threshold(_MAX_NEW_OBJECTS)
    interruption.install()
    _open_standard_streams()
    # Libraries warn about values from models and pictures.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    code = run()
    if "clowder_aimage.content.telemetry" in sys.modules:
        sys.modules["clowder_aimage.content.telemetry"].stop()
    if "clowder_aimage.registry.credential_helper" in sys.modules:
        sys.modules["clowder_aimage.registry.credential_helper"].end_helpers()
    if threading.active_count() > 1:
        import logging

        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread that waits for the network would delay the exit.
        os._exit(code)
    # Without a last collection, which would look at every object.
    gc.freeze()
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open the null device for closed streams; let all of them print any character.

    Otherwise the next opened file would get the descriptor of a stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for name, kind in (("stdout", _Output), ("stderr", _Messages)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _replace_stream(stream, kind))


class _Output(io.FileIO):
    """Stdout, whose errors are told from those of other files."""

    def write(self, data: Any) -> int:
        """Write data. Raises OSError with the name of the stream."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


class _Messages(io.FileIO):
    """Stderr; what cannot be written is lost, as no work fails for want of a message."""

    def write(self, data: Any) -> int:
        """Write data; ignore errors."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _replace_stream(stream: io.TextIOWrapper, kind: type[io.FileIO]) -> io.TextIOWrapper:
    stream.flush()
    raw = kind(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _discard_output() -> None:
    """Redirect stdout to the null device: Python flushes it at the exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _convert_system_error(error: OSError) -> AImageError:
    """Return the error for a refusal of the system that no verb expected."""
    from clowder_aimage.content.atomic_file import DISK_FULL
    from clowder_aimage.content.file_system import ADVICE

    subject = f"cannot access {error.filename}" if error.filename else "cannot read or write a file"
    if error.filename == _STDOUT:
        subject = "cannot write to stdout"
        _discard_output()
    message = f"{subject}: {error.strerror or error}"
    if error.errno in DISK_FULL:
        return NoSpaceError(message, hint="free some space")
    if (advice := ADVICE.get(error.errno or 0)) is not None:
        return StoreError(message, hint=advice)
    return StoreError(
        message, remedy="file_permissions" if error.errno in _DENIED else "store_calls"
    )


def _report(error: click.ClickException | AImageError | OSError) -> int:
    """Print an error with its advice, with ``--json`` as an event; return its exit code."""
    from clowder_aimage.cli.console.remedy import format_advice

    if isinstance(error, OSError):
        error = _convert_system_error(error)
    credentials = ""
    if isinstance(error, AImageError):
        credentials = error.facts.get("credentials", "")
        _suggest_name(error)
        kind, message, hint = type(error).__name__, error.message, format_advice(error)
    else:
        message = error.format_message()
        # A group without a verb shows its help.
        if message.startswith("Usage:"):
            click.echo(message, err=True)
            return error.exit_code
        context = error.ctx if isinstance(error, click.UsageError) else None
        kind, hint = "UsageError", f"see: {context.command_path} --help" if context else None
        message = " ".join((message[:1].lower() + message[1:].rstrip(".")).split())
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            from clowder_aimage.document.similarity import find_nearest

            message = f"no such option '{error.option_name}'"
            if nearest := find_nearest(error.option_name, error.possibilities, prefix="--"):
                hint = f"did you mean {nearest}? {hint or ''}".rstrip()
    code = error.exit_code
    if wants_json():
        facts = {"code": kind, "exit": code, "message": message}
        facts |= {"credentials": credentials} if credentials else {}
        click.echo(format_event("error", **facts, **({"hint": hint} if hint else {})), err=True)
    else:
        _print_error(message, f"credentials: {credentials}" if credentials else None, hint)
    return code


def _suggest_name(error: AImageError) -> None:
    """Name the AImage in the store whose name resembles one that is not there."""
    if error.remedy != "not_in_store_pull":
        return
    from pathlib import Path

    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.layout.entry_name import find_similar_name

    with contextlib.suppress(AImageError):
        names = (name for name, _ in ImageLayout(Path(error.facts["root"])).list_tags())
        if similar := find_similar_name(error.facts["name"], names):
            error.remedy = ""
            error.hint = f"did you mean {similar}? 'aimage ls' lists the names in the store"


def _print_error(message: str, *details: str | None) -> None:
    """Print an error; on a terminal with colours, unless NO_COLOR is set."""
    # The message may be from a registry.
    text = clean_lines(message.replace("\n", " "))
    advice_text = "".join(f"\n  {clean_lines(line)}" for line in details if line)
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        click.echo(f"aimage: {text}{advice_text}", err=True)
    else:
        # Click removes colours outside a terminal.
        click.secho("aimage: ", fg="red", err=True, nl=False)
        click.echo(text + click.style(advice_text, dim=True), err=True)
