"""Ingests: blobs that are being written into the layout.

An ingest of known content is a file named after it under ``.aimage/ingest``, locked by its writer
and resumed by the next one. A journal beside it lists the written ranges. The data of an entry is
synchronised before it, unless it has an ID of the system's start. Such an entry costs little, and
counts until the system is started again: a killed process loses neither the entry nor its data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.file_system import (
    NO_LINK,
    is_file_locked,
    set_mode,
    sync_file,
)
from clowder_aimage.content.open_directory import (
    READ,
    OpenDirectory,
    is_own,
    is_protected,
    rename_opened,
    unlink,
)
from clowder_aimage.content.store import IngestBusyError, OnWritten
from clowder_aimage.content.verified_reader import check, verify
from clowder_aimage.errors import AImageError, VerificationError
from clowder_aimage.layout.boot import read_boot_id
from clowder_aimage.layout.direct_io import DirectFile
from clowder_aimage.layout.group_commit import GroupCommit
from clowder_aimage.layout.ingest_directory import IngestDirectory
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    check_single_writer,
    find_holder_pid,
    lock_file,
    make_directory,
    open_shared,
    translate_store_errors,
)
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.digest import create_hasher

# Blobs never change.
BLOB_MODE = 0o444
# Bytes. In a batch, smaller blobs are written through the page cache: handing them to a thread that
# only writes costs more than the copy.
_DIRECT_SIZE = 4 * 1024 * 1024
# Bytes. Smaller blobs have no journal, and are fetched again.
JOURNALED = 16 * 1024 * 1024
# Bytes and seconds of a transfer that a power cut may lose. A disk takes as long to synchronise as
# to write some MiB.
_UNSYNCHRONISED = 256 * 1024 * 1024
_SYNC_INTERVAL = 1.0
_JOURNAL_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.path.join(".aimage", "ingest")
_Range = tuple[int, int]
# Attempts to open a file that other processes may be about to commit or abort.
_MAX_ATTEMPTS = 8


class FileIngest:
    """A temporary file that is renamed to the blob once its bytes are verified.

    Ranges may be written by several threads in any order. They are hashed in order: from the
    writer's buffer if it continues the hashed bytes, else later from the file, by any writer.
    """

    def __init__(
        self,
        root: Path,
        key: str,
        expected: Descriptor | None = None,
        *,
        batch: GroupCommit | None = None,
        directory: IngestDirectory | None = None,
    ) -> None:
        """Open an ingest; without ``expected``, a new one that no other process can find.

        In a ``batch``, small content is committed together with others. A new one of small content
        is created in the open ``directory``. Raises IngestBusyError, StoreError, NoSpaceError.
        """
        self._root, self._expected, self._batch = root, expected, batch
        self._final = ""
        # True for content that is made durable alone
        self.is_large = False
        self._algorithm = expected.digest.algorithm if expected else "sha256"
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        self._syncing = threading.Lock()
        name = self._build_name(key)
        # Strings, because thousands of Paths are slow.
        self._path = os.path.join(root, _DIRECTORY, name)
        self._journal = f"{self._path}.journal"
        is_in_batch = batch is not None and expected is not None and expected.size < _DIRECT_SIZE
        is_small = is_in_batch or directory is not None
        self._direct = DirectFile(self._path, is_usable=not is_small)
        self._is_journaled = expected is not None and expected.size > JOURNALED
        self._ranges: list[_Range] = []
        # Bytes in the journal, and those of them that outlive a power cut.
        self._noted = self._durable = 0
        self._synchronised_at = time.monotonic()
        self._reset_hash()
        self._sync_error: OSError | None = None
        fd = None
        if batch is not None and is_in_batch:
            fd = batch.create_ingest(name)
        elif directory is not None and expected is None:
            fd = directory.create(name)
        if fd is not None:
            self._fd = fd
            return
        check_own(root, "ingest")
        with translate_store_errors(root):
            check_single_writer(root)
            self._fd = self._open()
            size = os.fstat(self._fd).st_size
        self._continue(size)

    def _build_name(self, key: str) -> str:
        return key if self._expected else f"{key[:80]}.{os.urandom(8).hex()}"

    def _continue(self, size: int) -> None:
        """Continue a file of ``size`` bytes by its journal."""
        if self._is_journaled:
            self._ranges = self._read_journal(size)
            self._noted = _sum_sizes(self._ranges)
        elif self._expected is not None and 0 < size == self._expected.size:
            # It waited to be made durable with others: its digest shows whether it is whole.
            self._ranges = [(0, size)]
        if not self._ranges and (size or self._is_journaled):
            # A malformed journal must not be used later, either.
            self.restart()

    def _open(self) -> int:
        attempts = 0
        while True:
            try:
                fd = open_shared(self._path)
            except FileNotFoundError:
                make_directory(self._root, PRIVATE, "ingest")
                continue
            except PermissionError:
                # Its process made it read-only, and was killed before the rename.
                attempts += 1
                if attempts > _MAX_ATTEMPTS:
                    # The file does not exist, and cannot be created.
                    raise
                self._reopen()
                continue
            try:
                is_ours = self._try_lock(fd)
            except BaseException:
                os.close(fd)
                raise
            if is_ours:
                return fd
            os.close(fd)
            attempts += 1
            # FUSE may give a file another number each time, and never the same one twice
            if is_ours is None or attempts > _MAX_ATTEMPTS:
                return self._open_alone()

    def _try_lock(self, fd: int) -> bool | None:
        """Return True if the file is locked and may be written; None without lock support."""
        try:
            lock_file(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self._root)
        except BlockingIOError:
            name = os.path.basename(self._path)[:12]
            pid = find_holder_pid(fd) or ""
            raise IngestBusyError(f"another process is writing {name}", pid=pid) from None
        with contextlib.suppress(FileNotFoundError):
            status = os.fstat(fd)
            if status.st_ino != os.stat(self._path).st_ino:
                # It was committed or aborted in the meantime: try again.
                return False
            # A file with another hard link must not be written.
            is_linked = status.st_nlink > 1
            has_locks = is_linked or is_file_locked(self._path, READ)
            if has_locks and not is_linked and is_own(status.st_uid, os.path.dirname(self._path)):
                return True
            # Another user's file is removed, too: its mode cannot be set.
            unlink(self._path)
            return False if has_locks else None
        return False

    def _open_alone(self) -> int:
        """Open a file with a random name: without locks, two processes could write into one."""
        self._path += f".{os.urandom(8).hex()}"
        self._direct = DirectFile(self._path)
        self._is_journaled = False
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _reopen(self) -> None:
        """Make a read-only file writable; remove it if it is another user's."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.chmod(self._path, 0o600)
            except OSError:
                if is_file_locked(self._path, READ):
                    raise IngestBusyError("another user is writing the blob") from None
                unlink(self._path)

    def _read_journal(self, size: int) -> list[_Range]:
        """Return the written ranges of a file of ``size`` bytes, as the journal lists them."""
        for start, ranges in self._iter_entries():
            if start in ("", _build_start()):
                is_valid = all(0 <= low < high <= size for low, high in ranges)
                return ranges if is_valid else []
        return []

    def _iter_entries(self) -> Iterator[tuple[str, list[_Range]]]:
        """Yield the ranges of each entry, from the last one back.

        The text before them is that of ``_build_start``, or empty if they were synchronised.
        """
        lines: list[str] = []
        with contextlib.suppress(OSError):
            # A crash may have torn the last line.
            lines = Path(self._journal).read_text("ascii", "replace").split("\n")[:-1]
        for line in filter(None, reversed(lines)):
            start, _, text = line.rpartition(" ")
            # A power cut may have torn an entry that was not synchronised: others are before it.
            with contextlib.suppress(ValueError):
                yield start, _parse_ranges(text)

    def _reset_hash(self) -> None:
        # True if bytes may have changed after they were hashed.
        self._rewritten = False
        self._hashed = 0
        self._hasher = create_hasher(self._algorithm)

    def list_missing(self) -> list[_Range]:
        """Return the ranges [start, end) of the expected size that are not written yet."""
        with self._lock:
            edges = [0, *chain.from_iterable(self._ranges)]
        edges.append(self._expected.size if self._expected else edges[-1])
        return [
            (start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end
        ]

    def restart(self) -> None:
        """Discard the bytes of an earlier process."""
        with translate_store_errors(self._root):
            self._remove_journal()
            # FUSE may have no such call, and the file is usually new
            if os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, 0)
        self._ranges = []
        self._noted = self._durable = 0
        self._reset_hash()

    def write_at(
        self,
        offset: int,
        data: bytes | bytearray | memoryview,
        /,
        on_written: OnWritten | None = None,
    ) -> None:
        """Write ``data`` at ``offset``. Raises NoSpaceError or StoreError, or passes it on."""
        view = memoryview(data)
        if on_written is not None:
            self._begin_write(offset, view, on_written)
            return
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._begin_write(offset, view, ended.put)
        if (error := ended.get()) is not None:
            raise error

    def _begin_write(self, offset: int, view: memoryview, on_written: OnWritten) -> None:
        """Write with direct I/O while hashing, if the view continues the hash; else write now."""
        errors: list[BaseException | None] = []

        def end(error: BaseException | None) -> None:
            """Report the end of the write or of the hash, whichever uses the view longer."""
            with self._lock:
                errors.append(error)
                is_last = len(errors) == 2
            if is_last:
                on_written(errors[0] or errors[1])

        def finish(written: int | OSError) -> None:
            end(self._finish_write(offset, view, written))

        is_begun = False
        if offset == self._hashed and self._hashing.acquire(blocking=False):
            try:
                if is_begun := self._direct.begin(offset, view, finish):
                    self._hash_view(offset, view)
            finally:
                self._hashing.release()
        if not is_begun:
            on_written(self._finish_write(offset, view, 0))
            return
        error: BaseException | None = None
        try:
            # Another writer may have added a range before the release.
            self._hash(offset, view)
        except BaseException as caught:
            # Not raised: the view is in use until the write has ended
            error = caught
        end(error)

    def _finish_write(
        self, offset: int, view: memoryview, written: int | OSError
    ) -> BaseException | None:
        """Write the rest of a view, and add its range; return the error, if there is one."""
        try:
            with translate_store_errors(self._root):
                if isinstance(written, OSError):
                    raise written
                while written < len(view):
                    written += os.pwrite(self._fd, view[written:], offset + written)
            with self._lock:
                end = offset + len(view)
                self._rewritten |= any(low < end and offset < high for low, high in self._ranges)
                self._ranges = _merge(self._ranges, offset, end)
            self._hash(offset, view)
        except BaseException as error:
            # The hash may be ahead of the file.
            self._rewritten = True
            return error
        return None

    def _hash_view(self, offset: int, view: memoryview) -> None:
        if offset == self._hashed:
            self._hasher.update(view)
            self._hashed += len(view)

    def _hash(self, offset: int, view: memoryview) -> None:
        """Hash the contiguous written bytes, unless another writer is hashing."""
        behind = True
        while behind and self._hashing.acquire(blocking=False):
            try:
                self._hash_view(offset, view)
                self._catch_up()
            finally:
                self._hashing.release()
            # Another writer may have added a range before the release.
            behind = self._hashed < self._contiguous_end

    def _catch_up(self) -> None:
        """Hash from the file up to the first missing byte."""
        scratch: memoryview | None = None
        while (remaining := self._contiguous_end - self._hashed) > 0:
            scratch = scratch or new_buffer()
            with translate_store_errors(self._root):
                count = os.preadv(self._fd, [scratch[:remaining]], self._hashed)
            if not count:
                # The file is too short: commit raises.
                return
            self._hasher.update(scratch[:count])
            self._hashed += count

    @property
    def _contiguous_end(self) -> int:
        with self._lock:
            return self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0

    def checkpoint(self, *, is_last: bool = False) -> None:
        """Add the written data to the journal, one thread at a time: a kill does not lose it.

        It is made durable as well if it is the last one, or if _UNSYNCHRONISED bytes or
        _SYNC_INTERVAL have passed since that was done.
        """
        if self._batch is not None:
            # Another process may be waiting for the pending blobs.
            self._batch.settle_old()
        if not self._is_journaled:
            return
        while self._syncing.acquire(blocking=False):
            try:
                if self._fd < 0 or self._sync_error is not None:
                    # The ingest has ended, or the bytes in the cache may be lost
                    return
                self._note(is_durable=is_last or self._is_synchronisation_due())
                with self._lock:
                    unnoted = _sum_sizes(self._ranges) - self._noted
            finally:
                self._syncing.release()
            # More bytes than that mean that another writer skipped its checkpoint.
            if unnoted < JOURNALED:
                return

    def _is_synchronisation_due(self) -> bool:
        with self._lock:
            size = _sum_sizes(self._ranges) - self._durable
        elapsed = time.monotonic() - self._synchronised_at
        return size >= _UNSYNCHRONISED or elapsed >= _SYNC_INTERVAL or not read_boot_id()

    def _note(self, *, is_durable: bool) -> None:
        """Add the written ranges to the journal, after the data was synchronised if that is due."""
        with self._lock:
            ranges = list(self._ranges)
        line = _format_ranges(ranges)
        with translate_store_errors(self._root):
            if is_durable:
                self._synchronise()
            else:
                # At the front: a torn line must not become one that was synchronised
                line = f"{_build_start()} {line}"
            fd = open_shared(self._journal, _JOURNAL_FLAGS)
            try:
                # The line feed at the front ends a line that a crash has torn.
                os.write(fd, f"\n{line}\n".encode())
                if is_durable:
                    sync_file(fd, self._journal, data_only=True)
            finally:
                os.close(fd)
            # Both files may be new in the directory.
            if is_durable and not self._durable:
                sync_directory(Path(self._journal).parent)
        self._noted = _sum_sizes(ranges)
        if is_durable:
            self._durable, self._synchronised_at = self._noted, time.monotonic()

    def commit(self, expected: Descriptor, /) -> None:
        """Verify, make durable and rename; in a batch, later and together with others.

        The layout synchronises the directory. Raises VerificationError, and removes the ingest, if
        the bytes differ from ``expected``.
        """
        try:
            if self.list_missing():
                written = _sum_sizes(self._ranges)
                raise VerificationError(
                    f"{expected.digest} is incomplete: {written} of {expected.size} bytes"
                )
            digest = self.digest(expected.digest.algorithm)
            check(expected, os.fstat(self._fd).st_size, digest.encoded)
            self._final = build_blob_path(self._root, expected)
            self.is_large = expected.size > JOURNALED
            with translate_store_errors(self._root):
                set_mode(self._fd, BLOB_MODE, self._path)
            if self._batch is not None:
                self._direct.close()
                self._batch.add(expected.digest, self, expected.size)
                return
            with translate_store_errors(self._root):
                self.synchronise()
                self.rename()
        except VerificationError:
            self.abort()
            raise
        except BaseException:
            # The disk failed: the bytes are kept for the next attempt.
            self.give_up()
            raise

    def synchronise(self) -> None:
        """Make the bytes durable, after a checkpoint that is running.

        Raises OSError, also if an earlier attempt failed.
        """
        with self._syncing:
            self._synchronise()

    def _synchronise(self) -> None:
        if self._sync_error is not None:
            raise self._sync_error
        try:
            sync_file(self._fd, self._path)
        except BaseException as error:
            # The system reports a lost write once, and may still have its bytes in the cache
            interruption = OSError(errno.EIO, "the synchronisation was interrupted")
            self._sync_error = error if isinstance(error, OSError) else interruption
            self._drop_unsynchronised()
            raise

    def _drop_unsynchronised(self) -> None:
        """Leave the last entry in the journal whose data was synchronised, if there is one."""
        if not self._is_journaled:
            return
        durable = next((ranges for start, ranges in self._iter_entries() if not start), [])
        # The error of the synchronisation is raised.
        with contextlib.suppress(OSError):
            self._remove_journal()
            if durable:
                fd = open_shared(self._journal, _JOURNAL_FLAGS)
                try:
                    os.write(fd, f"\n{_format_ranges(durable)}\n".encode())
                finally:
                    os.close(fd)

    def rename(self) -> None:
        """Rename the file to its final name, after a checkpoint that is running. Raises OSError."""
        with self._syncing:
            try:
                rename_opened(os.fstat(self._fd), self._path, self._final)
            except FileNotFoundError:
                make_directory(self._root, "blobs", os.path.basename(os.path.dirname(self._final)))
                rename_opened(os.fstat(self._fd), self._path, self._final)
            self._remove_journal()
            self.close()

    def _remove_journal(self) -> None:
        if self._is_journaled:
            with contextlib.suppress(FileNotFoundError):
                unlink(self._journal)

    def digest(self, algorithm: str = "sha256") -> Digest:
        """Return the digest of the file, read again for another algorithm. Raises StoreError.

        A call before the first byte is written chooses the algorithm.
        """
        with self._hashing:
            if algorithm != self._algorithm or self._rewritten:
                self._algorithm = algorithm
                self._reset_hash()
            self._catch_up()
            return Digest(algorithm, self._hasher.hexdigest())

    def suspend(self) -> None:
        """Close the ingest; with a journal, keep the written bytes for the next process."""
        # The first error is raised.
        with contextlib.suppress(OSError, AImageError):
            self.checkpoint(is_last=True)
        self.give_up()

    def give_up(self) -> None:
        """Close the ingest, and keep the ranges in the journal."""
        with self._syncing:
            is_resumable = self._is_journaled and Path(self._journal).exists()
            if is_resumable:
                self.close()
        if not is_resumable:
            self.abort()

    def abort(self) -> None:
        """Discard the written bytes."""
        with self._syncing:
            if self._fd < 0:
                # The ingest has ended, and the file may be another process's
                return
            # The first error is raised.
            with contextlib.suppress(OSError):
                Path(self._path).unlink(missing_ok=True)
                self._remove_journal()
            self.close()

    def close(self) -> None:
        """Close the file, once: its descriptor number may be reused."""
        self._direct.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _build_start() -> str:
    """Return what begins the entries of this start of the system; no part of it is a range."""
    return f"boot {read_boot_id()}"


def _format_ranges(ranges: list[_Range]) -> str:
    return ",".join(f"{start}-{end}" for start, end in ranges)


def _parse_ranges(line: str) -> list[_Range]:
    ranges: list[_Range] = []
    for text in line.split(","):
        start, _, end = text.partition("-")
        ranges = _merge(ranges, int(start), int(end))
    return ranges


def _sum_sizes(ranges: list[_Range]) -> int:
    return sum(end - start for start, end in ranges)


def _merge(ranges: list[_Range], start: int, end: int) -> list[_Range]:
    """Add a range to sorted, disjoint ranges."""
    merged: list[_Range] = []
    for low, high in sorted([*ranges, (start, end)]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def ingest_size(root: Path, content: Descriptor) -> int:
    """Return the size on disk of a blob's ingest."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(root, _DIRECTORY, content.digest.encoded)).st_blocks * 512
    return 0


def build_blob_path(root: Path, content: Descriptor) -> str:
    """Return the path of a blob. A valid digest keeps it inside the store."""
    return f"{root}/blobs/{content.digest.algorithm}/{content.digest.encoded}"


def is_file(path: str) -> bool:
    """Return True if a path is a regular file, and not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


class LinkedBlob:
    """Another program's file, linked into the store under a temporary name, and verified."""

    def __init__(self, root: Path, path: Path, content: Descriptor) -> None:
        """Link the file. Raises VerificationError; OSError, also if it must be copied."""
        self._root, self._final = root, build_blob_path(root, content)
        self._name = f"{content.digest.encoded[:80]}.{os.urandom(8).hex()}"
        with (
            OpenDirectory(make_directory(root, PRIVATE)) as directory,
            directory.link_from(path, self._name) as file,
        ):
            try:
                if not is_protected(file, path.parent):
                    raise PermissionError(errno.EPERM, "another user may write it", str(path))
                self._status = os.fstat(file.fileno())
                # The other program may not have synchronised it
                sync_file(file.fileno(), self._final)
                verify(file, content)
            except BaseException:
                directory.remove(self._name)
                raise

    def commit(self) -> None:
        """Rename the link to the path of the blob. Raises OSError."""
        folder, name = os.path.split(self._final)
        blobs = make_directory(self._root, "blobs", os.path.basename(folder))
        with OpenDirectory(self._root / PRIVATE) as directory, OpenDirectory(blobs) as into:
            directory.rename(self._status, self._name, name, into)

    def abort(self) -> None:
        """Remove the link, unless it is the blob."""
        with contextlib.suppress(OSError), OpenDirectory(self._root / PRIVATE) as directory:
            directory.remove(self._name)


def link_blob(root: Path, path: Path, content: Descriptor) -> LinkedBlob | None:
    """Hard-link another program's file into the store; return None if it must be copied.

    It is copied if another user than this one and root may change it. Raises VerificationError,
    OSError.
    """
    try:
        return LinkedBlob(root, path, content)
    except OSError as error:
        if error.errno in NO_LINK:
            return None
        raise
