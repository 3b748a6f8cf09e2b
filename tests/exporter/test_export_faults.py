"""Each failure gives a message and its exit code, and leaves no files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gzip
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import build_bytes_body, file_system, open_directory
from clowder_aimage.content.file_system import Space, lock
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import (
    FormatError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UsageError,
)
from clowder_aimage.export import export
from clowder_aimage.exporter import writer
from clowder_aimage.oci import Reference, mediatype
from tests.content.artifact import index, put_artifact
from tests.exporter.conftest import NAME, Artifact, files_in
from tests.process import spawn

DATA = bytes(range(256)) * 8192


@pytest.fixture
def full(artifact: Artifact) -> Artifact:
    """Return an artifact with a layer of each kind."""
    artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    artifact.add("packed", gzip.compress(DATA), f"{mediatype.AIMAGE_FILE}+gzip", DATA)
    artifact.add_tar(("kit/a", DATA), ("kit/b", b"b"))
    artifact.add_tensors("unet/x", {"x": ("U8", (len(DATA),), DATA)})
    artifact.add("unet/config.json", b"{}")
    return artifact.finish()


NAMES = ["kit/a", "kit/b", "packed", "unet/config.json", "unet/model.safetensors", "w.gguf"]

# -- the directory


def test_export_keeps_an_existing_empty_directory(full: Artifact) -> None:
    full.out.mkdir(mode=0o700)
    before = full.out.stat()
    assert sorted(full.exported()) == NAMES
    after = full.out.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(path.name for path in full.out.iterdir()) == ["kit", "packed", "unet", "w.gguf"]
    full.check_nothing_left(["out"])


def test_failed_export_keeps_a_filled_directory(full: Artifact) -> None:
    full.out.mkdir()
    (full.out / ".hidden").write_text("mine")
    with pytest.raises(UsageError, match="is not empty") as caught:
        full.export()
    assert caught.value.exit_code == 2
    assert files_in(full.out) == {".hidden": b"mine"}


def test_export_refuses_a_filled_directory(full: Artifact) -> None:
    full.export()
    with pytest.raises(UsageError, match="is not empty"):
        full.export()
    assert sorted(files_in(full.out)) == NAMES


def test_export_refuses_a_file_as_directory(full: Artifact) -> None:
    full.out.write_text("mine")
    with pytest.raises(UsageError, match="out is a file"):
        full.export()
    assert full.out.read_text() == "mine"


def test_export_needs_an_existing_parent(full: Artifact) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        export(full.store, NAME, full.home / "no" / "where")
    full.check_nothing_left()


def test_export_follows_a_link_to_an_empty_directory(full: Artifact) -> None:
    target = full.home / "target"
    target.mkdir()
    full.out.symlink_to(target)
    assert sorted(full.exported()) == NAMES
    assert full.out.is_symlink()
    assert sorted(files_in(target)) == NAMES


def test_export_refuses_a_path_created_meanwhile(full: Artifact) -> None:
    def take(_: Any) -> None:
        full.out.mkdir(exist_ok=True)
        (full.out / "mine").write_text("mine")

    with pytest.raises(UsageError, match="is not empty"):
        full.export(on_plan=take)
    assert files_in(full.out) == {"mine": b"mine"}
    full.check_nothing_left(["out"])


def test_export_refuses_a_directory_filled_meanwhile(full: Artifact) -> None:
    full.out.mkdir()
    with pytest.raises(UsageError, match="is not empty"):
        full.export(on_plan=lambda _: (full.out / "mine").write_text("mine"))
    assert files_in(full.out) == {"mine": b"mine"}


def test_export_respects_the_umask(full: Artifact) -> None:
    before = os.umask(0o077)
    try:
        full.export()
    finally:
        os.umask(before)
    assert full.out.stat().st_mode & 0o777 == 0o700
    assert (full.out / "w.gguf").stat().st_mode & 0o777 == 0o600
    assert (full.out / "unet").stat().st_mode & 0o777 == 0o700
    assert (full.out / "unet/model.safetensors").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_there", [False, True])
def test_export_removes_leftovers_of_killed_ones(full: Artifact, is_there: bool) -> None:
    if is_there:
        full.out.mkdir()
    parent = full.out if is_there else full.home
    left = parent / ".out.export-0123456789abcdef"
    (left / "deep").mkdir(parents=True)
    (left / "deep/file").write_text("half")
    full.export()
    assert not left.exists()
    assert sorted(files_in(full.out)) == NAMES


def test_export_leaves_locked_directories(full: Artifact) -> None:
    own = full.home / ".out.export-0123456789abcdef"
    own.mkdir()
    with OpenDirectory(own) as locked:
        lock(locked.fd, fcntl.LOCK_EX)
        full.export()
        assert own.is_dir()


# -- faults during an export


class Full:
    """A disk that becomes full after some calls."""

    def __init__(self, left: int, number: int = errno.ENOSPC) -> None:
        self.left = left
        self.number = number
        self.lock = threading.Lock()

    def __call__(self, real: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                self.left -= 1
                if self.left < 0:
                    raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return call


@pytest.mark.parametrize(
    ("name", "left", "is_there"),
    [
        ("pwrite", 0, False),
        ("write", 1, True),
        ("write", 3, False),
        ("ftruncate", 0, True),
    ],
)
def test_full_disk_leaves_nothing(
    full: Artifact, monkeypatch: pytest.MonkeyPatch, name: str, left: int, is_there: bool
) -> None:
    if is_there:
        full.out.mkdir()
    called = getattr(os, name)
    disk = Full(left)
    monkeypatch.setattr(os, name, disk(called))
    try:
        full.export()
    except NoSpaceError as error:
        assert error.exit_code == 6
        assert "no space left while writing" in error.message
        full.check_nothing_left(["out"] if is_there else [])
        assert not is_there or list(full.out.iterdir()) == []
    else:
        assert disk.left >= 0, "the fault was not heard"


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_small_files_are_synced_together_before_the_directory_has_its_name(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, has_syncfs: bool
) -> None:
    artifact.add_tar(*((f"d{n % 3}/{n}", b"%d" % n) for n in range(30)))
    artifact.finish()
    synced: list[tuple[int, set[str]]] = []
    fsync = os.fsync

    def sync(fd: int) -> int:
        (made,) = artifact.home.glob(".out.export-*")
        synced.append((os.fstat(fd).st_ino, set(files_in(made))))
        fsync(fd)
        return 0

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(file_system, "_load_syncfs", lambda: sync if has_syncfs else None)
    with monkeypatch.context() as patch:
        patch.setattr(OpenDirectory, "sync", lambda _: None)  # of the parent, at the end
        artifact.export()
    names = {path.relative_to(artifact.out).as_posix(): path for path in artifact.out.rglob("*")}
    paths = [artifact.out] if has_syncfs else [artifact.out, *names.values()]
    files = {name for name, path in names.items() if path.is_file()}
    assert len(files) == 30
    assert sorted(number for number, _ in synced) == sorted(p.stat().st_ino for p in paths)
    assert all(found == files for _, found in synced)


def test_files_that_cannot_be_synced_are_removed(
    full: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(file_system, "_load_syncfs", lambda: fail)
    with pytest.raises(NoSpaceError):
        full.export()
    full.check_nothing_left()


@pytest.mark.parametrize("name", ["make", "rename"])
def test_unwritable_directory_is_reported(
    full: Artifact, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    disk = Full(0, errno.EACCES)
    monkeypatch.setattr(OpenDirectory, name, disk(getattr(OpenDirectory, name)))
    with pytest.raises(StoreError, match=r"cannot write .*: Permission denied"):
        full.export()
    monkeypatch.undo()
    full.check_nothing_left()


def test_partially_moved_files_are_moved_back(
    full: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.out.mkdir()
    disk = Full(2, errno.EIO)
    real = OpenDirectory.move
    monkeypatch.setattr(
        OpenDirectory, "move", lambda *call: (disk(real) if disk.left >= 0 else real)(*call)
    )
    with pytest.raises(StoreError):
        full.export()
    assert list(full.out.iterdir()) == []


# -- another user who may write the parent directory


@pytest.mark.parametrize("moment", ["on_plan", "on_written"])
def test_a_directory_replaced_by_a_link_is_not_followed(full: Artifact, moment: str) -> None:
    victim = full.home / "victim"
    victim.mkdir()
    lock = threading.Lock()

    def replace(_: object) -> None:
        with lock:  # several threads write and report
            for made in full.home.glob(".out.export-*[0-9a-f]"):
                if not made.is_symlink():
                    made.rename(full.home / "gone")
                    made.symlink_to(victim)

    with pytest.raises(StoreError, match="another program has replaced it"):
        full.export(**{moment: replace})
    assert not os.path.lexists(full.out)
    assert files_in(victim) == files_in(full.home / "gone") == {}


def test_a_directory_inside_replaced_by_a_link_is_not_followed(full: Artifact) -> None:
    victim = full.home / "victim"
    victim.mkdir()
    lock = threading.Lock()

    def replace(_: object) -> None:
        # Several threads write and report: one replaces, while the others still write.
        with lock:
            for made in full.home.glob(".out.export-*/unet"):
                if made.is_symlink():
                    continue
                while made.exists():
                    shutil.rmtree(made, ignore_errors=True)
                made.symlink_to(victim)

    with pytest.raises(StoreError, match="cannot write"):
        full.export(on_written=replace)
    assert files_in(victim) == {}


def test_another_users_link_is_not_followed(
    full: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = full.home / "victim"
    victim.mkdir()
    full.out.symlink_to(victim)
    monkeypatch.setattr(open_directory, "is_trusted", lambda _: False)
    with pytest.raises(StoreError, match="another user's link"):
        full.export()
    assert files_in(victim) == {}


def test_free_space_is_checked_first(full: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4 * len(DATA)

    monkeypatch.setattr(writer, "measure_space", lambda _: Space(1, 1, needed - 1))
    heard: list[Any] = []
    with pytest.raises(NoSpaceError, match=f"requires {needed / 1e6:.1f} MB"):
        full.export(on_written=heard.append)
    assert heard == []
    full.check_nothing_left()


def test_linked_files_need_no_space(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact.add("w.gguf", DATA, mediatype.AIMAGE_GGUF)
    artifact.finish()
    space = Space(1, 1, len(DATA) - 1)
    monkeypatch.setattr(writer, "measure_space", lambda _: space)
    with pytest.raises(NoSpaceError):
        artifact.export()
    artifact.export(links=True)
    assert (artifact.out / "w.gguf").read_bytes() == DATA


def test_content_of_unknown_size_is_bounded_by_the_disk(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact.add("packed", gzip.compress(DATA), f"{mediatype.AIMAGE_FILE}+gzip")
    artifact.finish()
    space = Space(1, 1, len(DATA))
    monkeypatch.setattr(writer, "measure_space", lambda _: space)
    with pytest.raises(FormatError, match=f"decompresses to more than {len(DATA) * 95 // 100}"):
        artifact.export()
    artifact.check_nothing_left()


@pytest.mark.parametrize(("moment", "is_there"), [(0, False), (1, True), (3, False)])
def test_an_interrupt_leaves_nothing(full: Artifact, is_there: bool, moment: int) -> None:
    if is_there:
        full.out.mkdir()
    moments = iter(range(100))

    def interrupt(_: Any) -> None:
        if next(moments) == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        full.export(on_plan=interrupt, on_written=interrupt)
    full.check_nothing_left(["out"] if is_there else [])
    assert not is_there or list(full.out.iterdir()) == []


HELD = """
import os, signal, sys
from clowder_aimage.cli.main import main
from clowder_aimage.exporter import writer as export_writer

told = int(sys.argv.pop(1))

def wait(*_):
    os.write(told, b".")
    while True:
        signal.pause()

export_writer.ExportWriter._write_whole = wait
main()
"""


def test_keyboard_interrupt_leaves_nothing(full: Artifact) -> None:
    """The process is interrupted while its threads work, one of which never ends."""
    read, told = os.pipe()
    verb = ["--store", full.home / "store", "export", "model", full.out]
    process = spawn(
        [sys.executable, "-c", HELD, str(told), *map(str, verb)],
        pass_fds=[told],
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(told)
    assert os.read(read, 1) == b"."
    os.close(read)
    assert [path.name for path in full.home.iterdir() if ".export-" in path.name]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    full.check_nothing_left()


# -- missing content


def test_missing_layers_are_named(full: Artifact) -> None:
    gone = [layer for layer in full.layers if layer.name in ("w.gguf", "unet/x")]
    for layer in gone:
        full.store.find_path(layer.descriptor).unlink()
    with pytest.raises(NotFoundError) as caught:
        full.export()
    assert caught.value.message.startswith(
        "model:latest is incomplete in the store: missing w.gguf"
    )
    assert "unet (1 of 2 layers)" in caught.value.message
    assert caught.value.exit_code == 3
    assert caught.value.hint == "pull or create it again"
    full.check_nothing_left()


def test_missing_layers_suggest_a_pull(full: Artifact) -> None:
    name = Reference.parse("registry.example.com/team/model:v1")
    full.store.tag(full.store.resolve(NAME), name)
    full.store.find_path(full.layers[0].descriptor).unlink()
    with pytest.raises(NotFoundError) as caught:
        export(full.store, name, full.out)
    assert (
        format_advice(caught.value)
        == "to complete it: aimage pull registry.example.com/team/model:v1"
    )


def test_unknown_name_is_reported(artifact: Artifact) -> None:
    with pytest.raises(NotFoundError):
        artifact.export()


def test_foreign_artifact_is_refused(artifact: Artifact) -> None:
    put_artifact(artifact.store, "model", b"layer")
    with pytest.raises(FormatError, match="is not an AImage") as caught:
        artifact.export()
    assert caught.value.hint
    artifact.check_nothing_left()


def test_index_of_several_manifests_is_refused(artifact: Artifact) -> None:
    one = put_artifact(artifact.store, "one", b"layer")
    both = index([one.descriptor])
    artifact.store.push(both.descriptor, build_bytes_body(both.raw), NAME)
    with pytest.raises(FormatError):
        artifact.export()
    artifact.check_nothing_left()


def test_blobs_are_leased_during_an_export(full: Artifact) -> None:
    from clowder_aimage.layout.lease import read_leases

    held: list[Any] = []
    full.export(on_plan=lambda _: held.extend(read_leases(full.store.root, remove=False)))
    assert {layer.descriptor.digest for layer in full.layers} <= set(held)
    assert read_leases(full.store.root, remove=False) == set()
