"""Small blobs that are made durable together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from clowder_aimage.layout import group_commit
from clowder_aimage.layout.group_commit import GroupCommit
from clowder_aimage.oci import Digest

DIGESTS = [Digest.of(bytes([number])) for number in range(8)]


class Pending:
    """A blob that counts its renames."""

    renamed = 0

    def synchronise(self) -> None: ...

    def rename(self) -> None:
        self.renamed += 1

    def give_up(self) -> None: ...


def test_blobs_are_added_while_others_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, counts = threading.Event(), threading.Event(), list[int]()

    def synchronise(_: Path, blobs: list[Pending]) -> None:
        counts.append(len(blobs))
        begun.set()
        assert may_end.wait(10)

    monkeypatch.setattr(group_commit, "_synchronise", synchronise)
    monkeypatch.setattr(group_commit, "_MAX_BLOBS", 2)
    monkeypatch.setattr(group_commit, "_MAX_OPEN", 5)
    commit, blobs = GroupCommit(tmp_path), [Pending() for _ in DIGESTS]

    def add(*numbers: int) -> None:
        for number in numbers:
            commit.add(DIGESTS[number], blobs[number], 1)

    first = threading.Thread(target=add, args=(0, 1))
    first.start()
    assert begun.wait(10)
    add(2, 3, 4, 5)
    assert all(digest in commit for digest in DIGESTS[:6])
    # One more would be too many open files: it waits.
    last = threading.Thread(target=add, args=(6, 7))
    last.start()
    may_end.set()
    first.join(10)
    last.join(10)
    commit.close()
    assert counts[:2] == [2, 5]
    assert sum(counts) == len(DIGESTS)
    assert [blob.renamed for blob in blobs] == [1] * len(DIGESTS)


@pytest.mark.parametrize(("size", "is_pending"), [(1, True), (group_commit._MAX_SIZE, False)])
def test_many_bytes_are_made_durable_at_once(size: int, is_pending: bool, tmp_path: Path) -> None:
    commit = GroupCommit(tmp_path)
    commit.add(DIGESTS[0], Pending(), size)
    assert commit.is_pending is is_pending
