"""Concurrent copies into one layout: each ends with all of its blobs published."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.errors import NoSpaceError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor

if TYPE_CHECKING:
    from clowder_aimage.layout.ingest import FileIngest


KIND = "application/octet-stream"


def begun(store: ImageLayout) -> tuple[Descriptor, FileIngest]:
    """Return a small ingest that is complete and not committed."""
    data = os.urandom(1000)
    content = Descriptor.of(KIND, data)
    ingest = store.ingest(content.digest.encoded, content)
    ingest.write_at(0, data)
    return content, ingest


def is_here(store: ImageLayout, content: Descriptor) -> bool:
    return ImageLayout(store.root).exists(content)


def test_batch_commits_when_the_first_user_leaves(store: ImageLayout) -> None:
    with store.begin_batch():
        with store.begin_batch():
            content, ingest = begun(store)
            ingest.commit(content)
            assert not is_here(store, content)  # it waits
        assert is_here(store, content)


def test_batch_commits_when_the_last_user_leaves(store: ImageLayout) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(store.begin_batch())
        second.enter_context(store.begin_batch())
        content, ingest = begun(store)
        first.close()
        ingest.commit(content)
        second.close()
        assert is_here(store, content)


def test_closed_batch_commits_at_once(store: ImageLayout) -> None:
    with store.begin_batch():
        content, ingest = begun(store)
    ingest.commit(content)
    assert is_here(store, content)
    store.push(content, build_bytes_body(b""))  # nothing is locked


def test_failed_commit_fails_all_users_of_a_batch(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    with ExitStack() as first, ExitStack() as second:
        first.enter_context(store.begin_batch())
        second.enter_context(store.begin_batch())
        content, ingest = begun(store)
        ingest.commit(content)
        with monkeypatch.context() as patched:
            patched.setattr("clowder_aimage.layout.ingest.FileIngest.rename", full)
            with pytest.raises(NoSpaceError):
                first.close()
        with pytest.raises(NoSpaceError):
            second.close()
    assert not is_here(store, content)
    with store.begin_batch():
        other, ingest = begun(store)
        ingest.commit(other)
    assert is_here(store, other)


def test_a_killed_batch_leaves_blobs_that_need_not_arrive_again(store: ImageLayout) -> None:
    """They are whole, and wait to be made durable. Their digest decides."""
    with store.begin_batch():
        begun(store)[1].abort()  # the first one is created by its path
        (content, whole), (other, wrong) = begun(store), begun(store)
        for ingest in (whole, wrong):
            path = Path(ingest._path)
            left = path.read_bytes()
            ingest.abort()
            path.write_bytes(left if ingest is whole else bytes(len(left)))
    whole = store.ingest(content.digest.encoded, content)
    assert whole.list_missing() == []
    whole.commit(content)
    assert is_here(store, content)
    wrong = store.ingest(other.digest.encoded, other)
    with pytest.raises(VerificationError):
        wrong.commit(other)
    assert store.ingest(other.digest.encoded, other).list_missing() == [(0, 1000)]
