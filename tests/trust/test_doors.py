"""The doors by which content comes in, is used and goes out: each asks the policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from clowder_aimage.cli.console.option import UNCHECKED
from clowder_aimage.cli.main import cli
from clowder_aimage.config import trust_policy
from tests.cli.every_verb import iter_commands
from tests.process import Aimage
from tests.store import copy_store
from tests.trust.key_files import write_key

# Verbs that give out content, or use it, and how: on a name in the store, or in its registry.
# NAME is the name, DIGEST its digest, OTHER a free name beside it, BLOB the digest of its config.
CHECKED: dict[str, tuple[tuple[str, ...], ...]] = {
    "adapters": (),
    "attach": (("NAME", "--get", "-o", "out"),),
    "batch": (),
    "blob fetch": (("REPOSITORY@BLOB", "-o", "out"),),
    "convert": (("NAME", "converted", "--dtype", "float16"),),
    "copy": (("NAME", "OTHER"),),
    "create": (),
    "diff": (("NAME", "NAME"),),
    "embed": (("NAME", "text"),),
    "export": (("NAME", "out"),),
    "gateway": (),
    "load": (),
    "manifest fetch": (("NAME",), ("REPOSITORY@DIGEST",)),
    "manifest push": (),
    "node": (),
    "node status": (),
    "pull": (("NAME",), ("REPOSITORY@DIGEST",)),
    "registry serve": (),
    "replay": (),
    "run": (("NAME", "a", "picture"),),
    "save": (("NAME", "-o", "out.tar"),),
    "serve": (),
    "show": (("NAME",), ("NAME", "--remote")),
    "tag": (("--remote", "NAME", "moved"),),
    "validate": (("NAME",),),
    "verify": (),
}
# Verbs without content: those of a configuration, of a worker's state and of keys.
WITHOUT_CONTENT = {
    *("completion", "config show", "doctor", "help", "login", "logout", "ps", "stop", "version"),
}


@pytest.fixture(autouse=True)
def without_machine_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the policy of this machine by a file of the test, which does not exist yet."""
    path = tmp_path / "machine" / "trust.yaml"
    path.parent.mkdir()
    monkeypatch.setattr(trust_policy, "SYSTEM_FILES", [path])
    return path


def write_policy(path: Path, pattern: str, key: Path, **rule: Any) -> None:
    document = {"rules": [{"pattern": pattern, "keys": [str(key)], **rule}]}
    path.write_text(json.dumps(document))


def list_verbs() -> list[str]:
    return [" ".join(words) for words, _ in iter_commands(cli, click.Context(cli))]


def test_each_verb_is_in_the_table_of_doors() -> None:
    for verb in list_verbs():
        places = (verb in CHECKED, verb in UNCHECKED, verb in WITHOUT_CONTENT)
        is_fleet = verb.partition(" ")[0] == "fleet"
        assert is_fleet or sum(places) >= 1, f"{verb} is in no table of doors"
    assert set(CHECKED) | UNCHECKED <= set(list_verbs())
