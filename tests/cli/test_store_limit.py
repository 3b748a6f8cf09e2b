"""Warnings about the file system of a store, its facts in ``df``, and the setting of one writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.cli.console import store_limit
from clowder_aimage.cli.console.store_limit import build_listener, describe
from clowder_aimage.cli.verbs import df
from clowder_aimage.content.file_system import Limit
from clowder_aimage.content.mount import Mount
from clowder_aimage.layout import limit, lock
from tests.process import Aimage


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Describe a share with two limits, and return what is shown."""
    monkeypatch.setattr(store_limit, "find_mount", lambda _: Mount("cifs", "/mnt"))
    monkeypatch.setattr(store_limit, "find_limits", lambda _: {Limit.MODES, Limit.TIMES})
    return []


def test_all_limits_of_a_store_are_one_sentence(tmp_path: Path, shown: list[str]) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    store.mkdir()
    warn = build_listener([store, other], shown.append)
    warn(Limit.TIMES, store / ".aimage" / "used")
    assert shown == []
    warn(Limit.DIRECTORY_SYNC, store / "blobs")
    warn(Limit.MODES, store / "blobs" / "sha256")
    warn(Limit.DIRECTORY_SYNC, tmp_path)
    warn(Limit.MODES, other / "blobs")
    assert shown == [
        f"the file system of the store {store} (cifs) cannot sync directories and cannot set "
        "modes: a power failure may undo the last changes and blobs are not write-protected",
        f"the file system of the store {other} (cifs) cannot set modes: blobs are not "
        "write-protected",
    ]


def test_another_file_system_has_its_own_sentence(tmp_path: Path, shown: list[str]) -> None:
    warn = build_listener([], shown.append)
    for name in ("out/a", "out/b"):
        warn(Limit.DIRECTORY_SYNC, tmp_path / name)
    assert shown == [
        "the file system at /mnt (cifs) cannot sync directories: a power failure may undo the "
        "last changes"
    ]


def test_missing_locks_include_those_between_hosts() -> None:
    both = describe({Limit.LOCKS, Limit.HOST_LOCKS})
    assert both == describe({Limit.LOCKS})
    assert describe({Limit.HOST_LOCKS}) == "has no locks between hosts: let only one host write"


# -- df


def test_df_shows_what_the_file_system_lacks(
    stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stocked()
    value = here("df", "--json").value[0]["fileSystem"]
    assert value["type"] and value["limits"] == []
    assert "file system" in here("df").out
    monkeypatch.setattr(df, "find_mount", lambda _: Mount("nfs4"))
    monkeypatch.setattr(limit, "find_mount", lambda _: Mount("nfs4"))
    monkeypatch.setattr(os, "fchmod", refuse(errno.EPERM))
    monkeypatch.setattr(os, "statvfs", refuse(errno.ENOSYS))
    value = here("df", "--json").value[0]
    assert value["free"] is None
    assert value["fileSystem"] == {
        "type": "nfs4",
        "network": True,
        "limits": ["freeSpace", "modes"],
    }
    done = here("df")
    assert "free        unknown" in done.out
    assert "file system nfs4, of a network" in done.out
    assert "cannot set modes: blobs are not write-protected" in done.out
    assert done.err == ""


def test_df_of_a_missing_store_has_no_limits(aimage: Callable[[], Aimage]) -> None:
    assert aimage()("df", "--json").value[0]["fileSystem"]["limits"] is None


def refuse(code: int) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call


# -- one host alone writes


@pytest.fixture
def shared(stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch) -> Aimage:
    """Return the command line on a store of NFS without locks."""
    here = stocked()
    monkeypatch.setattr(lock, "find_mount", lambda _: Mount("nfs4"))
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    return here


@pytest.mark.parametrize(
    "words",
    [
        ("tag", "x", "y"),
        ("rm", "x"),
        ("gc",),
        ("pin", "x"),
        ("convert", "x", "z", "--dtype", "f32"),
    ],
)
def test_a_store_without_locks_between_hosts_is_not_written(
    shared: Aimage, words: tuple[str, ...]
) -> None:
    done = shared(*words, code=1)
    assert f"cannot write the store {shared.store}: its file system (nfs4) has no locks" in done.err
    assert "AIMAGE_STORE_SINGLE_WRITER=true" in done.err


@pytest.mark.parametrize("words", [("ls",), ("show", "x"), ("verify",), ("export", "x", "out")])
def test_a_store_without_locks_between_hosts_is_read(
    shared: Aimage, words: tuple[str, ...]
) -> None:
    shared(*words)


@pytest.mark.parametrize("text", ["true", "1", "Yes"])
def test_one_writer_by_a_variable(shared: Aimage, text: str) -> None:
    shared.environment["AIMAGE_STORE_SINGLE_WRITER"] = text
    done = shared("tag", "x", "y")
    assert done.err.count("warning: the file system of the store") == 1
    assert "has no locks: let only one command write" in done.err


def test_one_writer_by_the_configuration(shared: Aimage) -> None:
    file = shared.home / "c.json"
    file.write_text(json.dumps({"store": {"single_writer": True}}))
    shared.environment["AIMAGE_CONFIG"] = str(file)
    shared("tag", "x", "y")
    setting = {"name": "store.single_writer", "value": True, "origin": str(file)}
    assert setting in shared("config", "show", "--json").value["settings"]
    shared.environment["AIMAGE_STORE_SINGLE_WRITER"] = "false"
    setting |= {"value": False, "origin": "AIMAGE_STORE_SINGLE_WRITER"}
    assert setting in shared("config", "show", "--json").value["settings"]
    shared("tag", "x", "z", code=1)


def test_an_invalid_variable(shared: Aimage) -> None:
    shared.environment["AIMAGE_STORE_SINGLE_WRITER"] = "perhaps"
    done = shared("tag", "x", "y", code=2)
    assert "invalid AIMAGE_STORE_SINGLE_WRITER: 'perhaps'" in done.err
