"""Direct I/O writes the same bytes, and falls back to the page cache."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content.buffer import PAGE, new_buffer
from clowder_aimage.errors import NoSpaceError
from clowder_aimage.layout import ImageLayout, direct_io
from clowder_aimage.layout.direct_io import DirectFile
from clowder_aimage.oci import Descriptor, Digest

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from clowder_aimage.layout.ingest import FileIngest


MIB = 1024 * 1024
SIZE = 3 * MIB + 12345


@pytest.fixture
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def expected(data: bytes) -> Descriptor:
    digest = Digest("sha256", hashlib.sha256(data).hexdigest())
    return Descriptor("application/octet-stream", digest, len(data))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record direct writes: (offset, count)."""
    seen = []
    real = DirectFile._write

    def write(self: DirectFile, view: memoryview[int], offset: int) -> int:
        count = real(self, view, offset)
        seen.append((offset, count))
        return count

    monkeypatch.setattr(DirectFile, "_write", write)
    return seen


def can_write_directly(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", direct_io._FLAGS | os.O_CREAT | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def take_in(
    store: ImageLayout, expected: Descriptor, data: bytes, order: list[Any] | None = None
) -> FileIngest:
    ingest = store.ingest(expected.digest.encoded, expected)
    buffer = new_buffer()
    for offset in order or range(0, len(data), MIB):
        piece = data[offset : offset + MIB]
        buffer[: len(piece)] = piece
        ingest.write_at(offset, buffer[: len(piece)])
    return ingest


def test_writes_in_order_use_direct_io(
    store: ImageLayout,
    expected: Descriptor,
    data: bytes,
    written: list[tuple[int, int]],
    tmp_path: Path,
) -> None:
    if not can_write_directly(tmp_path):
        pytest.skip("this file system has no other way than through the cache")
    take_in(store, expected, data).commit(expected)
    assert sorted(written) == [(at * MIB, MIB) for at in range(3)]  # the end is too short
    assert store.find_path(expected).read_bytes() == data


def test_writes_out_of_order_use_the_cache(
    store: ImageLayout, expected: Descriptor, data: bytes, written: list[tuple[int, int]]
) -> None:
    take_in(store, expected, data, [2 * MIB, MIB, 3 * MIB, 0]).commit(expected)
    assert {offset for offset, _ in written} <= {0}
    assert store.find_path(expected).read_bytes() == data


def test_unaligned_writes_use_the_cache(
    store: ImageLayout, expected: Descriptor, data: bytes, written: list[tuple[int, int]]
) -> None:
    ingest = store.ingest(expected.digest.encoded, expected)
    buffer = new_buffer()
    ingest.write_at(0, data[:MIB])  # bytes: their alignment is unknown
    piece = data[MIB : 2 * MIB - 1]
    buffer[1:MIB] = piece
    ingest.write_at(MIB, buffer[1:MIB])
    buffer[:MIB] = data[2 * MIB - 1 : 3 * MIB - 1]
    ingest.write_at(2 * MIB - 1, buffer)
    ingest.write_at(3 * MIB - 1, data[3 * MIB - 1 :])
    ingest.commit(expected)
    assert not written
    assert store.find_path(expected).read_bytes() == data


def test_file_systems_without_direct_io_use_the_cache(
    store: ImageLayout,
    expected: Descriptor,
    data: bytes,
    written: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.open

    def refuse(path: str | bytes | os.PathLike[Any], flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    take_in(store, expected, data).commit(expected)
    assert not written
    assert store.find_path(expected).read_bytes() == data


def test_disks_with_other_block_sizes_use_the_cache(
    store: ImageLayout,
    expected: Descriptor,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked = []
    real = os.pwrite

    def refuse(fd: int, view: Buffer, offset: int) -> int:
        if threading.current_thread().name.startswith("aimage-write"):
            asked.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    take_in(store, expected, data).commit(expected)
    assert asked == ([0] if can_write_directly(tmp_path) else [])  # and is not tried again
    assert store.find_path(expected).read_bytes() == data


def test_a_full_disk_during_direct_io_rehashes_the_rest(
    store: ImageLayout, expected: Descriptor, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash was ahead of the file: later writes to that range are hashed anew."""
    full = True
    real = os.pwrite

    def write(fd: int, view: Buffer, offset: int) -> int:
        if full and offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", write)
    ingest = store.ingest(expected.digest.encoded, expected)
    buffer = new_buffer()
    buffer[:] = data[:MIB]
    ingest.write_at(0, buffer)
    buffer[:] = b"?" * MIB
    with pytest.raises(NoSpaceError):
        ingest.write_at(MIB, buffer)
    full = False
    for offset in range(MIB, SIZE, MIB):
        piece = data[offset : offset + MIB]
        buffer[: len(piece)] = piece
        ingest.write_at(offset, buffer[: len(piece)])
    ingest.commit(expected)
    assert store.find_path(expected).read_bytes() == data


def test_close_waits_for_pending_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    def write(self: DirectFile, view: memoryview[int], offset: int) -> int:
        begun.set()
        go.wait(60)
        assert not closed.is_set()
        return len(view)

    monkeypatch.setattr(DirectFile, "_write", write)
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    file = DirectFile(str(path))
    file._is_usable = True
    writing = file.begin(0, new_buffer(16 * PAGE))
    assert begun.wait(60)

    def close() -> None:
        file.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.05)
    go.set()
    assert writing is not None and writing.result(60) == 16 * PAGE
    thread.join(60)
    assert closed.is_set()
    assert file.begin(0, new_buffer(16 * PAGE)) is None
