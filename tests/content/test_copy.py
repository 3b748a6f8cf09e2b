"""Copy of artifacts between stores: content, order and failures."""

from __future__ import annotations

import concurrent.futures
import io
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content import Overlay, build_bytes_body, copy
from clowder_aimage.content.chunk import SMALL, START, ConcurrencyProbe
from clowder_aimage.content.copy import _BlobPush, push_blobs
from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NotFoundError,
    VerificationError,
)
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, mediatype
from tests.content.artifact import (
    BLOB,
    Broken,
    Recorder,
    blob,
    index,
    manifest,
    put,
    put_artifact,
)
from tests.memory_store import MemoryStore

if TYPE_CHECKING:
    from clowder_aimage.content.copy_option import CopyEvent
    from clowder_aimage.content.store import Body, Reader


NAME = Reference.parse("a:v1")


def watched(source: MemoryStore, target: Recorder | MemoryStore, **options: Any) -> list[Any]:
    """Copy and return the events as well."""
    events: list[Any] = []
    copy(source, NAME, target, on_event=events.append, **options)
    return events


def total(events: Any, *kinds: str) -> Any:
    return sum(event.count for event in events if event.kind in kinds)


def test_copy_transfers_all_blobs_and_tags_last() -> None:
    source, target = MemoryStore(), Recorder()
    made = put_artifact(source, "a:v1", b"one", b"two")
    found = copy(source, NAME, target)
    assert found == made.descriptor
    assert target.pushed[-1] == made.descriptor
    assert {content.digest for content in target.pushed[:-1]} == {
        child.digest for child in made.children
    }
    assert target.resolve(NAME) == made.descriptor


def test_copy_under_another_name() -> None:
    source, target = MemoryStore(), MemoryStore()
    made = put_artifact(source, "a:v1", b"one")
    copy(source, NAME, target, Reference.parse("b:v2"))
    assert target.resolve(Reference.parse("b:v2")).digest == made.digest
    with pytest.raises(NotFoundError):
        target.resolve(NAME)


def test_existing_blobs_are_skipped_and_counted() -> None:
    source, target = MemoryStore(), Recorder()
    put_artifact(source, "a:v1", b"x" * 1000, b"y" * 500, b"z" * 70)
    put(target, b"y" * 500)
    target.pushed.clear()
    events = watched(source, target)
    (plan,) = [event for event in events if event.kind == "plan"]
    assert plan.blobs == 4
    assert plan.count == 1000 + 500 + 70 + len(b'{"name":"a:v1"}')
    assert total(events, "skip") == 500
    assert total(events, "progress", "skip") == total(events, "start", "skip") == plan.count
    assert total(events, "start") == total(events, "done")
    assert Counter(event.kind for event in events)["done"] == 3
    assert 500 not in {content.size for content in target.pushed}


def test_a_repeated_copy_transfers_only_the_root() -> None:
    source, target = MemoryStore(), Recorder()
    made = put_artifact(source, "a:v1", b"one", b"two")
    copy(source, NAME, target)
    target.pushed.clear()
    copy(source, NAME, target)
    assert target.pushed == [made.descriptor]


def test_a_repeated_digest_is_copied_once() -> None:
    source, target = MemoryStore(), Recorder()
    made = put_artifact(source, "a:v1", b"same", b"same", b"other", b"same")
    events = watched(source, target)
    assert next(event.blobs for event in events if event.kind == "plan") == 3
    assert len(target.pushed) == 4
    assert len(made.layers) == 4


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4)])
def test_a_digest_with_two_sizes_is_refused(sizes: tuple[int, int]) -> None:
    """The correct size must not hide the wrong one, whatever their order."""
    source, target = MemoryStore(), MemoryStore()
    data = put(source, b"four")
    layers = [Descriptor(BLOB, data.digest, size) for size in sizes]
    made = manifest(put(source, b"{}"), layers)
    source.push(made.descriptor, build_bytes_body(made.raw), NAME)
    with pytest.raises(VerificationError):
        copy(source, NAME, target)
    assert not target.exists(made.descriptor)


def test_large_blobs_are_copied_first() -> None:
    source, target = MemoryStore(), Recorder()
    put_artifact(source, "a:v1", b"1" * 1, b"2" * 200, b"3" * 30)
    copy(source, NAME, target, concurrency=1)
    sizes = [content.size for content in target.pushed[:-1]]
    assert sizes == sorted(sizes, reverse=True)


class Failing(MemoryStore):
    """A store in which ``bad`` cannot be read."""

    def __init__(self, bad: bytes) -> None:
        super().__init__()
        self.bad = blob(bad)
        self.opened: list[Descriptor] = []

    def open(
        self, content: Descriptor, offset: int = 0, length: int | None = None, /
    ) -> io.BufferedReader[Any] | Reader:
        self.opened.append(content)
        if content.digest == self.bad.digest:
            return io.BufferedReader(Broken(b"x", NetworkError("the line is dead")))
        return super().open(content, offset, length)


def test_the_first_failure_stops_the_copy_without_a_tag() -> None:
    source, target = Failing(b"x" * 1000), Recorder()
    made = put_artifact(source, "a:v1", *(bytes([i]) * i for i in range(1, 100)), b"x" * 1000)
    with pytest.raises(NetworkError, match="the line is dead"):
        copy(source, NAME, target, concurrency=1)
    assert not target.exists(made.descriptor)
    assert target.pushed == []  # the largest failed; the others never started
    with pytest.raises(NotFoundError):
        target.resolve(NAME)
    source.bad = blob(b"nothing of it")
    assert copy(source, NAME, target) == made.descriptor


class Gathering(MemoryStore):
    """A target whose pushes of blobs end once ``START`` of them are in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.active, self.most = threading.Lock(), 0, 0
        self.gathered = threading.Barrier(START)

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        with self.lock:
            self.active += 1
            self.most = max(self.most, self.active)
        self.gathered.wait(10)
        with self.lock:
            self.active -= 1


@pytest.mark.parametrize("sizes", [[SMALL + 1] * 2 * START, [SMALL + 1] * START + [1] * START])
def test_few_connections_push_large_blobs_until_more_are_faster(sizes: list[int]) -> None:
    target = Gathering()
    blobs = [Descriptor("a/b", blob(bytes([i])).digest, size) for i, size in enumerate(sizes)]
    push_blobs(MemoryStore(), target, blobs, CopyOptions(8))
    assert target.most == START


def test_connections_are_added_for_large_blobs_while_they_are_faster() -> None:
    large = Descriptor("a/b", blob(b"x").digest, SMALL + 1)
    push = _BlobPush(MemoryStore(), MemoryStore(), [large] * 8, CopyOptions(8))
    push._large = ConcurrencyProbe(8)
    taken = [push._take() for _ in range(START)]
    assert push._is_unneeded(large)
    push._large.value = 2 * START
    assert not push._is_unneeded(large)
    assert taken == [large] * START


def test_damage_in_the_source_is_detected() -> None:
    source, target = MemoryStore(), MemoryStore()
    made = put_artifact(source, "a:v1", b"true")
    source._blobs[made.layers[0].digest] = b"fals"
    with pytest.raises(VerificationError):
        copy(source, NAME, target)
    assert not target.exists(made.layers[0])


def test_a_damaged_manifest_fails_before_any_transfer() -> None:
    source, target = MemoryStore(), Recorder()
    made = put_artifact(source, "a:v1", b"one")
    source._blobs[made.digest] = made.raw.replace(b"2", b"3", 1)
    with pytest.raises(VerificationError):
        copy(source, NAME, target)
    assert target.pushed == []


def test_a_missing_layer_raises_not_found() -> None:
    source, target = MemoryStore(), MemoryStore()
    made = manifest(put(source, b"{}"), [blob(b"absent")])
    source.push(made.descriptor, build_bytes_body(made.raw), NAME)
    with pytest.raises(NotFoundError):
        copy(source, NAME, target)
    assert not target.exists(made.descriptor)


def tree(source: MemoryStore) -> tuple[Manifest, Manifest, Index, Index]:
    """Return an index of a manifest and of an index with the same manifest and another."""
    one = put_artifact(source, "x:one", b"one", b"common")
    two = put_artifact(source, "x:two", b"two", b"common")
    inner = index([one.descriptor, two.descriptor], annotations={"a": "inner"})
    source.push(inner.descriptor, build_bytes_body(inner.raw))
    outer = index([one.descriptor, inner.descriptor, one.descriptor])
    source.push(outer.descriptor, build_bytes_body(outer.raw), NAME)
    return one, two, inner, outer


def test_an_index_is_copied_children_first_and_each_once() -> None:
    source, target = MemoryStore(), Recorder()
    one, two, inner, outer = tree(source)
    copy(source, NAME, target)
    order = [content.digest for content in target.pushed]
    assert len(order) == len(set(order)) == 5 + 4  # two configs, three layers, four documents
    place = {digest: i for i, digest in enumerate(order)}
    assert order[-1] == outer.digest
    for parent in (one, two, inner, outer):
        for child in parent.children:
            assert place[child.digest] < place[parent.digest]


def test_a_child_of_unknown_type_is_copied_unchanged() -> None:
    source, target = MemoryStore(), MemoryStore()
    odd = put(source, b"?", "application/vnd.example.manifest.v9")
    made = index([odd])
    source.push(made.descriptor, build_bytes_body(made.raw), NAME)
    copy(source, NAME, target)
    assert target.exists(odd)


def test_a_layer_with_a_manifest_media_type_is_copied_as_a_blob() -> None:
    source, target = MemoryStore(), Recorder()
    odd = put(source, b"not JSON at all", mediatype.OCI_MANIFEST)
    made = manifest(put(source, b"{}"), [odd])
    source.push(made.descriptor, build_bytes_body(made.raw), NAME)
    copy(source, NAME, target)
    with target.open(odd) as file:
        assert file.read() == b"not JSON at all"
    assert mediatype.OCI_MANIFEST not in {content.media_type for content in target.pushed[:-1]}


def nested(source: MemoryStore, depth: int) -> None:
    document: Manifest | Index = put_artifact(source, "x:leaf", b"leaf")
    for level in range(depth):
        # each level repeated: a naive walk would take a thousand to the power of the depth
        document = index([document.descriptor] * 1000, annotations={"level": str(level)})
        source.push(document.descriptor, build_bytes_body(document.raw))
    source.tag(document.descriptor, NAME)


def test_nested_indexes_are_read_once_each_up_to_a_depth() -> None:
    source, target = MemoryStore(), MemoryStore()
    nested(source, 5)
    assert target.exists(copy(source, NAME, target))
    nested(source, 6)
    with pytest.raises(FormatError, match="nested over 4 levels"):
        copy(source, NAME, target)


def test_an_interrupt_stops_the_copy_between_two_reads() -> None:
    """Ctrl-C in the caller's thread: each transfer ends with its current read."""
    source, target = MemoryStore(), MemoryStore()
    made = put_artifact(source, "a:v1", b"x" * 100, b"x" * 50)
    reading, left, reads = threading.Barrier(3), threading.Event(), []

    class Hanging(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            reads.append(1)
            reading.wait(60)
            assert left.wait(60)
            buffer[:1] = b"x"
            return 1

    class Slow(MemoryStore):
        def open(
            self, content: Descriptor, offset: int = 0, length: int | None = None, /
        ) -> io.RawIOBase | Reader:
            return Hanging() if content.media_type == BLOB else source.open(content, offset, length)

        def resolve(self, reference: Reference, /) -> Descriptor:
            return source.resolve(reference)

    waits, waits_for = [], concurrent.futures.wait

    def wait(futures: Iterable[Future[Any]], **options: Any) -> Any:
        waits.append(options)
        if len(waits) == 1:
            reading.wait(60)
            raise KeyboardInterrupt
        left.set()
        return waits_for(futures, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concurrent.futures, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            copy(Slow(), NAME, target, concurrency=2)
    assert len(waits) == 2
    assert len(reads) == 2
    assert not any(target.exists(child) for child in (made.descriptor, *made.layers))


def test_a_retry_reduces_the_progress() -> None:
    source = MemoryStore()
    made = put_artifact(source, "a:v1", b"x" * 100)

    class Retrying(MemoryStore):
        def push(
            self, content: Descriptor, body: Body, reference: Reference | None = None, /
        ) -> None:
            if content.size == 100:
                with body() as file:
                    file.read(60)
                with body(40) as file:  # resumes
                    file.read(10)
            super().push(content, body, reference)

    events = watched(source, Retrying())
    counts = [e.count for e in events if e.kind == "progress" and e.content == made.layers[0]]
    assert counts == [60, -20, 10, -50, 100]
    assert sum(counts) == 100


def test_a_failing_observer_fails_the_copy() -> None:
    source, target = MemoryStore(), MemoryStore()
    made = put_artifact(source, "a:v1", b"x")

    def on_event(event: CopyEvent) -> None:
        if event.kind == "start":
            raise AImageError("enough")

    with pytest.raises(AImageError, match="enough"):
        copy(source, NAME, target, on_event=on_event)
    assert not target.exists(made.descriptor)


def test_an_overlay_store_reads_its_documents_and_the_base() -> None:
    below = MemoryStore()
    made = put_artifact(below, "a:v1", b"layer")
    other = manifest(blob(b"config", "application/x"), made.layers)
    documents = {other.digest: other.raw, other.config.digest: b"config"}
    over = Overlay(below, other.descriptor, documents)
    assert over.resolve(NAME) == other.descriptor
    assert over.exists(other.descriptor)
    assert over.exists(made.layers[0])
    assert not over.exists(blob(b"absent"))
    with over.open(other.config, 2, 3) as file:
        assert file.read() == b"nfi"
    target = MemoryStore()
    copy(over, NAME, target)
    assert target.resolve(NAME) == other.descriptor
    assert target.exists(made.layers[0])
    assert not below.exists(other.descriptor)
