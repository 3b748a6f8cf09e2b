"""Ingests: writes in any order, and no final name before verification."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.content import IngestBusyError, build_bytes_body
from clowder_aimage.errors import NoSpaceError, StoreError, VerificationError
from clowder_aimage.layout import FileIngest, ImageLayout
from clowder_aimage.layout import layout as layout_module
from clowder_aimage.oci import Descriptor, Digest, Reference
from tests.content.artifact import BLOB, blob, manifest, put, put_artifact
from tests.process import run

DATA = bytes(range(100))
CONTENT = blob(DATA)


def ingests(store: ImageLayout) -> list[Any]:
    return list((store.root / ".aimage" / "ingest").iterdir())


@pytest.mark.parametrize("expected", [CONTENT, None], ids=["expected", "unknown"])
def test_sequential_writes(store: ImageLayout, expected: Descriptor | None) -> None:
    ingest = store.ingest("key", expected)
    for start in range(0, 100, 30):
        assert not store.exists(CONTENT)
        ingest.write_at(start, DATA[start : start + 30])
    assert ingest.list_missing() == []
    ingest.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA
    assert ingests(store) == []


@settings(max_examples=40)
@given(st.permutations(range(10)), st.booleans())
def test_ranges_are_written_in_any_order(order: list[Any], known: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ingest = FileIngest(Path(directory), "key", CONTENT if known else None)
        written: set[int] = set()
        for block in order:
            ingest.write_at(block * 10, DATA[block * 10 : block * 10 + 10])
            written.add(block)
            holes = {
                byte // 10 for start, end in ingest.list_missing() for byte in range(start, end)
            }
            total = 10 if known else max(written) + 1
            assert holes == set(range(total)) - written
        ingest.commit(CONTENT)
        path = Path(directory) / "blobs" / "sha256" / CONTENT.digest.encoded
        assert path.read_bytes() == DATA


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.binary(min_size=1, max_size=6)), max_size=8))
def test_commit_accepts_only_the_expected_bytes(writes: list[Any]) -> None:
    promised = b"aabbcc"
    content = blob(promised)
    seen = bytearray()
    with tempfile.TemporaryDirectory() as directory:
        ingest = FileIngest(Path(directory), "key", content)
        for offset, data in [(0, promised), *writes]:
            ingest.write_at(offset, data)
            seen[len(seen) :] = bytes(max(0, offset + len(data) - len(seen)))
            seen[offset : offset + len(data)] = data
        path = Path(directory) / "blobs" / "sha256" / content.digest.encoded
        if bytes(seen) == promised:
            ingest.commit(content)
            assert path.read_bytes() == promised
        else:
            with pytest.raises(VerificationError):
                ingest.commit(content)
            assert not path.exists()


def test_overwriting_hashed_bytes_is_detected(store: ImageLayout) -> None:
    """The hash of the former bytes must not be used for the new ones."""
    ingest = store.ingest("key", CONTENT)
    ingest.write_at(0, DATA)
    ingest.write_at(10, b"\xff" * 10)
    with pytest.raises(VerificationError):
        ingest.commit(CONTENT)
    assert not store.exists(CONTENT)
    ingest = store.ingest("key", CONTENT)
    ingest.write_at(0, b"\xff" * 50)
    ingest.write_at(0, DATA)  # restarted, as by a retry
    ingest.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA


def test_a_hole_fails_the_commit(store: ImageLayout) -> None:
    zeros = blob(bytes(30))
    ingest = store.ingest("key", zeros)
    ingest.write_at(0, bytes(10))
    ingest.write_at(20, bytes(10))
    assert ingest.list_missing() == [(10, 20)]
    with pytest.raises(VerificationError, match="is incomplete: 20 of 30 bytes"):
        ingest.commit(zeros)
    assert ingests(store) == []


def test_commit_of_another_digest_is_refused(store: ImageLayout) -> None:
    other = Descriptor(BLOB, Digest.of(DATA, "sha512"), len(DATA))
    ingest = store.ingest("key", CONTENT)
    ingest.write_at(0, DATA)
    ingest.commit(other)
    assert store.exists(other)
    assert not store.exists(CONTENT)


def test_abort_leaves_nothing_and_is_idempotent(store: ImageLayout) -> None:
    ingest = store.ingest("key", CONTENT)
    ingest.write_at(0, DATA)
    ingest.abort()
    assert ingests(store) == []
    fd = os.open(store.root, os.O_RDONLY)  # very likely reuses the freed descriptor number
    ingest.abort()
    os.close(fd)  # raises if the second abort closed it
    with pytest.raises(StoreError):
        ingest.write_at(0, DATA)


def test_abort_after_commit_closes_no_other_file(store: ImageLayout) -> None:
    ingest = store.ingest("key", CONTENT)
    ingest.write_at(0, DATA)
    ingest.commit(CONTENT)
    fd = os.open(store.root, os.O_RDONLY)
    ingest.abort()
    os.close(fd)
    assert store.exists(CONTENT)


def test_known_content_has_one_ingest_at_a_time(store: ImageLayout) -> None:
    one = store.ingest("key", CONTENT)
    one.write_at(0, DATA[:50])
    with pytest.raises(IngestBusyError):
        store.ingest("key", CONTENT)
    one.write_at(50, DATA[50:])
    one.commit(CONTENT)
    two = store.ingest("key", CONTENT)
    one.abort()  # already ended: it must not remove the new file of the same name
    assert two.list_missing() == [(0, 100)]
    two.write_at(0, DATA)
    two.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_push_does_not_wait_for_a_stalled_ingest(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(layout_module, "_WRITE_TIMEOUT", 0.05)
    content = Descriptor(BLOB, Digest.of(DATA, algorithm), len(DATA))
    still = store.ingest(content.digest.encoded, content)
    still.write_at(0, DATA[:50])
    store.push(content, build_bytes_body(DATA))
    assert store.find_path(content).read_bytes() == DATA
    assert [path.name for path in ingests(store)] == [content.digest.encoded]
    still.write_at(50, DATA[50:])  # and it may go on
    still.commit(content)
    assert store.find_path(content).read_bytes() == DATA
    assert ingests(store) == []


def test_ingests_of_unknown_content_are_independent(store: ImageLayout) -> None:
    one, two = store.ingest("key"), store.ingest("key")
    one.write_at(0, DATA)
    two.write_at(0, b"other")
    two.commit(blob(b"other"))
    one.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA


# -- a full disk


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["pwrite", "fsync", "mkdir", "replace"])
def test_a_full_disk_is_reported_and_leaves_no_partial_blob(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = put_artifact(store, "a:v1", b"one")
    new = manifest(made.config, [])
    index = (store.root / "index.json").read_bytes()
    shutil.rmtree(store.root / ".aimage")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(NoSpaceError) as caught:
            store.push(new.descriptor, build_bytes_body(new.raw), Reference.parse("b:v1"))
    assert caught.value.exit_code == 6
    assert str(store.root) in caught.value.message
    assert not store.exists(new.descriptor)
    assert (store.root / "index.json").read_bytes() == index
    corner = store.root / ".aimage"
    assert [p for p in corner.rglob("*") if p.is_file()] == []
    store.push(new.descriptor, build_bytes_body(new.raw), Reference.parse("b:v1"))
    assert store.resolve(Reference.parse("b:v1")).digest == new.digest


def test_a_full_disk_for_the_index_only(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_artifact(store, "a:v1", b"one")
    index = (store.root / "index.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpaceError):
            store.tag(made.descriptor, Reference.parse("b:v1"))
    assert (store.root / "index.json").read_bytes() == index
    files = {p.name for p in (store.root / ".aimage").rglob("*") if p.is_file()}
    assert not [name for name in files if "." in name]
    assert [name for name, _ in store.list_tags()] == ["a:v1"]


def test_an_actually_full_disk_fails(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or run(mount).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        store = ImageLayout(disk / "store")
        small = put(store, b"small")
        large = bytes(1024 * 1024)
        with pytest.raises(NoSpaceError):
            put(store, large)
        assert not store.exists(blob(large))
        assert store.find_path(small).read_bytes() == b"small"
        assert ingests(store) == []
        put(store, bytes(64 * 1024))  # the failed ingest releases its space
    finally:
        run(["umount", str(disk)], check=True)


# -- power cuts: content is durable before it is named


def test_content_is_durable_before_its_name(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_artifact(store, "z")
    config = put(store, b"{}")
    made = manifest(config, [])
    (before,) = (store.root / ".aimage" / "names").iterdir()
    log: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        log.append(("fsync", os.fstat(fd).st_ino))
        fsync(fd)

    def watched_replace(source: str, target: str, **options: Any) -> None:
        found = os.stat(source, dir_fd=options.get("src_dir_fd"))
        log.append(("rename", found.st_ino))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    store.push(made.descriptor, build_bytes_body(made.raw), Reference.parse("a"))
    root = store.root
    # What is computed again when it is lost.
    private = root / ".aimage"
    lost = {path.stat().st_ino for path in (private / "index", *(private / "listing").glob("*"))}
    blob_inode = store.find_path(made.descriptor).stat().st_ino
    index_inode = (root / "index.json").stat().st_ino
    directory = (root / "blobs" / "sha256").stat().st_ino
    (name,) = (path for path in (root / ".aimage" / "names").iterdir() if path != before)
    names = name.parent.stat().st_ino
    log = [one for one in log if one[1] not in lost]
    assert log == [
        ("fsync", blob_inode),
        ("rename", blob_inode),
        ("fsync", directory),
        ("fsync", (root / "blobs").stat().st_ino),
        ("fsync", name.stat().st_ino),
        ("rename", name.stat().st_ino),
        ("fsync", names),
        ("fsync", index_inode),
        ("rename", index_inode),
        ("fsync", root.stat().st_ino),
    ]


def test_an_unwritable_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write must not be retried forever."""
    from clowder_aimage.layout import ingest

    calls = []

    def refuse(path: str | Path) -> NoReturn:
        calls.append(path)
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(ingest, "open_shared", refuse)
    store = ImageLayout(tmp_path / "store")
    with pytest.raises(StoreError, match="Permission denied"):
        store.ingest("key")
    assert 1 < len(calls) < 20


def test_small_ingests_of_a_batch_are_opened_by_few_calls(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("open", "stat", "lstat"):
        real = getattr(os, name)

        def call(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)
    contents = [blob(bytes([i])) for i in range(10)]
    with store.begin_batch():
        # The first two check the store and its file system.
        for content in contents:
            if content is contents[2]:
                calls.clear()
            store.ingest(content.digest.encoded, content).abort()
    assert len(calls) <= 3 * len(contents[2:])


def test_an_ingest_of_a_batch_has_one_writer(store: ImageLayout) -> None:
    first, second = blob(b"1"), blob(b"2")
    other = ImageLayout(store.root)
    with store.begin_batch(), other.begin_batch():
        for content in (first, second, CONTENT):
            ingest = store.ingest(content.digest.encoded, content)
            with pytest.raises(IngestBusyError):
                other.ingest(content.digest.encoded, content)
            ingest.abort()


@pytest.mark.parametrize("left_over", [DATA[:50], b"", DATA + b"more"])
def test_a_file_of_a_killed_process_is_written_again(store: ImageLayout, left_over: bytes) -> None:
    with store.begin_batch():
        for content in (blob(b"1"), blob(b"2")):
            store.ingest(content.digest.encoded, content).abort()
        (store.root / ".aimage" / "ingest" / CONTENT.digest.encoded).write_bytes(left_over)
        ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
        assert ingest.list_missing() == [(0, len(DATA))]
        ingest.write_at(0, DATA)
        ingest.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA


def test_a_batch_goes_on_in_a_store_that_was_moved_away(store: ImageLayout, tmp_path: Path) -> None:
    with store.begin_batch():
        for content in (blob(b"1"), blob(b"2")):
            store.ingest(content.digest.encoded, content).abort()
        store.root.rename(tmp_path / "elsewhere")
        store.root.mkdir()
        ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
        ingest.write_at(0, DATA)
        ingest.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA
