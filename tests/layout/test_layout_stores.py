"""Several stores in order, including read-only ones."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process import LATE_MODULES, Aimage, run
from tests.store import copy_store

NOBODY = 65534
# another user may not be allowed to read the code, so it is imported before the switch
AS_NOBODY = f"""
import importlib, os, sys
for name in "ls show tag gc verify".split():
    importlib.import_module(f"clowder_aimage.cli.verbs.{{name}}")
import clowder_aimage.cli.console.output, clowder_aimage.cli.console.progress
import clowder_aimage.layout.gc, clowder_aimage.verify
from clowder_aimage.cli.main import main
{LATE_MODULES}
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
main()
"""


def files(root: Path) -> dict[Any, Any]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return a home with a store."""
    home = tmp_path_factory.mktemp("made")
    Aimage(home, home / "other")("create", "theirs", tiny)
    return home


@pytest.fixture
def two(made: Path, tmp_path: Path) -> Aimage:
    """Return an own empty store, and one that only another user may write."""
    home = tmp_path / "home"
    copy_store(made, home)
    here = Aimage(home, home / "other")
    here.environment["AIMAGE_STORE"] = f"{home / 'first'}{os.pathsep}{here.store}"
    return here


def as_nobody(here: Aimage, *arguments: Any, code: int = 0) -> Any:
    done = run(
        [sys.executable, "-c", AS_NOBODY, *map(str, arguments)],
        text=True,
        env=here.env(),
        cwd="/",
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_layered_store_reads_all_and_writes_the_first(two: Aimage) -> None:
    before = files(two.store)
    first = two.home / "first"
    two("tag", "theirs", "again")
    assert two("ls", "--json").value[0]["reference"] == "again:latest"
    assert "again:latest" not in two("--store", two.store, "ls").out
    two("show", "theirs")
    two("verify", "again")
    assert len(list((first / "blobs").rglob("*"))) == 0  # it needs the other one
    two("rm", "theirs", code=3)  # not ours
    two("rm", "again")
    two("gc", "--grace", "0")
    assert {path: at for path, at in files(two.store).items() if ".aimage" not in path.parts} == {
        path: at for path, at in before.items() if ".aimage" not in path.parts
    }


@pytest.mark.parametrize("verb", ["rm", "pin"])
def test_rm_and_pin_of_a_read_only_name_report_its_store(two: Aimage, verb: str) -> None:
    """It is not pinned either, as a collection of that store would ignore the pin."""
    digest = two("show", "theirs", "--json").value["digest"]
    names = {"theirs": "theirs:latest", "theirs:latest": "theirs:latest"}
    if verb == "pin":
        names[f"theirs@{digest}"] = f"theirs@{digest}"
    for name, told in names.items():
        done = two(verb, name, code=3)
        assert f"{told} is in the store {two.store}, which is read-only" in done.err
        assert f"aimage --store {two.store} {verb} {told}" in done.err
    assert "mine:latest not found in the store" in two(verb, "mine", code=3).err
    two("tag", "theirs", "theirs")
    two(verb, "theirs")  # of the own store
    if verb == "rm":
        two("rm", "theirs", code=3)


def test_gc_removes_no_read_only_names(two: Aimage) -> None:
    two("tag", "theirs", "ours")
    for options in (["--dry-run"], []):
        done = two("gc", "--max-age", "0s", *options, "--json").value
        assert [one["reference"] for one in done["forgotten"]] == ["ours:latest"]
    assert [row["reference"] for row in two("ls", "--json").value] == ["theirs:latest"]


def test_blobs_of_another_store_are_not_copied(two: Aimage, tiny: Path) -> None:
    two("create", "mine", tiny)
    blobs = [path for path in (two.home / "first" / "blobs").rglob("*") if path.is_file()]
    assert blobs == []
    shutil.rmtree(two.store)
    assert "missing" in two("verify", code=5).out


def test_first_store_with_a_name_resolves_it(two: Aimage, tiny: Path) -> None:
    two("create", "theirs", tiny, "--license", "mit")
    rows = two("ls", "--json").value
    assert [row["reference"] for row in rows] == ["theirs:latest"]
    assert two("show", "theirs", "--json").value["digest"] == rows[0]["digest"]
    assert rows[0]["digest"] != two("--store", two.store, "ls", "--json").value[0]["digest"]


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_store_can_be_listed_shown_and_verified(two: Aimage) -> None:
    for path in (two.home, *two.home.parents):
        if not path.stat().st_mode & 0o005:
            path.chmod(path.stat().st_mode | 0o005)
    before = files(two.store)
    theirs = ("--store", two.store)
    for verb in (["ls"], ["show", "theirs"], ["verify"]):
        assert "theirs" in as_nobody(two, *theirs, *verb) or verb[0] == "verify"
    as_nobody(two, *theirs, "tag", "theirs", "x", code=1)
    as_nobody(two, *theirs, "gc", code=1)
    assert files(two.store) == before
