"""Records of repositories: each is a file, and collections remove those of missing content."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import GRACE, Collector
from clowder_aimage.layout.repository_record import RepositoryRecords
from clowder_aimage.oci import Digest, Reference
from tests.content.artifact import blob, put, put_artifact

NAMES = ("a", "a/b", "registry.example/team/model", "x" * 255)
DIGESTS = (Digest.of(b"one"), Digest.of(b"two", "sha512"))


@pytest.fixture
def records(tmp_path: Path) -> RepositoryRecords:
    return RepositoryRecords(tmp_path)


@pytest.mark.parametrize("digest", DIGESTS, ids=lambda digest: digest.algorithm)
@pytest.mark.parametrize("name", NAMES)
def test_blobs_are_of_one_repository(records: RepositoryRecords, name: str, digest: Digest) -> None:
    records.remove_blob(name, digest)
    for _ in range(2):
        records.add_blob(name, digest)
    assert records.has_blob(name, digest) and records.has_blob_anywhere(digest)
    assert not records.has_blob("other", digest) and not records.has_blob(name, Digest.of(b"3"))
    records.remove_blob(name, digest)
    assert not records.has_blob(name, digest) and not records.has_blob_anywhere(digest)
    assert records.list_repositories() == []


def test_repositories_are_listed(records: RepositoryRecords) -> None:
    assert not records.is_known("a")
    for name in NAMES:
        records.add_repository(name)
    assert sorted(records.list_repositories()) == sorted(NAMES)
    assert all(map(records.is_known, NAMES)) and not records.is_known("b")


def test_untagged_manifests_have_no_annotations(records: RepositoryRecords) -> None:
    content = blob(b"one", annotations={"org.opencontainers.image.ref.name": "a:v1"})
    records.add_untagged("a", content)
    assert [each.to_json() for each in records.list_untagged("a")] == [blob(b"one").to_json()]
    assert records.list_untagged("b") == []
    records.remove_untagged("a", content.digest)
    assert records.list_untagged("a") == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"digest": "md5:1"}', b"\xff"])
def test_a_damaged_record_is_left_out(
    records: RepositoryRecords, tmp_path: Path, raw: bytes
) -> None:
    """A crash of the file system leaves such files; content of others is served."""
    records.add_untagged("a", blob(b"one"))
    records.add_untagged("a", blob(b"two"))
    record = next((tmp_path / ".aimage/repositories").rglob(f"*{Digest.of(b'one').encoded}"))
    record.write_bytes(raw)
    assert [each.digest for each in records.list_untagged("a")] == [Digest.of(b"two")]


def test_a_linked_directory_is_not_written(records: RepositoryRecords, tmp_path: Path) -> None:
    """It may point to files of another program."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".aimage").mkdir()
    (tmp_path / ".aimage/repositories").symlink_to(tmp_path / "elsewhere")
    for write in (records.add_blob, records.remove_blob, records.remove_untagged):
        with pytest.raises(StoreError, match="is a link"):
            write("a", DIGESTS[0])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_is_reported(
    records: RepositoryRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("clowder_aimage.layout.repository_record.open_shared", fail)
    with pytest.raises(NoSpaceError):
        records.add_blob("a", DIGESTS[0])
    assert not records.has_blob("a", DIGESTS[0])


@pytest.mark.parametrize(
    ("age", "grace", "is_kept"),
    [(0, GRACE, True), (GRACE - 60, GRACE, True), (GRACE + 60, GRACE, False), (0, 0.0, False)],
)
def test_an_untagged_manifest_has_the_grace_after_the_loss(
    tmp_path: Path, age: float, grace: float, is_kept: bool
) -> None:
    """Its blobs are older, and content of removed names has no grace otherwise."""
    layout, records = ImageLayout(tmp_path), RepositoryRecords(tmp_path)
    made = put_artifact(layout, "a:v1", b"layer")
    records.add_untagged("a", made.descriptor)
    layout.untag(Reference.parse("a:v1"))
    record = next((tmp_path / ".aimage/repositories").rglob(f"*{made.digest.encoded}"))
    made_path = layout.find_path(made.descriptor)
    lost = made_path.stat().st_mtime + 10 * GRACE
    os.utime(record, (lost, lost))
    Collector(layout, grace=grace, clock=lambda: lost + age).run()
    assert made_path.exists() is is_kept
    assert all(layout.exists(child) is is_kept for child in made.children)
    assert bool(records.list_untagged("a")) is is_kept


def test_commands_record_nothing_in_a_store_that_no_registry_serves(tmp_path: Path) -> None:
    layout, records = ImageLayout(tmp_path), RepositoryRecords(tmp_path)
    put_artifact(layout, "a:v1", b"layer")
    layout.untag(Reference.parse("a:v1"))
    assert not (tmp_path / ".aimage/repositories").exists()
    put_artifact(layout, "a:v1", b"layer")
    records.begin()
    for _ in range(2):
        moved = put_artifact(layout, "a:v1", b"another")
    assert len(records.list_untagged("a")) == 1
    layout.untag(Reference.parse("a:v1"))
    assert moved.digest in {each.digest for each in records.list_untagged("a")}
    assert records.list_repositories() == ["a"]


def test_records_of_a_missing_store_do_not_create_it(tmp_path: Path) -> None:
    RepositoryRecords(tmp_path / "store").begin()
    assert list(tmp_path.iterdir()) == []


def test_collections_remove_records_of_missing_blobs(tmp_path: Path) -> None:
    layout, records = ImageLayout(tmp_path), RepositoryRecords(tmp_path)
    made = put_artifact(layout, "a:v1", b"layer")
    unneeded = put(layout, b"unneeded")
    records.add_repository("a")
    for content in (*made.children, unneeded):
        records.add_blob("a", content.digest)
    Collector(layout, grace=0.0, dry_run=True).run()
    assert records.has_blob("a", unneeded.digest)
    Collector(layout, grace=0.0).run()
    assert not records.has_blob("a", unneeded.digest)
    assert all(records.has_blob("a", child.digest) for child in made.children)
    assert records.is_known("a")
