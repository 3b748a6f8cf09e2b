"""Blobs that are made durable together, while others arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from clowder_aimage.layout import group_commit
from clowder_aimage.layout.group_commit import GroupCommit
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.oci import Digest
from tests.wait import until

DIGESTS = [Digest.of(bytes([number])) for number in range(8)]
Add = Callable[..., None]


class Pending:
    """A blob that counts its ends."""

    renamed = given_up = synchronised = 0

    def __init__(self, *, is_large: bool = False) -> None:
        self.is_large = is_large

    def synchronise(self) -> None:
        self.synchronised += 1

    def rename(self) -> None:
        self.renamed += 1

    def give_up(self) -> None:
        self.given_up += 1


class Disk:
    """Synchronisations, which wait until they may end."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def synchronise(self, _: Path, blobs: list[Pending]) -> None:
        if blobs:
            self.counts.append(len(blobs))
            assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(group_commit, "_synchronise", disk.synchronise)
    monkeypatch.setattr(group_commit, "_MAX_BLOBS", 2)
    return disk


def test_blobs_are_added_while_others_are_made_durable(tmp_path: Path, disk: Disk) -> None:
    commit, blobs = GroupCommit(tmp_path), [Pending() for _ in DIGESTS]

    def add(*numbers: int) -> None:
        for number in numbers:
            commit.add(DIGESTS[number], blobs[number], 1)

    add(0, 1)
    until(lambda: disk.counts == [2])
    add(2)
    assert all(digest in commit for digest in DIGESTS[:3])
    # As many as are being made durable: the next one waits, so that few files are open.
    last = threading.Thread(target=add, args=(3, 4, 5))
    last.start()
    until(lambda: DIGESTS[3] in commit)
    assert DIGESTS[4] not in commit
    disk.may_end.set()
    last.join(60)
    commit.close()
    assert sum(disk.counts) == 6
    assert [blob.renamed for blob in blobs] == [1] * 6 + [0] * 2


def test_many_bytes_are_made_durable_at_once(tmp_path: Path, disk: Disk) -> None:
    disk.may_end.set()
    commit, blobs = GroupCommit(tmp_path), [Pending(), Pending()]
    commit.add(DIGESTS[0], blobs[0], 1)
    assert commit.is_pending
    commit.add(DIGESTS[1], blobs[1], group_commit._MAX_SIZE)
    until(lambda: not commit.is_pending)
    assert [blob.renamed for blob in blobs] == [1, 1]


def test_the_error_of_a_commit_is_that_of_the_next_blob(tmp_path: Path, disk: Disk) -> None:
    disk.error = ValueError("a defect, too: nothing may be named that is not stored")
    disk.may_end.set()
    commit, blobs = GroupCommit(tmp_path), [Pending(), Pending(), Pending()]
    commit.add(DIGESTS[0], blobs[0], 1)
    commit.add(DIGESTS[1], blobs[1], 1)
    until(lambda: commit.failure is not None)
    with pytest.raises(ValueError, match="a defect"):
        commit.add(DIGESTS[2], blobs[2], 1)
    assert [(blob.renamed, blob.given_up) for blob in blobs] == [(0, 1), (0, 1), (0, 0)]


def test_blobs_are_committed_without_another_thread(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    disk.may_end.set()
    commit, blobs = GroupCommit(tmp_path), [Pending(), Pending()]
    monkeypatch.setattr(threading.Thread, "start", start)
    for digest, blob in zip(DIGESTS, blobs, strict=False):
        commit.add(digest, blob, 1)
    assert not commit.is_pending
    assert [(blob.renamed, blob.given_up) for blob in blobs] == [(1, 0)] * 2


def test_large_blobs_are_synchronised_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may report no error of the others."""
    calls = list[int]()

    def sync_file_system(fd: int) -> bool:
        calls.append(fd)
        return True

    monkeypatch.setattr(group_commit, "sync_file_system", sync_file_system)
    (tmp_path / PRIVATE).mkdir()
    blobs = [Pending(is_large=index % 2 == 0) for index in range(4)]
    group_commit._synchronise(tmp_path, list(blobs))
    assert [blob.synchronised for blob in blobs] == [1, 0, 1, 0]
    assert len(calls) == 1
