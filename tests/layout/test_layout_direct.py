"""Direct I/O writes the same bytes, and falls back to the page cache."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.content.buffer import PAGE, new_buffer
from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.layout import ImageLayout, direct_io
from clowder_aimage.layout.direct_io import DirectFile
from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.oci import Descriptor, Digest
from tests.wait import until

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
        if fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
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
    counts: list[Any] = []
    assert file.begin(0, new_buffer(16 * PAGE), counts.append)
    assert begun.wait(60)

    def close() -> None:
        file.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.05)
    go.set()
    thread.join(60)
    assert closed.is_set()
    assert counts == [16 * PAGE]
    assert not file.begin(0, new_buffer(16 * PAGE), counts.append)


def test_a_buffer_is_free_once_it_is_written_and_hashed(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast disk ends first."""
    data = os.urandom(2 * MIB)
    expected = Descriptor.of("application/octet-stream", data)
    written, freed = threading.Event(), threading.Event()

    def write(self: DirectFile, view: memoryview[int], offset: int) -> int:
        return os.pwrite(self._fd, view, offset) if offset else 0

    class Hasher:
        def __init__(self) -> None:
            self._real = hashlib.sha256()

        def update(self, view: memoryview) -> None:
            assert written.wait(60)
            assert not freed.wait(0.02)
            self._real.update(view)
            written.clear()

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    real = FileIngest._finish_write

    def finish(*arguments: Any) -> Any:
        try:
            return real(*arguments)
        finally:
            written.set()

    monkeypatch.setattr(DirectFile, "_write", write)
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    monkeypatch.setattr(FileIngest, "_finish_write", finish)
    monkeypatch.setattr("clowder_aimage.layout.ingest.create_hasher", lambda _: Hasher())
    ingest = store.ingest(expected.digest.encoded, expected)
    ingest._direct._is_usable = True
    buffer = new_buffer()
    for offset in (0, MIB):
        freed.clear()
        buffer[:] = data[offset : offset + MIB]
        ingest.write_at(offset, buffer, lambda _: freed.set())
        assert freed.wait(60)
    ingest.commit(expected)
    assert store.find_path(expected).read_bytes() == data


def test_several_writes_of_a_file_are_made_at_the_same_time(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash goes on while the disk writes; the ranges are in the file when they are listed."""
    data = os.urandom(3 * MIB)
    expected = Descriptor.of("application/octet-stream", data)
    waiting, go = threading.Barrier(4), threading.Event()

    def write(self: DirectFile, view: memoryview[int], offset: int) -> int:
        waiting.wait(60)
        assert go.wait(60)
        return os.pwrite(self._fd, view, offset) if offset else 0

    monkeypatch.setattr(DirectFile, "_write", write)
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    ingest = store.ingest(expected.digest.encoded, expected)
    ingest._direct._is_usable = True
    errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for offset in range(0, len(data), MIB):
        buffer = new_buffer()
        buffer[:] = data[offset : offset + MIB]
        ingest.write_at(offset, buffer, errors.put)
    waiting.wait(60)
    assert ingest.list_missing() == [(0, len(data))]
    go.set()
    assert [errors.get(timeout=60) for _ in range(3)] == [None] * 3
    assert ingest.list_missing() == []
    ingest.commit(expected)
    assert store.find_path(expected).read_bytes() == data


@pytest.mark.parametrize("is_disk_faster", [True, False])
def test_a_read_error_after_a_direct_write_is_that_of_the_write(
    is_disk_faster: bool, store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, disk or hash, hashes the bytes that came earlier from the file."""
    expected = Descriptor.of("application/octet-stream", os.urandom(2 * MIB))
    written, hashed = threading.Event(), threading.Event()

    def write(self: DirectFile, view: memoryview[int], offset: int) -> int:
        assert is_disk_faster or hashed.wait(60)
        return 0

    def hash_view(self: FileIngest, offset: int, view: memoryview) -> None:
        assert not is_disk_faster or offset != self._hashed or written.wait(60)
        real_hash_view(self, offset, view)

    def finish(*arguments: Any) -> Any:
        try:
            return real_finish(*arguments)
        finally:
            written.set()

    def read(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    real_hash_view, real_finish = FileIngest._hash_view, FileIngest._finish_write
    ingest = store.ingest(expected.digest.encoded, expected)
    ingest.write_at(MIB, bytes(MIB))
    monkeypatch.setattr(DirectFile, "_write", write)
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    monkeypatch.setattr(FileIngest, "_hash_view", hash_view)
    monkeypatch.setattr(FileIngest, "_finish_write", finish)
    monkeypatch.setattr(os, "preadv", read)
    ingest._direct._is_usable = True
    errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    ingest.write_at(0, new_buffer(MIB), errors.put)
    hashed.set()
    with pytest.raises(StoreError, match="Input/output"):
        raise errors.get(timeout=10) or AssertionError
    ingest.abort()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Let no thread that writes start; call what is in the list instead."""
    calls, real = list[Callable[[], object]](), threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name != "aimage-write":
            return real(self)
        for call in calls:
            call()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(direct_io, "_writers", direct_io._Writers())
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    monkeypatch.setattr(threading.Thread, "start", start)
    return calls


@pytest.mark.usefixtures("no_threads")
def test_without_threads_the_cache_is_used(
    store: ImageLayout, expected: Descriptor, data: bytes
) -> None:
    ingest = store.ingest(expected.digest.encoded, expected)
    ingest._direct._is_usable = True
    buffer = new_buffer()
    for offset in range(0, len(data), MIB):
        piece = data[offset : offset + MIB]
        buffer[: len(piece)] = piece
        ingest.write_at(offset, buffer[: len(piece)])
    assert not ingest._direct._pending
    ingest.commit(expected)
    assert store.find_path(expected).read_bytes() == data


def test_a_file_is_closed_while_no_thread_can_write(
    tmp_path: Path, no_threads: list[Callable[[], object]]
) -> None:
    path = tmp_path / "file"
    path.touch()
    file = DirectFile(str(path))
    file._is_usable = True
    closing = threading.Thread(target=file.close, daemon=True)

    def close() -> None:
        closing.start()
        until(lambda: bool(file._is_idle._waiters))  # type: ignore[attr-defined]

    no_threads.append(close)
    assert not file.begin(0, new_buffer(16 * PAGE), lambda _: None)
    closing.join(10)
    assert not closing.is_alive()


def test_one_thread_makes_the_calls_of_those_that_cannot_start(
    request: pytest.FixtureRequest,
) -> None:
    writers, go, done = direct_io._Writers(), threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        assert go.wait(60)
        done.release()

    assert writers.submit(wait)
    request.getfixturevalue("no_threads")
    assert writers.submit(done.release)
    go.set()
    assert done.acquire(timeout=10)
    assert done.acquire(timeout=10)
