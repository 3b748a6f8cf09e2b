"""Each verb once as a child process: imports, exit code, stdout and stderr."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from clowder_aimage.cli.main import VERBS, cli
from tests.process import Aimage

pytestmark = pytest.mark.integration

# verb: arguments and exit code, in an empty store, where they are not those of ``call_of``
CALLS = {
    "create": ("x missing", 3),
    "convert": ("x y --dtype bf16", 3),
    "validate": ("missing.json", 3),
    "push": ("x", 2),
    "pull": ("x", 2),
    "copy": ("x y", 2),
    "tags": ("x", 2),
    "attach": ("x file", 2),
    "referrers": ("x", 2),
    "run": ("x prompt --steps 0", 2),
    "embed": ("x", 2),
    "batch": ("missing.jsonl", 3),
    "replay": ("x.png", 3),
    "picture": ("show x.png", 3),
    "sign": ("x", 2),
    "trust": ("check", 2),
    "save": ("x -o x.tar", 3),
    "load": ("x.tar", 3),
    "pin": ("x", 3),
    "login": ("localhost:1", 2),
    "logout": ("localhost:1", 3),
    "registry": ("serve --addr nowhere", 2),
    # Servers are started by tests of their own; their imports take a second
    "serve": ("--addr", 2),
    "node": ("--addr", 2),
    "gateway": ("--addr", 2),
    "fleet": ("drain", 2),
    "ps": ("--store x", 2),
    "stop": ("x --store x", 2),
    "sleep": ("x --store x", 2),
    "wake": ("x --store x", 2),
    "config": ("show", 0),
    "resolve": ("x", 2),
    "repo": ("ls", 2),
    "manifest": ("fetch", 2),
    "blob": ("fetch x", 2),
    "delete": ("x", 2),
    "completion": ("bash", 0),
}


def call_of(verb: str) -> tuple[str, int]:
    """Return arguments, a missing name for each required one, and the exit code."""
    if verb in CALLS:
        return CALLS[verb]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    required = [each for each in command.params if isinstance(each, click.Argument)]
    names = ["x" for argument in required if argument.required]
    return " ".join(names), 3 if names else 0


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_runs_as_a_process(verb: str, aimage: Callable[..., Aimage]) -> None:
    text, code = call_of(verb)
    done = aimage().process(verb, *text.split(), code=code)
    assert bool(done.err) == bool(code or verb == "ls")  # a note that there is no store
    assert not (code and done.out)
