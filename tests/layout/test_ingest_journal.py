"""Ingest files left by a terminated process, and how the next process validates them."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.content import IngestBusyError
from clowder_aimage.errors import NoSpaceError, StoreError, VerificationError
from clowder_aimage.layout import ImageLayout, lock
from clowder_aimage.layout import ingest as ingests
from clowder_aimage.layout.boot import read_boot_id
from tests.content.artifact import blob

if TYPE_CHECKING:
    from clowder_aimage.layout.ingest import FileIngest


MIB = 1024 * 1024
DATA = hashlib.shake_128(b"seed").digest(20 * MIB)
CONTENT = blob(DATA)
WHOLE = [(0, len(DATA))]


def begin(store: ImageLayout) -> FileIngest:
    return store.ingest(CONTENT.digest.encoded, CONTENT)


def write(ingest: FileIngest, start: int, end: int) -> None:
    for offset in range(start, end, MIB):
        ingest.write_at(offset, DATA[offset : min(end, offset + MIB)])


def files(store: ImageLayout) -> tuple[Path, Path]:
    """Return the partial and its journal."""
    path = store.root / ".aimage" / "ingest" / CONTENT.digest.encoded
    return path, path.with_name(f"{path.name}.journal")


def killed(ingest: FileIngest) -> None:
    """Simulate kill -9: only the lock is released."""
    fd, ingest._fd = ingest._fd, -1
    os.close(fd)


def complete(store: ImageLayout, ingest: FileIngest) -> None:
    for start, end in ingest.list_missing():
        write(ingest, start, end)
    ingest.commit(CONTENT)
    assert store.find_path(CONTENT).read_bytes() == DATA
    assert not any(path.exists() for path in files(store))


def test_journaled_spans_are_not_missing(store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    write(ingest, 8 * MIB, 9 * MIB)
    ingest.checkpoint()
    write(ingest, 9 * MIB, 10 * MIB)  # not in the journal: it may not be on disk
    killed(ingest)
    ingest = begin(store)
    assert ingest.list_missing() == [(5 * MIB, 8 * MIB), (9 * MIB, len(DATA))]
    complete(store, ingest)


def test_suspended_ingest_is_continued(store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.suspend()
    ingest = begin(store)
    assert ingest.list_missing() == [(5 * MIB, len(DATA))]
    write(ingest, 5 * MIB, 7 * MIB)
    ingest.suspend()
    ingest = begin(store)
    assert ingest.list_missing() == [(7 * MIB, len(DATA))]
    complete(store, ingest)


def test_a_kill_loses_no_entry_and_synchronises_nothing(
    store: ImageLayout, synchronised: Any
) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    done = synchronised(store)
    ingest.checkpoint()
    write(ingest, 5 * MIB, 8 * MIB)
    ingest.checkpoint()
    killed(ingest)
    assert done == []
    ingest = begin(store)
    assert ingest.list_missing() == [(8 * MIB, len(DATA))]
    complete(store, ingest)


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_next_start_of_the_system_knows_what_was_synchronised(
    is_torn: bool, store: ImageLayout, always: pytest.MonkeyPatch
) -> None:
    """After a power cut, the rest may be missing from the file, and its entries be torn."""
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.checkpoint()
    always.undo()
    write(ingest, 5 * MIB, 8 * MIB)
    ingest.checkpoint()
    killed(ingest)
    if is_torn:
        with files(store)[1].open("ab") as journal:
            journal.write(b"\n\0\0\0\0\xff\n")
    always.setattr(ingests, "read_boot_id", lambda: "another")
    ingest = begin(store)
    assert ingest.list_missing() == [(5 * MIB, len(DATA))]
    complete(store, ingest)


def test_no_part_of_an_entry_is_one_that_was_synchronised(
    store: ImageLayout, always: pytest.MonkeyPatch
) -> None:
    """A power cut may end the file anywhere, and the next entry begins after a line feed."""
    always.setattr(ingests, "read_boot_id", lambda: "00000012-4567-89")
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.checkpoint()
    always.setattr(ingests, "_SYNC_INTERVAL", 60.0)
    start = files(store)[1].stat().st_size
    write(ingest, 5 * MIB, 8 * MIB)
    ingest.checkpoint()
    text = files(store)[1].read_bytes()
    assert ingest._read_journal(8 * MIB) == [(0, 8 * MIB)]
    always.setattr(ingests, "read_boot_id", lambda: "another")
    for end in range(start, len(text)):
        files(store)[1].write_bytes(text[:end] + b"\n")
        assert ingest._read_journal(8 * MIB) == [(0, 5 * MIB)]


def test_each_checkpoint_is_durable_without_an_id_of_the_start(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch, synchronised: Any
) -> None:
    monkeypatch.setattr(ingests, "read_boot_id", lambda: "")
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    done = synchronised(store)
    ingest.checkpoint()
    assert len(done) == 3
    killed(ingest)
    assert begin(store).list_missing() == [(5 * MIB, len(DATA))]


def test_many_bytes_are_durable_at_once(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch, synchronised: Any
) -> None:
    monkeypatch.setattr(ingests, "_UNSYNCHRONISED", 6 * MIB)
    ingest = begin(store)
    done, counts = synchronised(store), []
    for offset in range(0, 20 * MIB, 4 * MIB):
        write(ingest, offset, offset + 4 * MIB)
        ingest.checkpoint()
        counts.append(len(done))
    # The file, the journal and, once, the directory
    assert counts == [0, 3, 3, 5, 5]
    ingest.abort()


def test_the_id_of_the_start_is_that_of_the_system() -> None:
    read_boot_id.cache_clear()
    assert len(read_boot_id()) == 36


@pytest.fixture
def always() -> Iterator[pytest.MonkeyPatch]:
    """Make each checkpoint durable, until that is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingests, "_SYNC_INTERVAL", 0.0)
        yield patch


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Record the synchronised inodes in order, with the journal at that time."""
    done = []

    def begin(store: Any) -> list[tuple[int, str | None]]:
        _, journal = files(store)

        def note(fd: Any) -> None:
            said = journal.read_text() if journal.exists() else None
            done.append((os.fstat(fd).st_ino, said))

        for name in ("fsync", "fdatasync"):  # macOS has one of them
            monkeypatch.setattr(os, name, note, raising=False)
        return done

    return begin


@pytest.mark.usefixtures("always")
def test_data_is_durable_before_its_journal_entry_and_entries_before_names(
    store: ImageLayout, synchronised: Any
) -> None:
    """A crash leaves no entry without its data, and does not lose both with the directory."""
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    done = synchronised(store)
    ingest.checkpoint()
    partial, journal = (path.stat().st_ino for path in files(store))
    directory = files(store)[0].parent.stat().st_ino
    entry = f"\n0-{5 * MIB}\n"
    assert done == [(partial, None), (journal, entry), (directory, entry)]
    ingest.abort()


@pytest.mark.usefixtures("always")
def test_the_directory_is_synchronised_once(store: ImageLayout, synchronised: Any) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.checkpoint()
    write(ingest, 5 * MIB, 8 * MIB)
    done = synchronised(store)
    ingest.checkpoint()
    partial, journal = (path.stat().st_ino for path in files(store))
    first, second = f"\n0-{5 * MIB}\n", f"\n0-{8 * MIB}\n"
    assert done == [(partial, first), (journal, first + second)]
    ingest.abort()


@pytest.mark.usefixtures("always")
def test_checkpoint_works_without_fdatasync(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no fdatasync."""
    monkeypatch.delattr(os, "fdatasync", raising=False)
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.checkpoint()
    killed(ingest)
    assert begin(store).list_missing() == [(5 * MIB, len(DATA))]


@pytest.mark.usefixtures("always")
def test_failed_synchronisation_writes_no_entry(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)

    def fsync(_: Any) -> NoReturn:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StoreError):
            ingest.checkpoint()
    assert not files(store)[1].exists()
    ingest.abort()


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("\n", [(4 * MIB, len(DATA))]),
        ("\n0-5242880\n\n0-6291", [(5 * MIB, len(DATA))]),
        ("\n0-5242880", [(4 * MIB, len(DATA))]),
    ],
    ids=["empty", "third", "newline"],
)
def test_torn_last_journal_line_is_ignored(
    line: str, missing: list[tuple[int, int]], store: ImageLayout
) -> None:
    ingest = begin(store)
    write(ingest, 0, 4 * MIB)
    ingest.checkpoint()
    write(ingest, 4 * MIB, 8 * MIB)
    killed(ingest)
    with files(store)[1].open("a") as journal:
        journal.write(line)
    ingest = begin(store)
    assert ingest.list_missing() == missing
    write(ingest, missing[0][0], 9 * MIB)
    ingest.checkpoint()
    killed(ingest)
    ingest = begin(store)
    assert ingest.list_missing() == [(9 * MIB, len(DATA))]
    complete(store, ingest)


@pytest.mark.parametrize(
    "journal",
    [
        b"0-5242880,x\n",
        b"0-99999999999\n",
        b"9-3\n",
        b"",
    ],
    ids=["half", "beyond", "backwards", "empty"],
)
def test_malformed_journal_is_discarded(journal: bytes, store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, 8 * MIB)
    killed(ingest)
    files(store)[1].write_bytes(journal)
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    write(ingest, 10 * MIB, 12 * MIB)
    killed(ingest)
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    complete(store, ingest)


def test_entries_beyond_a_truncated_file_are_ignored(store: ImageLayout) -> None:
    """The journal stays invalid for a truncated file, even after the file has grown again."""
    ingest = begin(store)
    write(ingest, 0, 10 * MIB)
    ingest.suspend()
    os.truncate(files(store)[0], 6 * MIB)
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    write(ingest, 12 * MIB, 13 * MIB)  # the file is long enough now, and sparse
    killed(ingest)
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    complete(store, ingest)


def test_a_journal_without_its_file_is_ignored(store: ImageLayout) -> None:
    """Its process was killed after renaming the file and before removing the journal."""
    ingest = begin(store)
    write(ingest, 0, 10 * MIB)
    ingest.suspend()
    files(store)[0].unlink()
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    write(ingest, 12 * MIB, 13 * MIB)
    killed(ingest)
    ingest = begin(store)
    assert ingest.list_missing() == WHOLE
    complete(store, ingest)


def test_a_partial_longer_than_the_blob_is_discarded(store: ImageLayout) -> None:
    path, _ = files(store)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA + b"more")
    complete(store, begin(store))


def test_a_complete_partial_is_only_verified(store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    ingest.suspend()
    ingest = begin(store)
    assert ingest.list_missing() == []
    complete(store, ingest)


def test_a_partial_with_wrong_bytes_is_discarded(store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, 10 * MIB)
    ingest.suspend()
    with files(store)[0].open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"wrong")
    ingest = begin(store)
    with pytest.raises(VerificationError):
        complete(store, ingest)
    assert not store.exists(CONTENT)
    assert not any(path.exists() for path in files(store))
    complete(store, begin(store))


# -- the end of an ingest during a checkpoint


@pytest.mark.parametrize("end", ["commit", "abort", "suspend"])
@pytest.mark.usefixtures("always")
def test_the_end_of_an_ingest_waits_for_its_checkpoint(
    end: str, store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could synchronise another file, or leave the journal of a finished blob."""
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    in_fsync, go_on, errors = threading.Event(), threading.Event(), []
    real, first = os.fsync, threading.Lock()

    def fsync(fd: Any) -> None:
        if first.acquire(blocking=False):
            in_fsync.set()
            assert go_on.wait(60)
        real(fd)

    def checkpoint() -> None:
        try:
            ingest.checkpoint()
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(os, "fsync", fsync)
    slow = threading.Thread(target=checkpoint)
    slow.start()
    assert in_fsync.wait(60)
    arguments = [CONTENT] if end == "commit" else []
    ending = threading.Thread(target=getattr(ingest, end), args=arguments)
    ending.start()
    go_on.set()
    slow.join(60)
    ending.join(60)
    assert errors == []
    assert store.exists(CONTENT) == (end == "commit")
    assert [path.exists() for path in files(store)] == [end == "suspend"] * 2


@pytest.mark.parametrize("end", ["commit", "suspend"])
def test_checkpoint_after_the_end_does_nothing(end: str, store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    getattr(ingest, end)(*([CONTENT] if end == "commit" else []))
    before = [path.exists() and path.read_bytes() for path in files(store)]
    fd = os.open(store.root, os.O_RDONLY)  # very likely reuses the freed descriptor number
    ingest.checkpoint()
    os.close(fd)
    assert [path.exists() and path.read_bytes() for path in files(store)] == before


@pytest.mark.usefixtures("always")
def test_checkpoint_includes_concurrent_writes(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer did not wait, and a kill would otherwise lose its bytes."""
    ingest = begin(store)
    write(ingest, 0, MIB)
    real, calls = os.fsync, []

    def fsync(fd: Any) -> None:
        calls.append(fd)
        if len(calls) == 1:
            write(ingest, MIB, 18 * MIB)
            ingest.checkpoint()  # represents another thread, which must not wait
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    ingest.checkpoint()
    killed(ingest)
    assert begin(store).list_missing() == [(18 * MIB, len(DATA))]


@pytest.mark.usefixtures("always")
def test_the_end_of_an_ingest_gets_the_error_of_its_checkpoint(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it once, to one of two calls."""
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    in_fsync, go_on, errors = threading.Event(), threading.Event(), list[str]()
    real, first = os.fsync, threading.Lock()

    def fsync(fd: Any) -> None:
        if not first.acquire(blocking=False):
            return real(fd)
        in_fsync.set()
        assert go_on.wait(60)
        raise OSError(5, "Input/output error")

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except StoreError as error:
            errors.append(str(error))

    monkeypatch.setattr(os, "fsync", fsync)
    calls = (ingest.checkpoint, lambda: ingest.commit(CONTENT))
    threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
    threads[0].start()
    assert in_fsync.wait(60)
    threads[1].start()
    # Long enough for a commit that does not wait
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert not store.exists(CONTENT)
    assert begin(store).list_missing() == WHOLE


def test_the_commit_of_a_batch_waits_for_a_checkpoint(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it leaves the journal of a finished blob."""
    in_note, go_on = threading.Event(), threading.Event()
    real = lock.open_shared

    def open_journal(*arguments: Any) -> int:
        in_note.set()
        assert go_on.wait(60)
        return real(*arguments)

    def commit() -> None:
        with store.begin_batch():
            ingest.commit(CONTENT)

    with store.begin_batch():
        ingest = begin(store)
        write(ingest, 0, len(DATA))
        monkeypatch.setattr(ingests, "open_shared", open_journal)
        threads = [threading.Thread(target=call) for call in (ingest.checkpoint, commit)]
        threads[0].start()
        assert in_note.wait(60)
        threads[1].start()
        # Long enough for a commit that does not wait
        threads[1].join(0.2)
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert store.exists(CONTENT)
    assert not any(path.exists() for path in files(store))


# -- a disk that loses bytes


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let one synchronisation fail, as Linux does after a lost write; record the files of all."""
    done, real = list[int](), os.fsync

    def fsync(fd: Any) -> None:
        done.append(os.fstat(fd).st_ino)
        if len(done) == 1:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return done


def commit_now(_: ImageLayout, ingest: FileIngest) -> None:
    ingest.commit(CONTENT)


def commit_with_others(store: ImageLayout, ingest: FileIngest) -> None:
    with store.begin_batch():
        # It was opened before the batch
        ingest._batch = store._batch
        ingest.commit(CONTENT)
        store.push(blob(b"other"), lambda _=0: io.BytesIO(b"other"))


@pytest.mark.parametrize("commit", [commit_now, commit_with_others])
@pytest.mark.parametrize("durable", [0, 5 * MIB])
def test_bytes_that_may_be_lost_are_fetched_again(
    durable: int,
    commit: Callable[[ImageLayout, FileIngest], None],
    store: ImageLayout,
    request: pytest.FixtureRequest,
) -> None:
    """The cache still has them, and their digest is right."""
    ingest = begin(store)
    if durable:
        write(ingest, 0, durable)
        ingest.suspend()
        ingest = begin(store)
    write(ingest, durable, len(DATA))
    ingest.checkpoint()
    assert files(store)[1].read_text().count("\n") == (4 if durable else 2)
    request.getfixturevalue("lossy")
    with pytest.raises(StoreError):
        commit(store, ingest)
    assert not store.exists(CONTENT)
    ingest = begin(store)
    assert ingest.list_missing() == [(durable, len(DATA))]
    complete(store, ingest)


def test_nothing_is_synchronised_again_after_an_error(
    store: ImageLayout, always: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    ingest.checkpoint()
    always.undo()
    write(ingest, 5 * MIB, 8 * MIB)
    ingest.checkpoint()
    write(ingest, 8 * MIB, len(DATA))
    done = request.getfixturevalue("lossy")
    with pytest.raises(StoreError):
        ingest.checkpoint(is_last=True)
    ingest.checkpoint()
    with pytest.raises(OSError, match="Input/output"):
        ingest.synchronise()
    ingest.suspend()
    assert done == [files(store)[0].stat().st_ino]
    assert files(store)[1].read_text() == f"\n0-{5 * MIB}\n"
    assert begin(store).list_missing() == [(5 * MIB, len(DATA))]


def test_an_interrupted_synchronisation_is_not_repeated(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is unknown."""
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    ingest.checkpoint()

    def interrupt(_: Any) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ingest.checkpoint(is_last=True)
    ingest.suspend()
    assert begin(store).list_missing() == WHOLE


# -- a full disk at the end


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_verified_bytes_are_kept_when_they_cannot_be_published(
    call: str, store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest = begin(store)
    write(ingest, 0, len(DATA))
    ingest.checkpoint()

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(NoSpaceError):
            ingest.commit(CONTENT)
    assert not store.exists(CONTENT)
    ingest = begin(store)
    assert ingest.list_missing() == []
    complete(store, ingest)


def test_a_read_only_partial_can_be_reopened() -> None:
    """It was made read-only before publication; root ignores the mode."""
    directory = Path(tempfile.mkdtemp())
    nobody = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(directory, nobody, -1)
    store = ImageLayout(directory)
    before = os.geteuid()
    os.seteuid(nobody)
    try:
        ingest = begin(store)
        write(ingest, 0, len(DATA))
        ingest.checkpoint()
        os.fchmod(ingest._fd, 0o444)
        killed(ingest)
        complete(store, begin(store))
    finally:
        os.seteuid(before)
        shutil.rmtree(directory)


def test_a_suspended_ingest_releases_its_lock(store: ImageLayout) -> None:
    ingest = begin(store)
    write(ingest, 0, 5 * MIB)
    with pytest.raises(IngestBusyError):
        begin(store)
    ingest.suspend()
    begin(store).abort()
