"""Each verb once in a process of its own: imports, exit code, stdout and stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clowder_aimage.cli.main import VERBS
from tests.process import Aimage, run

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


# Each child imports what the verb needs; the interpreter and the entry are loaded once
FORKS = """
import json, os, sys
from clowder_aimage.cli.main import main
for words in json.load(sys.stdin):
    child = os.fork()
    if not child:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{words[0]}.{kind}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["aimage", *words]
        main()
    with open(f"{words[0]}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all verbs; return the directory of their exit codes and outputs."""
    home = tmp_path_factory.mktemp("processes")
    calls = json.dumps([[verb, *text.split()] for verb, (text, _) in CALLS.items()])
    here = Aimage(home, home / "store")
    run([sys.executable, "-c", FORKS], input=calls, text=True, env=here.env(), cwd=home, check=True)
    return home


def test_the_table_lists_every_verb() -> None:
    assert CALLS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", CALLS)
def test_each_verb_runs_as_a_process(verb: str, ended: Path) -> None:
    _, expected = CALLS[verb]
    code, out, err = ((ended / f"{verb}.{kind}").read_text() for kind in ("code", "out", "err"))
    assert int(code) == expected, err
    assert "Traceback" not in err
    assert bool(err) == bool(expected or verb == "ls")  # a note that there is no store
    assert not (expected and out)
