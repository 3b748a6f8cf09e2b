"""Examples in the help: every verb has some, and they are valid command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from clowder_aimage.cli.console.example import get_examples
from clowder_aimage.cli.main import cli
from tests.docs.test_docs_names import VERBS
from tests.process import Aimage

DIGEST = f"sha256:{'0' * 64}"
COMMANDS = {name.removeprefix("aimage "): command for name, command in VERBS.items()}
EXAMPLES = {name: lines for name, command in COMMANDS.items() if (lines := get_examples(command))}


def parse(
    words: list[str], command: click.Command = cli, parent: click.Context | None = None
) -> str:
    """Parse a command line as click does before it calls a verb; return the verb's name."""
    context = command.make_context(parent.info_name if parent else "aimage", words, parent=parent)
    rest = [*getattr(context, "_protected_args", ()), *context.args]
    if isinstance(command, click.Group) and rest:
        name, found, more = command.resolve_command(context, rest)
        assert found is not None
        context.info_name = name
        return f"{name} {parse(more, found, context)}".strip()
    return ""


def test_every_verb_has_examples() -> None:
    groups = {
        name
        for name, command in COMMANDS.items()
        if isinstance(command, click.Group) and not command.invoke_without_command
    } - {"aimage"}
    lacking = set(COMMANDS) - groups - set(EXAMPLES)
    assert not lacking, f"add @examples(...) above @verb: {', '.join(lacking)}"


@pytest.mark.parametrize("verb", EXAMPLES)
def test_examples_are_valid(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("sbom.json", "signer.pem", "signer.pub", "model.sig"):
        (tmp_path / name).touch()
    for line in EXAMPLES[verb]:
        assert len(line) <= 96, "it is too wide"
        command = re.sub(r"\s+#.*", "", line).replace("sha256:...", DIGEST)
        found = re.findall(r"aimage [^|<>)]+", command)
        names = [parse(shlex.split(each)[1:]) for each in found]
        assert verb == "aimage" or any(name == verb for name in names), names


def test_an_example_with_an_unknown_option_is_found() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(["pull", "x", "--nothing"])


def test_the_help_shows_the_examples(aimage: Callable[..., Aimage]) -> None:
    for verb, lines in EXAMPLES.items():
        shown = aimage()(*verb.removeprefix("aimage").split(), "--help").out
        assert "\nExamples:\n" + "".join(f"  {line}\n" for line in lines) in shown
