"""The range cache: lookup of ranges, fetching for peers, and eviction."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content import bytes_body
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node import range_cache
from clowder_aimage.node.range_cache import RangeCache
from clowder_aimage.node.range_source import RANGE, BlobRange, RangeUpstream
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.peer import BlobSpan
from tests.node.nodes import LIMITS, all_at_once, noise, push_model
from tests.proxy import Proxy

if TYPE_CHECKING:
    from clowder_aimage.node.peers import SharingLimits


BLOB = noise(2 * RANGE + 1000, "ranges")
CONTENT = Descriptor("application/octet-stream", Digest.of(BLOB), len(BLOB))
REFERENCE = Reference.parse("registry.example.com/a/b:1")
PARTS = [BlobRange.at(CONTENT, at) for at in range(0, len(BLOB), RANGE)]


def bytes_of(part: BlobRange) -> bytes:
    return BLOB[part.start : part.end]


class Upstream:
    """Serve and count ranges of BLOB; reads block while ``gate`` is cleared."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.fails: Exception | None = None
        self.cut: int | None = None
        self.gate, self.asked = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def known_size(self, digest: Any) -> int:
        return CONTENT.size if digest == CONTENT.digest else 1000

    def size(self, _: Any, digest: Any) -> int:
        return self.known_size(digest)

    def rate(self, _: Any) -> None:
        return None

    @contextlib.contextmanager
    def open(self, _: Any, part: Any) -> Iterator[io.BytesIO]:
        self.opened.append(part)
        self.asked.release()
        assert self.gate.wait(60)
        if self.fails:
            raise self.fails
        data = bytes_of(part) if part.digest == CONTENT.digest else bytes(part.length)
        yield io.BytesIO(data[: self.cut])


class NoOwners:
    def __init__(self, limits: SharingLimits) -> None:
        self.peers = SimpleNamespace(limits=limits)

    def open_stored(self, *_: Any) -> None:
        return None


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


def cached(store: ImageLayout, upstream: Any, **options: Any) -> RangeCache:
    owners: Any = NoOwners(replace(LIMITS, **options))
    return RangeCache(store, upstream, owners, lambda *_: None)


@pytest.fixture
def cache(store: ImageLayout, upstream: Upstream) -> Iterator[RangeCache]:
    found = cached(store, upstream)
    yield found
    found.close()


def read(found: Any, part: BlobRange) -> bytes:
    assert not isinstance(found, bool)
    with contextlib.closing(found):
        return os.pread(found.fileno(), part.length, found.offset)


def kept(cache: RangeCache) -> Any:
    return sum(part.length for part in cache._files)


def span_of(digest: Digest, number: int = 0) -> BlobSpan:
    return BlobSpan(REFERENCE, digest, number * RANGE, number * RANGE + 1)


def fetch(cache: RangeCache, number: int, seconds: float = 20) -> Any:
    return cache.fetch(span_of(CONTENT.digest, number), seconds)


# -- lookup


def test_a_range_of_a_stored_blob_is_found(store: ImageLayout, cache: RangeCache) -> None:
    assert cache.find(PARTS[0]) is None
    store.push(CONTENT, bytes_body(BLOB))
    for part in PARTS:
        assert read(cache.find(part), part) == bytes_of(part)
    assert cache.find(BlobRange(CONTENT.digest, len(BLOB) + 1, 0)) is None, "another size"


def test_a_range_written_by_a_pull_is_found_in_its_ingest(
    store: ImageLayout, cache: RangeCache
) -> None:
    ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
    ingest.write_at(PARTS[1].start, bytes_of(PARTS[1]))
    assert cache.find(PARTS[1]) is None, "not all of it may be written"
    cache.wrote(PARTS[1])
    assert read(cache.find(PARTS[1]), PARTS[1]) == bytes_of(PARTS[1])
    cache.wrote(PARTS[2])
    assert cache.find(PARTS[2]) is None, "the file is shorter"
    cache.forget(CONTENT.digest)
    assert cache.find(PARTS[1]) is None
    ingest.abort()


def test_symbolic_links_are_not_followed(
    store: ImageLayout, cache: RangeCache, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(BLOB)
    for place in (store.place(CONTENT), store.root / ".aimage/ingest" / CONTENT.digest.encoded):
        os.makedirs(os.path.dirname(place))  # noqa: PTH103, PTH120
        os.symlink(tmp_path / "secret", place)  # noqa: PTH211
    cache.wrote(PARTS[0])
    assert cache.find(PARTS[0]) is None


# -- fetching for peers


def test_concurrent_requests_fetch_a_range_once(cache: RangeCache, upstream: Upstream) -> None:
    found = all_at_once([lambda: fetch(cache, 1)] * 8)
    assert all(read(each, PARTS[1]) == bytes_of(PARTS[1]) for each in found)
    assert read(fetch(cache, 1), PARTS[1]) == bytes_of(PARTS[1])
    assert upstream.opened == [PARTS[1]]


def test_a_slow_range_can_be_waited_for(cache: RangeCache, upstream: Upstream) -> None:
    upstream.gate.clear()
    assert fetch(cache, 0, 0.05) is True
    assert upstream.asked.acquire(timeout=60)
    assert cache.has(PARTS[0]), "it comes from the registry"
    upstream.gate.set()
    assert read(cache.wait(PARTS[0], 20), PARTS[0]) == bytes_of(PARTS[0])
    assert cache.wait(PARTS[1], 0.01) is False


def test_a_stalled_range_fails(
    cache: RangeCache, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_cache, "_MAX_STALL", 0.05)
    upstream.gate.clear()
    with pytest.raises(NetworkError):
        fetch(cache, 0, 0.1)
    upstream.gate.set()


def test_the_number_of_concurrent_fetches_is_limited(cache: RangeCache, upstream: Upstream) -> None:
    upstream.gate.clear()
    digests = [Digest.of(bytes([number])) for number in range(range_cache.AT_ONCE + 1)]
    assert all(cache.fetch(span_of(digest), 0.05) is True for digest in digests)
    for _ in range(range_cache.AT_ONCE):
        assert upstream.asked.acquire(timeout=60)
    assert len(upstream.opened) == range_cache.AT_ONCE
    upstream.gate.set()


@pytest.mark.parametrize("error", [NotFoundError("no"), AImageError("no")])
def test_a_failed_range_is_fetched_again(
    cache: RangeCache, upstream: Upstream, error: AImageError
) -> None:
    upstream.fails = error
    with pytest.raises(NotFoundError if isinstance(error, NotFoundError) else AImageError):
        fetch(cache, 0)
    upstream.fails = None
    assert read(fetch(cache, 0), PARTS[0]) == bytes_of(PARTS[0])


def test_a_truncated_range_is_not_kept(cache: RangeCache, upstream: Upstream) -> None:
    upstream.cut = 1000
    with pytest.raises(NetworkError):
        fetch(cache, 0)
    assert cache.find(PARTS[0]) is None and kept(cache) == 0


def test_the_oldest_ranges_are_evicted_first(store: ImageLayout, upstream: Upstream) -> None:
    cache = cached(store, upstream, kept=2 * RANGE)
    for number in (0, 1, 2):
        read(fetch(cache, number), PARTS[number])
    assert cache.find(PARTS[0]) is None
    assert kept(cache) == PARTS[1].length + PARTS[2].length <= 2 * RANGE
    held = cache.find(PARTS[1])
    cache.clear()
    assert kept(cache) == 0 and read(held, PARTS[1]) == bytes_of(PARTS[1]), "it is being sent"


def test_a_range_written_by_a_pull_is_dropped_from_the_cache(cache: RangeCache) -> None:
    fetch(cache, 0).close()
    cache.wrote(PARTS[0])
    assert kept(cache) == 0


def test_nothing_is_fetched_on_a_full_disk(store: ImageLayout, upstream: Upstream) -> None:
    cache = cached(store, upstream, spared=1 << 60)
    store.root.mkdir()
    with pytest.raises(AImageError):
        fetch(cache, 0)
    assert not upstream.opened


def test_a_symbolic_link_as_cache_directory_is_refused(
    store: ImageLayout, cache: RangeCache, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store.root / ".aimage").mkdir(parents=True)
    (store.root / ".aimage/range").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AImageError):
        fetch(cache, 0)


def test_cached_ranges_are_in_unlinked_files(store: ImageLayout, cache: RangeCache) -> None:
    fetch(cache, 0).close()
    assert kept(cache) and not list((store.root / ".aimage/range").iterdir())


# -- registries


def test_a_registry_that_ignores_range_headers_is_detected(
    tmp_path: Path, local_repository: str, proxy: Proxy
) -> None:
    pushed = push_model(tmp_path, local_repository, BLOB)
    proxy.ranges = "ignored"
    upstream = RangeUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
    reference = Reference(proxy.host, pushed.repository, pushed.tag)
    assert upstream.has_ranges(proxy.host)
    with upstream.open(reference, PARTS[1]) as reader:
        assert reader.read(1000) == bytes_of(PARTS[1])[:1000]
    assert not upstream.has_ranges(proxy.host)
    upstream.close()


def test_the_size_of_a_blob_is_requested_once(
    tmp_path: Path, local_repository: str, proxy: Proxy
) -> None:
    pushed = push_model(tmp_path, local_repository, BLOB)
    upstream = RangeUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
    reference = Reference(proxy.host, pushed.repository, pushed.tag)
    for _ in range(2):
        assert upstream.size(reference, CONTENT.digest) == len(BLOB)
    assert [passed.method for passed in proxy.seen].count("HEAD") == 1
    with pytest.raises(NotFoundError):
        upstream.size(reference, Digest.of(b"missing"))
    upstream.close()
