"""Stores on file systems of several hosts: written only if locks reach from one to the other."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.content.file_system import ON_LIMIT, Limit
from clowder_aimage.content.mount import Mount
from clowder_aimage.errors import StoreBusyError, StoreError
from clowder_aimage.layout import ImageLayout, index_file, lease, lock
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.limit import find_limits
from clowder_aimage.oci import Descriptor, Reference
from tests.content.artifact import put, put_artifact

NAME, OTHER = Reference.parse("a:v1"), Reference.parse("b:v1")
# Each operation that changes a store.
WRITES: dict[str, Callable[[ImageLayout], object]] = {
    "push": lambda store: put(store, b"new"),
    "tag": lambda store: store.tag(store.resolve(NAME), OTHER),
    "untag": lambda store: store.untag(NAME),
    "pin": lambda store: store.pin("a:v1"),
    "unpin": lambda store: store.unpin("a:v1"),
    "collect": lambda store: Collector(store, grace=0).run(),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageLayout:
    """Return a store with an artifact; nobody has said that one host alone writes it."""
    monkeypatch.setattr(lock, "SINGLE_WRITER", [])
    made = ImageLayout(tmp_path / "store")
    put_artifact(made, "a:v1", b"one")
    return made


def mounted(monkeypatch: pytest.MonkeyPatch, kind: str, *options: str, locks: bool) -> None:
    monkeypatch.setattr(lock, "find_mount", lambda _: Mount(kind, "/x", frozenset(options)))

    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize(
    ("kind", "options", "locks"),
    [("nfs4", (), False), ("nfs", ("nolock", "local_lock=all"), True), ("fuse.sshfs", (), True)],
)
def test_writing_without_locks_between_hosts_is_refused(
    store: ImageLayout,
    operation: str,
    kind: str,
    options: tuple[str, ...],
    locks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted(monkeypatch, kind, *options, locks=locks)
    with pytest.raises(StoreError, match=rf"\({kind}\) has no locks between hosts"):
        WRITES[operation](store)
    with store.lease(store.resolve(NAME).digest):
        assert store.read(store.resolve(NAME))
    assert [name for name, _ in store.list_tags()] == ["a:v1"]
    assert list(store.pins.iter_items()) == []


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize(
    ("kind", "is_single", "locks"),
    [
        ("nfs4", False, True),
        ("nfs4", True, False),
        ("fuse.sshfs", True, True),
        ("tmpfs", False, False),
        ("overlay", False, False),
    ],
)
def test_a_store_that_one_host_writes_needs_no_locks_between_hosts(
    store: ImageLayout,
    operation: str,
    kind: str,
    is_single: bool,
    locks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted(monkeypatch, kind, locks=locks)
    monkeypatch.setattr(lock, "SINGLE_WRITER", [lambda: is_single])
    WRITES[operation](store)


def test_missing_locks_are_reported(store: ImageLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[Limit, Path]] = []
    monkeypatch.setattr(lock, "SINGLE_WRITER", [lambda: True])
    mounted(monkeypatch, "nfs4", locks=False)
    ON_LIMIT[:] = [lambda limit, path: reported.append((limit, path))]
    try:
        store.pin("a:v1")
    finally:
        ON_LIMIT.clear()
    assert set(reported) == {
        (Limit.HOST_LOCKS, store.root),
        (Limit.LOCKS, store.root / ".aimage"),
    }


def test_the_limits_are_found_without_a_trace(
    store: ImageLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(store.root.rglob("*"))
    assert find_limits(store.root) == set()
    mounted(monkeypatch, "nfs4", locks=False)
    assert find_limits(store.root) == {Limit.LOCKS}
    assert find_limits(tmp_path / "missing") is None
    assert set(store.root.rglob("*")) == before


class Locked(io.FileIO):
    """A file that another process has locked on SMB."""

    def read(self, _: int | None = None, /) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_an_index_that_another_host_replaced_is_seen_at_once(
    store: ImageLayout, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS remembers the status of a path for up to a minute, and asks the server for an open."""
    monkeypatch.setattr(index_file, "find_mount", lambda _: Mount(kind))
    index_file._is_network.cache_clear()
    reader = EntryReader(store.root, lambda: None)
    reader.read()
    path, real = store.root / "index.json", os.stat
    remembered = real(path)
    ImageLayout(store.root).tag(store.resolve(NAME), OTHER)

    def remember(place: Any, **options: Any) -> os.stat_result:
        return remembered if place == path else real(place, **options)

    monkeypatch.setattr(os, "stat", remember)
    assert (reader.read() is not None) == (kind == "nfs4")


def test_a_lease_that_cannot_be_read_is_in_use(store: ImageLayout) -> None:
    with (
        Locked(store.root / "index.json") as file,
        pytest.raises(StoreBusyError, match="does not tell what is needed"),
    ):
        lease._read(file, store.root)


def test_files_of_a_common_owner_are_written(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with all_squash gives all files one owner, who is not this user."""
    owner = store.root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    content = put(store, b"new")
    assert store.find_path(content).read_bytes() == b"new"
    assert list((store.root / ".aimage" / "ingest").iterdir()) == []


def test_files_with_changing_numbers_are_written(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of FUSE differ between calls: each ingest has its own name then."""
    numbers = itertools.count(1)
    real = os.fstat

    def renumber(fd: int) -> os.stat_result:
        values = list(real(fd)[:10])
        values[1] = next(numbers)
        return os.stat_result(values)

    content = Descriptor.of("x/y", b"new")
    monkeypatch.setattr(os, "fstat", renumber)
    ingest = store.ingest(content.digest.encoded, content)
    monkeypatch.undo()
    ingest.write_at(0, b"new")
    ingest.commit(content)
    assert store.find_path(content).read_bytes() == b"new"
