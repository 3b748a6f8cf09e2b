"""Save a layout to a tar and load it: content, order and reproducibility."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, tar_store
from clowder_aimage.content.atomic_file import open_atomic
from clowder_aimage.content.tar import build_tar_header
from clowder_aimage.errors import (
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.load import load
from clowder_aimage.oci import Descriptor, Digest, Index, Reference
from clowder_aimage.save import save
from tests.content import artifact


@pytest.fixture
def here(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "there")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "out" / "x.tar"


@pytest.fixture(autouse=True)
def room(file: Path) -> Iterator[None]:
    file.parent.mkdir()
    yield
    leftovers = [path.name for path in file.parent.iterdir() if path.name.startswith(".")]
    assert not leftovers  # no partial file is left after any failure


def names(*texts: str) -> list[Any]:
    return [Reference.parse(text) for text in texts]


def blobs(layout: ImageLayout) -> dict[Any, Any]:
    return {
        f"{path.parent.name}:{path.name}": path.read_bytes()
        for path in (layout.root / "blobs").rglob("*")
        if path.is_file()
    }


def members(file: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(file) as tar:
        return tar.getmembers()


def put_sha512(layout: ImageLayout, data: bytes) -> Descriptor:
    content = Descriptor(artifact.BLOB, Digest.of(data, "sha512"), len(data))
    layout.push(content, build_bytes_body(data))
    return content


def put_index(layout: ImageLayout, name: str, *children: Any, absent: Any = ()) -> Index:
    listed = [child.descriptor for child in (*children, *absent)]
    made = artifact.index(listed)
    layout.push(made.descriptor, build_bytes_body(made.raw), Reference.parse(name))
    return made


def test_save_and_load_round_trip(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    made = artifact.put_artifact(here, "a.b/x:v1", b"one", b"", b"x" * 3_000_001)
    saved = save(here, names("a.b/x:v1"), file, is_hashed=True)
    assert saved.size == file.stat().st_size
    assert saved.digest == Digest("sha256", hashlib.sha256(file.read_bytes()).hexdigest())
    loaded = load(there, file)
    assert [(str(name), root.digest) for name, root in loaded.names] == [("a.b/x:v1", made.digest)]
    assert (loaded.blobs, loaded.skipped, loaded.problem) == (4, 0, None)
    assert blobs(there) == blobs(here)
    assert next(there.list_tags())[1].annotations == next(here.list_tags())[1].annotations


def test_save_writes_index_and_manifests_first(here: ImageLayout, file: Path) -> None:
    one = artifact.put_artifact(here, "x", b"common", b"1")
    two = artifact.put_artifact(here, "y", b"common", b"2")
    save(here, names("y", "x"), file)
    found = [member.name for member in members(file)]
    first = ["oci-layout", "index.json", "blobs", "blobs/sha256"]
    first += [f"blobs/sha256/{made.digest.encoded}" for made in (one, two)]
    assert found[: len(first)] == first
    assert found[len(first) :] == sorted(found[len(first) :])
    assert len(found) == len(set(found)) == len(first) + 5  # the shared blob occurs once


def test_save_writes_neutral_headers(here: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", b"1")
    save(here, names("x"), file)
    for member in members(file):
        assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")
        assert member.mtime == 0
        assert member.mode == (0o755 if member.isdir() else 0o644)
        assert not member.pax_headers


def test_saves_are_reproducible(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    """Also with other Python versions, whose tarfile may differ: the digest is pinned here."""
    for layout, order in ((here, (b"1", b"2")), (there, (b"2", b"1"))):
        for layer in order:
            artifact.put_artifact(layout, f"x:{layer.decode()}", layer)
    other = file.with_name("y.tar")
    digest = save(here, names("x:1", "x:2"), file, is_hashed=True).digest
    assert save(there, names("x:2", "x:1", "x:2"), other).digest is None
    assert file.read_bytes() == other.read_bytes()
    assert str(digest) == GOLDEN


GOLDEN = "sha256:b5070e868bdd8b7237cf1f0b152b2fb56faabacbf459bb0bbeddde78947dc50c"


def test_a_sha512_path_has_a_pax_header(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    content = put_sha512(here, b"long name")
    config = artifact.put(here, b"{}", artifact.CONFIG)
    made = artifact.manifest(config, [content])
    here.push(made.descriptor, build_bytes_body(made.raw), Reference.parse("x"))
    save(here, names("x"), file)
    assert [member.name for member in members(file) if member.pax_headers] == [
        f"blobs/sha512/{content.digest.encoded}"
    ]
    load(there, file)
    assert there.find_path(content).read_bytes() == b"long name"


def test_a_size_beyond_ustar_has_a_pax_header() -> None:
    header = build_tar_header("blobs/sha256/x", size=8 << 30, mode=0o644)
    with tarfile.open(fileobj=io.BytesIO(header)) as tar:
        member = tar.next()
        assert member is not None and member.size == 8 << 30
    assert b"size=8589934592\n" in header
    assert b"size" not in build_tar_header("blobs/sha256/x", size=(8 << 30) - 1, mode=0o644)


def test_save_accepts_a_digest(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    made = artifact.put_artifact(here, "x:v1", b"1")
    by_digest = f"x@{made.digest}"
    save(here, names(by_digest, f"x:v1@{made.digest}"), file)
    assert [name for name, _ in load(there, file).names] == names("x:v1", by_digest)
    assert there.resolve(*names(by_digest)).digest == made.digest
    other = artifact.put_artifact(here, "y", b"2")
    with pytest.raises(UsageError, match="refers to two manifests"):
        save(here, names("x:v1", f"x:v1@{other.digest}"), file)


def test_save_of_an_index_includes_all_present_manifests(
    here: ImageLayout, there: ImageLayout, file: Path
) -> None:
    kept = artifact.put_artifact(here, "one", b"1")
    inner = put_index(here, "inner", artifact.put_artifact(here, "two", b"2"))
    away = artifact.manifest(artifact.blob(b"{}"), [artifact.blob(b"3")])
    made = put_index(here, "all", kept, inner, absent=[away])
    saved = save(here, names("all"), file)
    assert [left.digest for left in saved.absent] == [away.digest]
    loaded = load(there, file)
    assert loaded.problem is None
    assert (loaded.names[0][1].digest, loaded.blobs) == (made.digest, 4)
    assert blobs(there) == blobs(here)


def test_save_of_an_index_without_manifests_fails(here: ImageLayout, file: Path) -> None:
    away = artifact.manifest(artifact.blob(b"{}"), [])
    put_index(here, "all", absent=[away])
    with pytest.raises(NotFoundError, match="no manifest of the index all:latest"):
        save(here, names("all"), file)
    assert not file.exists()


def test_save_reports_a_missing_blob(here: ImageLayout, file: Path) -> None:
    made = artifact.put_artifact(here, "x", b"1")
    here.find_path(made.layers[0]).unlink()
    with pytest.raises(NotFoundError, match=str(made.layers[0].digest)):
        save(here, names("x"), file)
    assert not file.exists()


def test_save_writes_no_archive_that_load_would_refuse(
    here: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact.put_artifact(here, "x")
    monkeypatch.setattr(tar_store, "MAX_MEMBERS", 5)
    with pytest.raises(UsageError, match="would have 6 members, over 5"):
        save(here, names("x"), file)


@pytest.mark.parametrize("data", [b"2", b"22", b""])
def test_a_damaged_blob_keeps_the_old_file(here: ImageLayout, file: Path, data: bytes) -> None:
    made = artifact.put_artifact(here, "x", b"1")
    path = here.find_path(made.layers[0])
    path.chmod(0o644)
    path.write_bytes(data)
    file.write_text("old")
    with pytest.raises(VerificationError, match=str(made.layers[0].digest)):
        save(here, names("x"), file)
    assert file.read_text() == "old"


def test_an_existing_file_is_replaced_atomically(here: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", b"1")
    file.write_text("old")
    file.chmod(0o600)
    link = file.with_name("link")
    link.symlink_to(file.name)
    with file.open() as old:
        save(here, names("x"), link)
        assert old.read() == "old"  # a process that has it open keeps the old content
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert members(file)


def test_save_removes_leftovers_of_killed_ones(here: ImageLayout, file: Path) -> None:
    """Files being written by another process and unrelated files are kept."""
    artifact.put_artifact(here, "x", b"1")
    left, busy = (file.with_name(f".x.tar.{digit * 16}") for digit in "1a")
    others = [
        file.with_name(name)
        for name in (".x.tar.123456789abcde", ".y.tar.123456789abcdef0", ".x.tar.old")
    ]
    for path in (left, busy, *others):
        path.write_text("half")
    with busy.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        save(here, names("x"), file)
    assert not left.exists()
    assert busy.exists()
    assert all(path.exists() for path in others)
    for path in (busy, *others):
        path.unlink()
    assert members(file)


def test_concurrent_saves_to_one_file(
    here: ImageLayout, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither removes the other's unfinished file, with and without locks."""
    artifact.put_artifact(here, "x", b"1")
    for flock in (fcntl.flock, lambda fd, operation: None):
        monkeypatch.setattr(fcntl, "flock", flock)
        with open_atomic(file, removes_leftovers=True) as outer:
            save(here, names("x"), file)
            outer.write(b"1")
        assert file.read_bytes() == b"1"


def test_invalid_output_paths_are_refused(here: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", b"1")
    with pytest.raises(UsageError, match="is a directory"):
        save(here, names("x"), file.parent)
    with pytest.raises(StoreError, match="directory not found"):
        save(here, names("x"), file.parent / "no" / "x.tar")


def test_a_named_pipe_is_not_replaced(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", b"1" * 3_000_000)
    os.mkfifo(file)
    loaded = []
    reader = threading.Thread(target=lambda: loaded.append(load(there, file)))
    reader.start()
    save(here, names("x"), file)
    reader.join(60)
    assert loaded[0].names[0][0] == Reference.parse("x")
    assert file.is_fifo()


def test_a_repeated_load_skips_existing_blobs(
    here: ImageLayout, there: ImageLayout, file: Path
) -> None:
    artifact.put_artifact(here, "x", b"1", b"2")
    save(here, names("x"), file)
    load(there, file)
    for path in (there.root / "blobs" / "sha256").iterdir():
        os.utime(path, ns=(1, 1))
    again = load(there, file)
    assert (again.blobs, again.skipped) == (0, 3)
    assert {path.stat().st_mtime_ns for path in (there.root / "blobs" / "sha256").iterdir()} == {1}


def test_gzip_archives_are_streamed(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", os.urandom(1_000_000))
    save(here, names("x"), file)
    file.write_bytes(gzip.compress(file.read_bytes()[:700_000]) + gzip.compress(b""))
    with pytest.raises(FormatError, match="is truncated"):
        load(there, file)
    save(here, names("x"), file)
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert load(there, file).names
    assert blobs(there) == blobs(here)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(FormatError, match="is truncated"):
        load(ImageLayout(file.parent / "new"), file)


def test_progress_covers_the_whole_file(here: ImageLayout, there: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x", b"1" * 100_000, b"2")
    events: list[Any] = []
    save(here, names("x"), file, on_event=events.append)
    plan, *rest = events
    assert (plan.kind, plan.blobs) == ("plan", 3)
    assert sum(event.count for event in rest if event.kind == "progress") == plan.count
    read: list[Any] = []
    load(there, file, on_plan=read.append, on_read=read.append)
    assert read[0] == file.stat().st_size == sum(read[1:])


def test_index_json_equals_that_of_a_layout(here: ImageLayout, file: Path) -> None:
    artifact.put_artifact(here, "x:v1", b"1", artifactType="application/vnd.example")
    save(here, names("x:v1"), file)
    with tarfile.open(file) as tar:
        member = tar.extractfile("index.json")
        assert member is not None
        written = json.load(member)
    assert written["manifests"] == json.loads((here.root / "index.json").read_text())["manifests"]
