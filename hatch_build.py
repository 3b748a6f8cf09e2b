"""Generate what the distributions have beyond the source.

These are the man pages and shell completions, which the wheel installs under share/, and the long
description: the README with links that work elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
# The address of the files of the release, such as https://git.example.com/team/name/blob/v1.2.3
SOURCE_URL = "SOURCE_URL"
COMPLETIONS = {
    "bash": "bash-completion/completions/aimage",
    "zsh": "zsh/site-functions/_aimage",
    "fish": "fish/vendor_completions.d/aimage.fish",
}


class Description(MetadataHookInterface):
    """The metadata hook: it sets the long description."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        text = link_elsewhere(text, os.environ.get(SOURCE_URL, "").rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def link_elsewhere(text: str, base: str) -> str:
    """Return Markdown whose relative links lead to files below ``base``.

    Without a ``base`` the text of such a link stays alone, and a picture is left out.
    """

    def replace(match: re.Match[str]) -> str:
        mark, label, target = match[1], match[2], match[3]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if not base:
            return "" if mark else label
        # Pages of files show a picture, and do not return it.
        return f"{mark}[{label}]({base}/{target}{'?raw=true' if mark else ''})"

    return re.sub(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", replace, text)


class SharedFiles(BuildHookInterface[Any]):
    """The build hook of the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files and add them to the wheel."""
        if version == "editable":
            return
        self.written = tempfile.TemporaryDirectory()
        for name, text in files().items():
            path = Path(self.written.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            build_data["shared_data"][str(path)] = f"share/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the files."""
        if version != "editable":
            self.written.cleanup()


def files() -> dict[str, str]:
    """Return the texts of all files by their paths under share/."""
    sys.path.insert(0, str(ROOT))
    try:
        from clowder_aimage import __version__
        from clowder_aimage.cli.main import cli, run

        found = {
            f"man/man1/{context.command_path.replace(' ', '-')}.1": man_page(context, __version__)
            for context in contexts(cli)
        }
        for shell, name in COMPLETIONS.items():
            with contextlib.redirect_stdout(io.StringIO()) as output:
                run(["completion", shell])
            found[name] = output.getvalue()
    finally:
        sys.path.remove(str(ROOT))
    return found


def contexts(
    command: click.Command, name: str = "aimage", parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield a context for each command of the tree, with its name."""
    context = click.Context(command, parent, name, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from contexts(found, child, context)


def summary(context: click.Context) -> str:
    """Return the first sentence of the help."""
    return re.split(r"(?<=[^.]\.)\s", " ".join((context.command.help or "").split()))[0]


def paragraphs(context: click.Context) -> list[tuple[str, bool]]:
    """Return the paragraphs of the help, and whether their lines are kept."""
    texts = (context.command.help or "").split("\n\n")
    return [(text.removeprefix("\b\n"), text.startswith("\b")) for text in texts]


def records(context: click.Context) -> list[tuple[str, str]]:
    """Return the options with their help."""
    params = context.command.get_params(context)
    found = (each.get_help_record(context) for each in params if isinstance(each, click.Option))
    return [record for record in found if record is not None]


def commands(context: click.Context) -> list[tuple[str, str]]:
    """Return the commands of a group, with a summary."""
    if not isinstance(context.command, click.Group):
        return []
    names = context.command.list_commands(context)
    found = [(name, context.command.get_command(context, name)) for name in names]
    return [(name, each.get_short_help_str(200)) for name, each in found if each is not None]


def man_page(context: click.Context, version: str) -> str:
    """Return the man page of a command (man(7))."""
    path = context.command_path
    name = path.replace(" ", "-")
    usage = " ".join(context.command.collect_usage_pieces(context))
    lines = [
        f'.TH "{_roff(name.upper())}" 1 "" "aimage {version}" "aimage"',
        *(".SH NAME", _roff(f"{name} - {summary(context).removesuffix('.')}")),
        *(".SH SYNOPSIS", f".B {_roff(path)}", _roff(usage)),
        ".SH DESCRIPTION",
    ]
    for text, is_kept in paragraphs(context):
        lines += [".PP", *_kept(text)] if is_kept else [".PP", _roff(" ".join(text.split()))]
    from clowder_aimage.cli.console.example import get_examples

    if shown := get_examples(context.command):
        lines += [".SH EXAMPLES", *_kept("\n".join(shown))]
    for title, items in (("COMMANDS", commands(context)), ("OPTIONS", records(context))):
        if items:
            lines.append(f".SH {title}")
        for term, text in items:
            lines += [".TP", f".B {_roff(term)}", _roff(" ".join(text.split()))]
    if context.parent is None:
        lines += [".SH EXIT STATUS", _roff(_exit_codes(context))]
    else:
        lines += [".SH SEE ALSO", ".BR aimage (1)"]
    return "\n".join(lines) + "\n"


def _exit_codes(context: click.Context) -> str:
    return " ".join((context.command.epilog or "").replace("\b", "").split())


def _kept(text: str) -> list[str]:
    return [".nf", *(_roff(line) for line in text.splitlines()), ".fi"]


def _roff(text: str) -> str:
    """Escape a line of text (groff(7))."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{text}" if text.startswith((".", "'")) else text
