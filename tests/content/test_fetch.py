"""The download engine on an in-memory source with counters and faults."""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.content import chunk as parts
from clowder_aimage.content import fetch as fetch_module
from clowder_aimage.content.buffer import LARGEST_READ, PAGE
from clowder_aimage.content.chunk import (
    SMALL,
    SMALLEST_CHUNK,
    BlobTransfer,
    SmallConcurrency,
)
from clowder_aimage.content.copy_option import CopyOptions, Rate
from clowder_aimage.content.fetch import NOTED, BlobDownload, _adapt_step
from clowder_aimage.content.store import Source
from clowder_aimage.content.write_behind import EXTRA_BUFFERS, WriteBehind
from clowder_aimage.errors import NetworkError, NoSpaceError, NotFoundError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest
from tests.content.artifact import BLOB, blob

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from clowder_aimage.layout.ingest import FileIngest


MIB = 1024 * 1024


def noise(size: int, seed: bytes = b"seed") -> bytes:
    """Return bytes without repetition."""
    return hashlib.shake_128(seed).digest(size)


BIG = noise(40 * MIB + 12345)
CONTENT = blob(BIG)


class Counted(Source):
    """Blobs by digest, with all opened readers and bytes counted.

    ``together`` readers must be open before any except the first receives a byte.
    """

    def __init__(self, *blobs: bytes, together: int = 1, ranges: bool = True) -> None:
        self.blobs = {Digest.of(data): data for data in blobs}
        self.opened: list[Any] = []  # (digest, offset, length)
        self.bytes: Counter[object] = Counter()
        self.busiest = 0
        # called with (digest, offset) before bytes are returned
        self.fail: Callable[..., object] | None = None
        self.lock = threading.Condition()
        self.under_way = 0
        self.together = together
        self.ranges = ranges
        self.whole: set[Any] = set()  # digests that are sent from the start instead of a range

    def resolve(self, reference: object, /) -> NoReturn:
        raise NotFoundError(f"no {reference}")

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self.blobs

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        with self.lock:
            self.opened.append((content.digest, offset, length))
            self.under_way += 1
            self.busiest = max(self.busiest, self.under_way)
            self.lock.notify_all()
        end = content.size if length is None else offset + length
        return Reader(self, content, offset, end, first=len(self.opened) == 1)

    def give(self, content: Descriptor, start: int, end: int) -> bytes:
        data = self.blobs[content.digest]
        return data[start:end]

    def supports_ranges(self, content: Descriptor, /) -> bool:
        return content.digest not in self.whole

    def lengths(self, content: Descriptor) -> list[Any]:
        return [length for digest, _, length in self.opened if digest == content.digest]


class Zeros(Counted):
    """Blobs of zeros of any size."""

    def give(self, content: Descriptor, start: int, end: int) -> bytes:
        return bytes(end - start)


class Reader(io.RawIOBase):
    def __init__(
        self, source: Counted, content: Descriptor, offset: int, end: int, first: bool
    ) -> None:
        self.source, self.content, self.offset, self.end = source, content, offset, end
        self.first = first
        is_part = (offset, end) != (0, content.size) or content.size > SMALL
        if not source.ranges and is_part:  # skipped the preceding bytes
            source.whole.add(content.digest)
            source.bytes[content.digest] += offset

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        source = self.source
        if source.fail:
            source.fail(self.content.digest, self.offset)
        with source.lock:
            together = lambda: source.busiest >= source.together  # noqa: E731
            assert self.first or source.lock.wait_for(together, 60), "nobody joined"
        data = source.give(self.content, self.offset, min(self.end, self.offset + len(buffer)))
        buffer[: len(data)] = data
        self.offset += len(data)
        with source.lock:
            source.bytes[self.content.digest] += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with self.source.lock:
                self.source.under_way -= 1
        super().close()


class Watch:
    """Sums events, and verifies that progress is consistent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: Counter[object] = Counter()
        self.least = 0

    def __call__(self, event: Any) -> None:
        with self.lock:
            self.sums[event.kind] += event.count
            self.least = min(self.least, event.count, self.sums["progress"])

    @property
    def done(self) -> int:
        return self.sums["progress"] + self.sums["skip"]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent a busy disk from reserving a blob for one connection."""
    monkeypatch.setattr(WriteBehind, "is_behind", False)


@pytest.fixture
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent connections from being fast enough to keep a blob to themselves."""
    monkeypatch.setattr(parts, "PLENTY", math.inf)


def fetch(
    source: Counted,
    store: ImageLayout,
    *contents: Descriptor,
    connections: int = 4,
    watch: Watch | None = None,
    rate: Rate | None = None,
) -> Watch:
    watch = watch or Watch()
    BlobDownload(source, store, contents, CopyOptions(connections, watch, rate)).run()
    return watch


def left_over(store: ImageLayout) -> list[Any]:
    directory = store.root / ".aimage" / "ingest"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


# -- distribution of connections


def test_idle_connections_join_the_largest_blob(store: ImageLayout, slow_network: None) -> None:
    source = Counted(BIG, together=3)
    watch = fetch(source, store, CONTENT, connections=4)
    assert source.busiest >= 3  # they waited for each other; otherwise the source fails
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert source.bytes[CONTENT.digest] == CONTENT.size  # every byte once
    assert watch.done == CONTENT.size
    assert watch.least == 0
    assert left_over(store) == []


def test_parts_shrink_towards_the_end(store: ImageLayout, slow_network: None) -> None:
    source = Counted(BIG, together=3)
    fetch(source, store, CONTENT, connections=4)
    lengths = source.lengths(CONTENT)
    assert max(lengths) <= CONTENT.size // 2
    assert min(lengths) < lengths[0]
    assert max(lengths[-4:]) <= SMALLEST_CHUNK
    assert len(lengths) <= CONTENT.size // SMALLEST_CHUNK + 1


def test_a_disk_that_is_slower_than_a_connection_has_no_other_ones(
    store: ImageLayout, slow_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriteBehind, "is_behind", True)
    monkeypatch.setattr(parts, "MEASURING_TIME", math.inf)
    source = Counted(BIG)
    fetch(source, store, CONTENT, connections=4)
    # The first chunk is chosen before it is known; the next one is all that is left
    assert len(source.lengths(CONTENT)) == 2
    assert store.find_path(CONTENT).read_bytes() == BIG


def test_half_of_a_slow_connection_s_rest_is_taken_over(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each blob has a connection; the first free one joins the slow one."""
    monkeypatch.setattr(parts, "WORTH_SHARING", 0.01)
    smalls = [noise(1000, bytes([i])) for i in range(3)]
    source = Counted(BIG, *smalls, together=2)
    begun, joined = threading.Event(), threading.Event()

    def fail(digest: Any, offset: Any) -> None:
        if digest != CONTENT.digest:
            assert begun.wait(60)  # so that there is work left when the large one starts
        elif offset > 20 * MIB:
            joined.set()
        elif offset:
            assert joined.wait(60), "nobody came to help"
        begun.set()

    source.fail = fail
    watch = fetch(source, store, CONTENT, *map(blob, smalls), connections=2)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert source.lengths(CONTENT)[0] == CONTENT.size
    assert len(source.lengths(CONTENT)) >= 2
    assert watch.done == CONTENT.size + 3000
    assert source.bytes[CONTENT.digest] <= CONTENT.size + MIB  # it was stopped in time


@pytest.mark.parametrize("large", [1, 3, 8, 16, 64])
def test_many_connections_use_little_of_their_buffers(large: int, store: ImageLayout) -> None:
    engine = BlobDownload(Counted(BIG), store, [CONTENT], CopyOptions(8, Watch()))
    engine._large = large
    transfer = BlobTransfer(CONTENT, store.ingest(CONTENT.digest.encoded, CONTENT))
    size = engine._find_largest_read(transfer)
    transfer.ingest.abort()
    assert size % PAGE == 0
    assert size == 256 * 1024 or size * (large + EXTRA_BUFFERS) <= 7 * MIB
    assert size <= LARGEST_READ


def test_slow_reads_become_smaller() -> None:
    step, steps = MIB, []
    for seconds in (0.01, 0.01, 0.2, 0.5, 0.5, 0.5, 0.5):
        step = _adapt_step(step, seconds)
        steps.append(step / MIB)
    assert steps == [2, 2, 2, 1, 0.5, 0.25, 0.25]


def test_small_blobs_use_no_more_connections_than_they_need(store: ImageLayout) -> None:
    blobs = [noise(1000 + i, bytes([i])) for i in range(40)]
    source = Counted(*blobs)
    engine = BlobDownload(source, store, [blob(data) for data in blobs], CopyOptions(8, Watch()))
    # A process of which two connections use all cores
    engine._small_concurrency = SmallConcurrency(2, 1)
    ended(engine)
    assert source.busiest <= 2
    assert all(store.find_path(blob(data)).read_bytes() == data for data in blobs)


def test_connections_that_wait_for_small_blobs_are_joined_by_others(store: ImageLayout) -> None:
    blobs = [noise(500_000, bytes([i])) for i in range(12)]
    # The first ones end only once all are open
    source = Counted(*blobs, together=6)
    fetch(source, store, *[blob(data) for data in blobs], connections=6)
    assert source.busiest == 6


def test_small_blobs_are_fetched_in_parallel_with_one_connection_each(store: ImageLayout) -> None:
    blobs = [noise(500_000, bytes([i])) for i in range(12)]
    source = Counted(*blobs, together=3)
    contents = [blob(data) for data in blobs]
    fetch(source, store, *contents, connections=3)
    assert source.busiest == 3
    assert all(source.lengths(content) == [content.size] for content in contents)
    assert all(store.find_path(blob(data)).read_bytes() == data for data in blobs)


@pytest.mark.parametrize("connections", [1, 3])
def test_the_budget_is_never_exceeded(connections: int, store: ImageLayout) -> None:
    blobs = [BIG[: 9 * MIB], BIG[: 5 * MIB], *(noise(1000, bytes([i])) for i in range(20))]
    source = Counted(*blobs, together=connections)
    watch = fetch(source, store, *(blob(data) for data in blobs), connections=connections)
    assert source.busiest == connections
    assert sum(source.bytes.values()) == watch.done == sum(map(len, blobs))


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_parts_received_out_of_order_are_hashed_correctly(
    algorithm: str, store: ImageLayout
) -> None:
    """The connection with the first part arrives last."""
    content = Descriptor(BLOB, Digest.of(BIG, algorithm), len(BIG))
    source = Counted(BIG, together=3)
    source.blobs = {content.digest: BIG}
    behind = threading.Event()

    def fail(_: Any, offset: Any) -> None:
        if offset >= 20 * MIB:
            behind.set()
        elif offset == MIB:
            assert behind.wait(60), "nobody went ahead"

    source.fail = fail
    fetch(source, store, content, connections=3)
    assert store.find_path(content).read_bytes() == BIG


def test_memory_is_independent_of_the_blob_size(store: ImageLayout) -> None:
    peaks = []
    for size in (20 * MIB, 80 * MIB):
        hasher = hashlib.sha256()
        for _ in range(size // MIB):
            hasher.update(bytes(MIB))
        content = Descriptor(BLOB, Digest("sha256", hasher.hexdigest()), size)
        source = Zeros(together=3)
        tracemalloc.start()
        try:
            fetch(source, store, content, connections=4)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        store.find_path(content).unlink()
    assert peaks[1] < peaks[0] + 4 * MIB
    assert peaks[1] < 16 * MIB  # for four connections: a buffer each, and the source's data


def test_an_empty_blob_is_not_requested(store: ImageLayout) -> None:
    source = Counted(b"")
    fetch(source, store, blob(b""))
    assert source.opened == []
    assert store.find_path(blob(b"")).read_bytes() == b""


# -- servers without ranges


def test_a_source_that_ignores_ranges_is_read_by_one_connection(store: ImageLayout) -> None:
    """At most the first part is sent twice, as the whole blob is requested after it."""
    source = Counted(BIG, ranges=False)
    watch = fetch(source, store, CONTENT, connections=8)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert source.busiest == 1
    assert source.bytes[CONTENT.digest] <= CONTENT.size + NOTED
    assert watch.done == CONTENT.size


def test_a_source_that_starts_to_ignore_ranges(store: ImageLayout) -> None:
    """One server behind a load balancer may differ from the others."""
    source = Counted(BIG, together=3)

    def fail(_: Any, offset: Any) -> None:
        if offset >= 8 * MIB:
            source.ranges = False

    source.fail = fail
    watch = fetch(source, store, CONTENT, connections=3)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert watch.done == CONTENT.size
    assert source.busiest == 3


# -- failures and resumption


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read have 1 MiB."""
    monkeypatch.setattr(fetch_module, "LARGEST_READ", MIB)
    monkeypatch.setattr(fetch_module, "_SLOW", math.inf)


class Failing:
    """Delivers ``count`` bytes of a blob in reads of 1 MiB, then fails for every reader."""

    def __init__(self, count: int, error: NetworkError | OSError | KeyboardInterrupt) -> None:
        self.left, self.size = count, MIB
        self.error = error
        self.lock = threading.Lock()

    def __call__(self, digest: Any, offset: Any) -> None:
        with self.lock:
            self.left -= self.size
            if self.left < 0:
                raise self.error


@pytest.mark.usefixtures("steady")
def test_a_fetch_after_a_failure_requests_only_missing_bytes(store: ImageLayout) -> None:
    source, watch = Counted(BIG, together=3), Watch()
    source.fail = Failing(25 * MIB, NetworkError("gone"))
    with pytest.raises(NetworkError, match="gone"):
        fetch(source, store, CONTENT, connections=3, watch=watch)
    first = source.bytes[CONTENT.digest]
    assert 20 * MIB < first < CONTENT.size
    assert watch.done == first
    again = Counted(BIG, together=1)
    watch = fetch(again, store, CONTENT, connections=4)
    assert again.bytes[CONTENT.digest] == CONTENT.size - first
    assert watch.sums["progress"] == CONTENT.size  # existing bytes count once
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert left_over(store) == []


@pytest.mark.usefixtures("steady")
def test_a_failed_small_blob_leaves_no_partial(store: ImageLayout) -> None:
    data = BIG[: 3 * MIB]
    source = Counted(data)
    source.fail = Failing(2 * MIB, NetworkError("gone"))
    with pytest.raises(NetworkError):
        fetch(source, store, blob(data))
    assert left_over(store) == []


@pytest.mark.usefixtures("steady")
def test_a_finished_fetch_leaves_the_partial_of_another_blob(store: ImageLayout) -> None:
    source = Counted(BIG)
    source.fail = Failing(25 * MIB, NetworkError("gone"))
    with pytest.raises(NetworkError):
        fetch(source, store, CONTENT)
    partial = left_over(store)
    assert partial == [CONTENT.digest.encoded, f"{CONTENT.digest.encoded}.journal"]
    small = noise(1000)
    fetch(Counted(small), store, blob(small))
    assert left_over(store) == partial


def test_wrong_bytes_are_discarded(store: ImageLayout) -> None:
    source = Counted(BIG)
    source.blobs[CONTENT.digest] = BIG[:-1] + b"?"
    with pytest.raises(VerificationError, match="digest mismatch"):
        fetch(source, store, CONTENT)
    assert left_over(store) == []
    assert not store.exists(CONTENT)
    fetch(Counted(BIG), store, CONTENT)
    assert store.exists(CONTENT)


def test_wrong_bytes_are_not_requested_twice(store: ImageLayout) -> None:
    """There is no other source."""
    source = Counted(BIG)
    source.blobs[CONTENT.digest] = BIG[:-1] + b"?"
    with pytest.raises(VerificationError, match="digest mismatch"):
        fetch(source, store, CONTENT)
    assert source.bytes[CONTENT.digest] == CONTENT.size


def resumed(store: ImageLayout, data: bytes) -> None:
    """Return the remains of an earlier fetch of the large blob."""
    ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
    ingest.write_at(0, data)
    ingest.suspend()
    assert left_over(store)


def test_a_damaged_partial_is_fetched_again_at_once(store: ImageLayout) -> None:
    resumed(store, b"?" * (25 * MIB))
    source = Counted(BIG)
    watch = fetch(source, store, CONTENT)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert source.bytes[CONTENT.digest] == CONTENT.size - 25 * MIB + CONTENT.size
    assert watch.done == CONTENT.size
    assert left_over(store) == []


def test_a_complete_but_damaged_partial_is_fetched_again(store: ImageLayout) -> None:
    resumed(store, b"?" * CONTENT.size)
    source = Counted(BIG)
    fetch(source, store, CONTENT)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert source.bytes[CONTENT.digest] == CONTENT.size


def test_a_damaged_partial_of_a_wrong_blob_is_fetched_again_once(store: ImageLayout) -> None:
    resumed(store, b"?" * (25 * MIB))
    source = Counted(BIG)
    source.blobs[CONTENT.digest] = BIG[:-1] + b"?"
    with pytest.raises(VerificationError, match="digest mismatch"):
        fetch(source, store, CONTENT)
    assert source.bytes[CONTENT.digest] == CONTENT.size - 25 * MIB + CONTENT.size
    assert left_over(store) == []


def test_an_empty_blob_of_another_digest_is_refused(store: ImageLayout) -> None:
    """A manifest may declare any digest with size zero."""
    content = Descriptor(BLOB, Digest.of(b"something"), 0)
    engine = BlobDownload(Counted(), store, [content], CopyOptions(2, Watch()))
    with pytest.raises(VerificationError, match="digest mismatch"):
        ended(engine)


def ended(engine: BlobDownload) -> None:
    """Run an engine to its end; raise AssertionError on a timeout."""
    errors = []

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    hangs = thread.is_alive()
    if hangs:
        engine._stop()
        thread.join(60)
    assert not hangs, "it did not end"
    for error in errors:
        raise error


def test_a_connection_that_joins_too_late_finishes_the_blob(store: ImageLayout) -> None:
    """Bytes were left when it joined, and none when it took its part.

    The connections that received them have ended by then.
    """
    late = threading.Event()

    class Late(BlobDownload):
        def _fetch_chunk(self, blob: parts.BlobTransfer, writes: WriteBehind) -> None:
            with self._changed:
                if blob.readers == 2 and not late.is_set():
                    late.set()
                    gone = lambda: blob.readers == 1 and not blob.unclaimed  # noqa: E731
                    assert self._changed.wait_for(gone, 60), "it is not alone"
            super()._fetch_chunk(blob, writes)

    def fail(_: Any, offset: Any) -> None:
        assert not offset or late.wait(60), "nobody joined"

    source, watch = Counted(BIG), Watch()
    source.fail = fail
    ended(Late(source, store, [CONTENT], CopyOptions(2, watch)))
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert watch.sums["done"] == CONTENT.size
    assert left_over(store) == []


def test_a_source_that_ends_early_fails(store: ImageLayout) -> None:
    source = Counted(BIG)
    source.blobs[CONTENT.digest] = BIG[:-5]
    with pytest.raises(VerificationError, match="ended after"):
        fetch(source, store, CONTENT)


@pytest.mark.usefixtures("steady")
def test_a_full_disk_keeps_journaled_bytes(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for data and journal; earlier journal entries remain valid."""
    real, writes = os.pwrite, Failing(30 * MIB, OSError(errno.ENOSPC, "No space left on device"))

    def pwrite(fd: int, data: Buffer, offset: int) -> int:
        writes(None, offset)
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(NoSpaceError) as caught:
            fetch(Counted(BIG, together=2), store, CONTENT, connections=2)
    assert caught.value.exit_code == 6
    assert len(left_over(store)) == 2
    again = Counted(BIG)
    fetch(again, store, CONTENT, connections=2)
    assert again.bytes[CONTENT.digest] == CONTENT.size - 30 * MIB
    assert store.find_path(CONTENT).read_bytes() == BIG


@pytest.mark.usefixtures("steady")
def test_a_failure_is_raised_even_if_the_journal_cannot_be_written(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No blob stays locked: the same process may retry."""
    other = noise(20 * MIB, b"other")

    def full(_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = Counted(BIG, other, together=2)
    source.fail = Failing(3 * MIB, NetworkError("gone"))  # before the first part is complete
    fetch(Counted(b"first"), store, blob(b"first"))  # the directories exist
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NetworkError, match="gone"):
            fetch(source, store, CONTENT, blob(other), connections=2)
    fetch(Counted(BIG, other), store, CONTENT, blob(other), connections=2)
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert store.find_path(blob(other)).read_bytes() == other


@pytest.mark.usefixtures("steady")
def test_an_interrupt_ends_the_fetch_and_keeps_received_bytes(store: ImageLayout) -> None:
    source = Counted(BIG)

    class Interrupt(KeyboardInterrupt):
        pass

    source.fail = Failing(25 * MIB, Interrupt())
    with pytest.raises(Interrupt):
        fetch(source, store, CONTENT, connections=1)
    again = Counted(BIG)
    fetch(again, store, CONTENT)
    assert again.bytes[CONTENT.digest] == CONTENT.size - 25 * MIB


# -- shared downloads


def test_two_fetches_of_one_blob_share_a_download(store: ImageLayout) -> None:
    source, waits = Counted(BIG), threading.Event()
    source.fail = lambda _, offset: waits.wait(60) if offset == 16 * MIB else None
    watches = [Watch(), Watch()]
    second_source = Counted(BIG)
    threads = [
        threading.Thread(target=fetch, args=(source, store, CONTENT), kwargs={"watch": watches[0]})
    ]
    threads[0].start()
    with source.lock:
        assert source.lock.wait_for(lambda: source.opened, 60)
    threads.append(
        threading.Thread(
            target=fetch, args=(second_source, store, CONTENT), kwargs={"watch": watches[1]}
        )
    )
    threads[1].start()
    waits.set()
    for thread in threads:
        thread.join(60)
    assert second_source.opened == []
    assert source.bytes[CONTENT.digest] == CONTENT.size
    assert watches[0].done == CONTENT.size
    assert watches[1].sums["skip"] == CONTENT.size  # bytes of the other process count as existing


def test_a_waiting_fetch_names_the_process_of_the_other(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_NOTICE", -1.0)
    at_work = store.ingest(CONTENT.digest.encoded, CONTENT)
    waits: list[int] = []

    class Ending(Watch):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if event.kind == "wait":
                waits.append(event.count)
                at_work.abort()

    fetch(Counted(BIG), store, CONTENT, watch=Ending())
    assert waits == [os.getpid() if Path("/proc/locks").exists() else 0]
    assert store.exists(CONTENT)


def test_a_waiting_fetch_reports_the_progress_of_the_other(store: ImageLayout) -> None:
    at_work = store.ingest(CONTENT.digest.encoded, CONTENT)
    at_work.write_at(0, BIG[: 8 * MIB])
    seen, source, watch = threading.Event(), Counted(BIG), Watch()

    class Seeing(Watch):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            watch(event)
            if watch.done >= 8 * MIB:
                seen.set()

    thread = threading.Thread(
        target=fetch, args=(source, store, CONTENT), kwargs={"watch": Seeing()}
    )
    thread.start()
    assert seen.wait(60)
    assert source.opened == []
    at_work.abort()  # killed: the fetch restarts, and the observed progress is subtracted
    thread.join(60)
    assert watch.done == CONTENT.size
    assert store.exists(CONTENT)


def test_the_second_fetch_takes_over_when_the_first_fails(store: Any) -> None:
    first, second = Counted(BIG), Counted(BIG)
    reached, fails = threading.Event(), threading.Event()

    def fail(_: Any, offset: Any) -> None:
        if offset >= 20 * MIB:
            reached.set()
            assert fails.wait(60)
            raise NetworkError("gone")

    first.fail = fail
    errors = []

    def run() -> None:
        try:
            fetch(first, store, CONTENT, connections=1)
        except NetworkError as error:
            errors.append(error)

    one = threading.Thread(target=run)
    one.start()
    assert reached.wait(60)
    busy, spins = threading.Event(), threading.Event()
    ingest, looks = store.ingest, []

    def watched(*arguments: Any) -> FileIngest:
        looks.append(arguments)
        try:
            return ingest(*arguments)
        finally:
            busy.set()
            if len(looks) > 30:
                spins.set()

    store.ingest = watched
    two = threading.Thread(target=fetch, args=(second, store, CONTENT))
    two.start()
    assert busy.wait(60)  # it waits for the first one
    assert not spins.wait(0.3)  # it polls now and then, not continuously
    assert second.opened == []
    fails.set()
    with second.lock:
        assert second.lock.wait_for(lambda: second.opened, 60), "nobody took over"
    one.join(60)
    two.join(60)
    assert len(errors) == 1
    assert store.find_path(CONTENT).read_bytes() == BIG
    assert second.bytes[CONTENT.digest] == CONTENT.size - first.bytes[CONTENT.digest]


# -- rate limit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[Any] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_a_rate_holds_on_average() -> None:
    clock = Clock()
    rate = Rate(1000, clock=clock, sleep=clock.sleep)
    for _ in range(50):
        rate.consume(100)
    assert clock.now == pytest.approx(105)
    assert max(clock.waits) == pytest.approx(0.1)  # short fair delays


def test_idle_time_gives_no_credit() -> None:
    clock = Clock()
    rate = Rate(1000, clock=clock, sleep=clock.sleep)
    rate.consume(1000)
    clock.now += 60
    rate.consume(1000)
    assert clock.now == pytest.approx(162)


def test_a_fetch_respects_the_rate(store: ImageLayout) -> None:
    clock = Clock()
    limit = 4 * MIB
    rate = Rate(limit, clock=clock, sleep=clock.sleep)
    source = Counted(BIG)
    fetch(source, store, CONTENT, connections=1, rate=rate)
    assert clock.now - 100 == pytest.approx(CONTENT.size / limit)
    assert max(clock.waits) <= 0.2
