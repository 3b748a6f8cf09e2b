"""Each verb once as a child process: imports, exit code, stdout and stderr."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clowder_aimage.cli.main import VERBS
from tests.process import Aimage

# verb: arguments and exit code, in an empty store
CALLS = {
    "create": ("x missing", 3),
    "convert": ("x y --dtype bf16", 3),
    "export": ("x out", 3),
    "validate": ("missing.json", 3),
    "push": ("x", 2),
    "pull": ("x", 2),
    "copy": ("x y", 2),
    "tags": ("x", 2),
    "attach": ("x file", 2),
    "referrers": ("x", 2),
    "run": ("x prompt --steps 0", 2),
    "batch": ("missing.jsonl", 3),
    "replay": ("x.png", 3),
    "ls": ("", 0),
    "show": ("x", 3),
    "diff": ("x y", 3),
    "du": ("", 0),
    "df": ("", 0),
    "tag": ("x y", 3),
    "rm": ("x", 3),
    "save": ("x -o x.tar", 3),
    "load": ("x.tar", 3),
    "pin": ("x", 3),
    "unpin": ("x", 3),
    "gc": ("", 0),
    "verify": ("", 0),
    "login": ("localhost:1", 2),
    "logout": ("localhost:1", 3),
    "registry": ("serve --addr nowhere", 2),
    "serve": ("--addr nowhere", 2),
    "node": ("--addr nowhere", 2),
    "gateway": ("--addr nowhere", 2),
    "fleet": ("drain", 2),
    "ps": ("--store x", 2),
    "stop": ("x --store x", 2),
    "config": ("show", 0),
    "resolve": ("x", 2),
    "repo": ("ls", 2),
    "manifest": ("fetch", 2),
    "blob": ("fetch x", 2),
    "delete": ("x", 2),
    "help": ("", 0),
    "version": ("", 0),
    "completion": ("bash", 0),
}


def test_the_table_lists_every_verb() -> None:
    assert CALLS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", CALLS)
def test_each_verb_runs_as_a_process(verb: str, aimage: Callable[..., Aimage]) -> None:
    text, code = CALLS[verb]
    done = aimage().process(verb, *text.split(), code=code)
    assert bool(done.err) == bool(code or verb == "ls")  # a note that there is no store
    assert not (code and done.out)
