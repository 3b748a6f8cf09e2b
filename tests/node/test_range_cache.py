"""The range cache: lookup of ranges, fetching for peers, and eviction."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.range_cache import RangeCache
from clowder_aimage.node.range_reader import AT_ONCE, RangeExchange
from clowder_aimage.node.range_source import RANGE, BlobRange, RangeUpstream
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions
from tests.memory_store import MemoryStore
from tests.node.nodes import LIMITS, all_at_once, noise, push_model
from tests.proxy import Proxy

BLOB = noise(2 * RANGE + 1000, "ranges")
CONTENT = Descriptor("application/octet-stream", Digest.of(BLOB), len(BLOB))
REFERENCE = Reference.parse("registry.example.com/a/b:1")
PARTS = [BlobRange.at(CONTENT, at) for at in range(0, len(BLOB), RANGE)]


def bytes_of(part: BlobRange) -> bytes:
    return BLOB[part.start : part.end]


class Upstream(MemoryStore):
    """Serve and count ranges of BLOB; reads block while ``gate`` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Any] = []
        self.fails: Exception | None = None
        self.cut: int | None = None
        self.gate, self.asked = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def connect(self, _: Any) -> Any:
        return contextlib.nullcontext(self)

    def find_rate(self, _: Any) -> None:
        return None

    def count(self, *_: Any) -> None:
        pass

    def open(self, content: Any, offset: int = 0, length: int | None = None, /) -> Any:
        self.opened.append(BlobRange.at(content, offset))
        self.asked.release()
        assert self.gate.wait(60)
        if self.fails:
            raise self.fails
        whole = BLOB if content == CONTENT else bytes(content.size)
        return io.BytesIO(whole[offset:][:length][: self.cut])


class NoOwners:
    def open_stored(self, *_: Any) -> None:
        return None


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


def exchange_of(store: ImageLayout, upstream: Any, **options: Any) -> RangeExchange:
    owners: Any = NoOwners()
    cache = RangeCache(store, replace(LIMITS, **options))
    return RangeExchange(cache, upstream, owners, lambda *_: None)


@pytest.fixture
def exchange(store: ImageLayout, upstream: Upstream) -> Iterator[RangeExchange]:
    found = exchange_of(store, upstream)
    yield found
    found.cache.close()


@pytest.fixture
def cache(exchange: RangeExchange) -> RangeCache:
    return exchange.cache


def read(found: Any, part: BlobRange) -> bytes:
    assert not isinstance(found, bool)
    with contextlib.closing(found):
        return os.pread(found.fileno(), part.length, found.offset)


def kept(cache: RangeCache) -> Any:
    return sum(part.length for part in cache._files)


def fetch(exchange: RangeExchange, number: int) -> Any:
    """Fetch a range for a peer, and return its file."""
    part = PARTS[number]
    if (found := exchange.cache.find(part)) is not None:
        return found
    arrival = exchange.fetch(REFERENCE, part)
    assert arrival is not None
    asyncio.run(arrival.wait(part.length - 1))
    return exchange.cache.find(part)


# -- lookup


def test_a_range_of_a_stored_blob_is_found(store: ImageLayout, cache: RangeCache) -> None:
    assert cache.find(PARTS[0]) is None
    store.push(CONTENT, build_bytes_body(BLOB))
    for part in PARTS:
        assert read(cache.find(part), part) == bytes_of(part)
    assert cache.find(BlobRange(CONTENT.digest, len(BLOB) + 1, 0)) is None, "another size"


def test_a_range_written_by_a_pull_is_found_in_its_ingest(
    store: ImageLayout, cache: RangeCache
) -> None:
    ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
    ingest.write_at(PARTS[1].start, bytes_of(PARTS[1]))
    assert cache.find(PARTS[1]) is None, "not all of it may be written"
    cache.record_written(PARTS[1])
    assert read(cache.find(PARTS[1]), PARTS[1]) == bytes_of(PARTS[1])
    cache.record_written(PARTS[2])
    assert cache.find(PARTS[2]) is None, "the file is shorter"
    cache.forget(CONTENT.digest)
    assert cache.find(PARTS[1]) is None
    ingest.abort()


def test_symbolic_links_are_not_followed(
    store: ImageLayout, cache: RangeCache, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(BLOB)
    for place in (store.locate(CONTENT), store.root / ".aimage/ingest" / CONTENT.digest.encoded):
        os.makedirs(os.path.dirname(place))  # noqa: PTH103, PTH120
        os.symlink(tmp_path / "secret", place)  # noqa: PTH211
    cache.record_written(PARTS[0])
    assert cache.find(PARTS[0]) is None


# -- fetching for peers


def test_concurrent_requests_fetch_a_range_once(
    exchange: RangeExchange, upstream: Upstream
) -> None:
    found = all_at_once([lambda: fetch(exchange, 1)] * 8)
    assert all(read(each, PARTS[1]) == bytes_of(PARTS[1]) for each in found)
    assert read(fetch(exchange, 1), PARTS[1]) == bytes_of(PARTS[1])
    assert upstream.opened == [PARTS[1]]


def test_a_range_from_the_registry_is_here_before_it_arrives(
    exchange: RangeExchange, upstream: Upstream
) -> None:
    upstream.gate.clear()
    arrival = exchange.fetch(REFERENCE, PARTS[0])
    assert arrival is not None
    assert upstream.asked.acquire(timeout=60)
    assert exchange.cache.has(PARTS[0], 0), "it comes from the registry"
    assert not exchange.cache.has(PARTS[1], 0)
    upstream.gate.set()
    assert arrival.join(60)
    assert read(exchange.cache.find(PARTS[0]), PARTS[0]) == bytes_of(PARTS[0])


def test_the_number_of_concurrent_fetches_is_limited(
    exchange: RangeExchange, upstream: Upstream
) -> None:
    upstream.gate.clear()
    digests = [Digest.of(bytes([number])) for number in range(AT_ONCE + 1)]
    found = [exchange.fetch(REFERENCE, BlobRange(digest, 1000, 0)) for digest in digests]
    assert [each is None for each in found] == [False] * AT_ONCE + [True]
    for _ in range(AT_ONCE):
        assert upstream.asked.acquire(timeout=60)
    upstream.gate.set()
    assert all(each.join(60) for each in found if each)
    assert len(upstream.opened) == AT_ONCE


@pytest.mark.parametrize("error", [NotFoundError("no"), AImageError("no")])
def test_a_failed_range_is_fetched_again(
    exchange: RangeExchange, upstream: Upstream, error: AImageError
) -> None:
    upstream.fails = error
    with pytest.raises(NotFoundError if isinstance(error, NotFoundError) else AImageError):
        fetch(exchange, 0)
    upstream.fails = None
    assert read(fetch(exchange, 0), PARTS[0]) == bytes_of(PARTS[0])


def test_a_truncated_range_is_not_kept(
    exchange: RangeExchange, cache: RangeCache, upstream: Upstream
) -> None:
    upstream.cut = 1000
    with pytest.raises(NetworkError):
        fetch(exchange, 0)
    assert cache.find(PARTS[0]) is None and kept(cache) == 0


def test_the_oldest_ranges_are_evicted_first(store: ImageLayout, upstream: Upstream) -> None:
    exchange = exchange_of(store, upstream, kept=2 * RANGE)
    cache = exchange.cache
    for number in (0, 1, 2):
        read(fetch(exchange, number), PARTS[number])
    assert cache.find(PARTS[0]) is None
    assert kept(cache) == PARTS[1].length + PARTS[2].length <= 2 * RANGE
    held = cache.find(PARTS[1])
    cache.clear()
    assert kept(cache) == 0 and read(held, PARTS[1]) == bytes_of(PARTS[1]), "it is being sent"


def test_a_range_written_by_a_pull_is_dropped_from_the_cache(
    exchange: RangeExchange, cache: RangeCache
) -> None:
    fetch(exchange, 0).close()
    cache.record_written(PARTS[0])
    assert kept(cache) == 0


def test_nothing_is_fetched_on_a_full_disk(store: ImageLayout, upstream: Upstream) -> None:
    exchange = exchange_of(store, upstream, spared=1 << 60)
    store.root.mkdir()
    with pytest.raises(AImageError):
        fetch(exchange, 0)
    assert not upstream.opened


def test_a_symbolic_link_as_cache_directory_is_refused(
    store: ImageLayout, exchange: RangeExchange, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store.root / ".aimage").mkdir(parents=True)
    (store.root / ".aimage/range").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AImageError):
        fetch(exchange, 0)


def test_cached_ranges_are_in_unlinked_files(
    store: ImageLayout, exchange: RangeExchange, cache: RangeCache
) -> None:
    fetch(exchange, 0).close()
    assert kept(cache) and not list((store.root / ".aimage/range").iterdir())


# -- arriving


def test_a_range_is_read_from_the_ingest_while_a_pull_writes_it(
    store: ImageLayout, cache: RangeCache
) -> None:
    ingest = store.ingest(CONTENT.digest.encoded, CONTENT)
    arrival, _ = cache.begin_arrival(PARTS[1])
    cache.write_to_ingest(arrival)
    ingest.write_at(PARTS[1].start, bytes_of(PARTS[1])[:1000])
    arrival.advance(1000)
    found = cache.find(PARTS[1])
    assert found is not None and found.arrival is arrival
    assert os.pread(found.fileno(), 1000, found.offset) == bytes_of(PARTS[1])[:1000]
    assert [cache.has(PARTS[1], offset) for offset in (0, 999, 1000)] == [True, True, False]
    cache.land(arrival, NetworkError("no more"))
    assert cache.find(PARTS[1]) is None
    found.close()
    ingest.abort()


def test_a_failed_arrival_fails_its_readers(cache: RangeCache) -> None:
    arrival, _ = cache.begin_arrival(PARTS[0])
    arrival.advance(10)
    cache.land(arrival, StoreError("no space"))
    assert asyncio.run(arrival.wait(9)) == 10
    with pytest.raises(StoreError, match="no space"):
        asyncio.run(arrival.wait(10))


# -- registries


def test_a_registry_that_ignores_range_headers_is_detected(
    store: ImageLayout, tmp_path: Path, local_repository: str, proxy: Proxy
) -> None:
    pushed = push_model(tmp_path, local_repository, BLOB)
    proxy.ranges = "ignored"
    upstream = RangeUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
    reference = Reference(proxy.host, pushed.repository, pushed.tag)
    assert upstream.has_ranges(proxy.host)
    exchange = exchange_of(store, upstream)
    arrival = exchange.fetch(reference, PARTS[1])
    assert arrival is not None and arrival.join(60)
    assert read(exchange.cache.find(PARTS[1]), PARTS[1]) == bytes_of(PARTS[1])
    assert not upstream.has_ranges(proxy.host)
    exchange.cache.close()
    upstream.close()
