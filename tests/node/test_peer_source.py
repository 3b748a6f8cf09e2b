"""Pulls through other nodes are correct, whatever the other nodes send."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.store import WrittenStream
from clowder_aimage.errors import NetworkError, NotFoundError
from clowder_aimage.node.range_source import RANGE, BlobRange, rank_nodes
from clowder_aimage.oci import Reference
from clowder_aimage.registry.peer import PeerTimeouts
from tests.content.artifact import blob
from tests.memory_store import MemoryStore
from tests.node.nodes import LIMITS, MIB, TOKEN, Node, fleet, noise, push_model
from tests.proxy import Proxy
from tests.registry_app import RegistryThread
from tests.scripted import Answer, ScriptedRegistry
from tests.wait import PATIENCE

BLOB = noise(2 * RANGE + 12345, "near")
CONTENT = blob(BLOB)
REFERENCE = Reference.parse("registry.example.com/a/b:1")
IDS = ["a" * 32, "b" * 32, "c" * 32, "d" * 32]
LAYERS = [noise(2 * RANGE + 77, "large"), *(noise(5000 + n, f"small {n}") for n in range(4))]
SHORT = replace(LIMITS, coming=0.3, busy=0.3, pause=0.1)


@pytest.fixture
def memory_store() -> MemoryStore:
    found = MemoryStore()
    found.push(CONTENT, build_bytes_body(BLOB))
    return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Return a node whose only peer does not respond."""
    found = Node(tmp_path / "node").start()
    found.addresses.append("127.0.0.1:9")
    yield found
    found.stop()


@pytest.fixture(scope="module")
def pushed(local_registry: RegistryThread, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Push a model to the registry."""
    home = tmp_path_factory.mktemp("pushed")
    return push_model(home, f"{local_registry.host}/tests/poison", *LAYERS)


# -- reading


def test_spans_of_any_offset_and_chunk_size_are_correct(
    node: Node, memory_store: MemoryStore
) -> None:
    source = node.sharing.build_source_wrapper(REFERENCE)(memory_store)
    draw = random.Random(7)
    spans = [(0, None), (RANGE, RANGE), (RANGE - 1, 2), (len(BLOB) - 1, 1), (len(BLOB), 5), (5, 0)]
    spans += [(draw.randrange(len(BLOB)), draw.randrange(len(BLOB))) for _ in range(4)]
    for offset, length in spans:
        data = bytearray()
        with source.open(CONTENT, offset, length) as reader:
            while chunk := reader.read(draw.randrange(1, 9 << 20)):
                data += chunk
        end = len(BLOB) if length is None else offset + length
        assert data == BLOB[offset:end]


def test_errors_of_the_registry_are_raised(node: Node) -> None:
    source = node.sharing.build_source_wrapper(REFERENCE)(MemoryStore())
    with pytest.raises(NotFoundError), source.open(CONTENT) as reader:
        reader.read(1)
    with pytest.raises(NotFoundError):
        source.resolve(REFERENCE)
    assert not source.exists(CONTENT)


def test_a_reader_closed_early_does_not_block_others(node: Node, memory_store: MemoryStore) -> None:
    source = node.sharing.build_source_wrapper(REFERENCE)(memory_store)
    for _ in range(40):
        with source.open(CONTENT) as reader:
            reader.read(10)


def test_ranges_are_sent_to_others_as_far_as_they_are_written(
    node: Node, memory_store: MemoryStore
) -> None:
    source, cache = node.sharing.build_source_wrapper(REFERENCE)(memory_store), node.sharing.cache
    parts = [BlobRange.at(CONTENT, at) for at in range(0, len(BLOB), RANGE)]
    ingest = node.layout.ingest(CONTENT.digest.encoded, CONTENT)
    with source.open(CONTENT) as reader:
        assert isinstance(reader, WrittenStream)
        first = reader.read(1000)
        found = cache.find_arrival(parts[0])
        assert found is not None and found.front == 0
        ingest.write_at(0, memoryview(first))
        reader.record_written(1000)
        assert found.front == 1000
        rest = bytearray()
        while piece := reader.read(1 << 20):
            rest += piece
        # All is read, little is written
        assert found.front == 1000 and cache.find_arrival(parts[2]) is not None
        ingest.write_at(1000, memoryview(rest))
        reader.record_written(RANGE - 1000 + 7)
        assert found.front == RANGE and cache.find_arrival(parts[0]) is None
        assert cache.has(parts[0], 0)
        second = cache.find_arrival(parts[1])
        assert second is not None and second.front == 7
    # What was not written is not available
    assert [cache.find_arrival(part) for part in parts] == [None] * 3
    assert [cache.has(part, 0) for part in parts] == [True, False, False]
    ingest.abort()


def test_shutting_down_ends_a_pull_that_waits_for_a_busy_owner(
    tmp_path: Path, memory_store: MemoryStore
) -> None:
    assert IDS[1] in {rank_nodes(IDS[:2], CONTENT.digest, number)[0] for number in range(3)}
    with fleet(tmp_path, 2, ids=IDS[:2]) as (one, other):

        async def busy(request: Any) -> web.Response | None:
            if "/blobs/" not in request.path:
                return None
            one.sharing._closed.set()
            return web.Response(status=429)

        other.before = busy
        source = one.sharing.build_source_wrapper(REFERENCE)(memory_store)
        with pytest.raises(NetworkError, match="shutting down"), source.open(CONTENT) as reader:
            while reader.read(1 << 20):
                pass


# -- faulty peers


def instead(answer: Any) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """Answer requests for ranges with ``answer(request, start, end)``."""

    async def before(request: Any) -> Any:
        if "/blobs/" not in request.path or request.method == "HEAD":
            return None
        first, last = request.headers["Range"].removeprefix("bytes=").split("-")
        return await answer(request, int(first), int(last) + 1)

    return before


def check_right(node: Node) -> None:
    """Check that the model is complete, and each blob of the store has its digest."""
    assert node.reference is not None
    manifest = node.layout.read(node.layout.resolve(node.reference))
    sizes = [layer["size"] for layer in json.loads(manifest)["layers"]]
    assert sizes == [len(layer) for layer in LAYERS]
    for path in node.layout.root.glob("blobs/sha256/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert not list(node.layout.root.glob(".aimage/ingest/*"))


def pull_from(
    answer: Any, tmp_path: Path, reference: Reference, **options: Any
) -> tuple[Node, Node, Counter[str]]:
    """Pull with a peer that responds with ``answer``; return both nodes and the bytes by source."""
    with fleet(tmp_path, 2, ids=IDS[:2], **options) as (one, other):
        other.before = instead(answer)
        one.reference = reference
        _, came = one.pull(reference)
        check_right(one)
        assert other.blob_requests(), "the other node was never asked"
        return one, other, came


def partial(data: bytes, start: Any, end: Any, total: Any = None) -> web.Response:
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{total or end}"}
    return web.Response(status=206, body=data, headers=headers)


async def wrong_bytes(_: Any, start: Any, end: Any) -> web.Response:
    return partial(bytes(end - start), start, end)


async def another_range(_: Any, start: Any, end: Any) -> web.Response:
    return partial(bytes(end - start), start + 1, end + 1)


async def too_long(_: Any, start: Any, end: Any) -> web.Response:
    return partial(bytes(end - start + 1), start, end)


async def everything(_: Any, start: Any, end: Any) -> web.Response:
    return web.Response(body=bytes(end))


async def endless(request: Any, start: Any, end: Any) -> web.StreamResponse:
    answer = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {start}-{end - 1}/9"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    for _ in range(1000):
        await answer.write(bytes(MIB))
    return answer


async def breaks_off(request: Any, start: Any, end: Any) -> web.StreamResponse:
    answer = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {start}-{end - 1}/9"})
    answer.content_length = end - start
    await answer.prepare(request)
    await answer.write(bytes((end - start) // 2))
    request.transport.abort()
    return answer


async def is_missing(_: Any, start: Any, end: Any) -> web.Response:
    return web.Response(status=404)


@pytest.mark.parametrize(
    "answer",
    [
        wrong_bytes, another_range, too_long, everything, endless, breaks_off, is_missing,
    ],
)  # fmt: skip
def test_a_pull_with_a_faulty_peer_is_correct(
    tmp_path: Path, pushed: Reference, answer: Callable[[Any, Any, Any], Coroutine[Any, Any, Any]]
) -> None:
    one, _, came = pull_from(answer, tmp_path, pushed)
    if answer not in (wrong_bytes, breaks_off):
        assert not came["neighbour"]
    (peer,) = [each for each in one.sharing.peers._peers.values() if each.id == IDS[1]]
    assert bool(peer.failures) == (answer not in (wrong_bytes, is_missing))


def test_a_wrong_blob_is_read_again_from_the_registry_only(
    tmp_path: Path, local_registry: RegistryThread, pushed: Reference
) -> None:
    async def wrong_large(_: Any, start: Any, end: Any) -> web.Response | None:
        return partial(bytes(end - start), start, end) if end - start > MIB else None

    with Proxy(local_registry.host).running() as proxy:
        reference = Reference(proxy.host, pushed.repository, pushed.tag)
        _, other, _ = pull_from(wrong_large, tmp_path, reference)
        large = [url for url, _ in other.blob_requests() if hashed(LAYERS[0]) in url]
        assert 0 < len(large) <= 2 * 4, "not after it was wrong"
        assert proxy.sent() < 2 * len(LAYERS[0]) + MIB


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_redirect_to_an_address_is_not_followed(tmp_path: Path, pushed: Reference) -> None:
    with ScriptedRegistry(lambda _: Answer(200)).running() as elsewhere:

        async def redirects(request: Any, *_: Any) -> web.Response:
            host = request.headers["Aimage-Node"]  # a node does not redirect to the requesting node
            headers = {"Location": f"http://{elsewhere.host}/", "Aimage-Node": f"{host},127.0.0.1"}
            return web.Response(status=307, headers=headers)

        pull_from(redirects, tmp_path, pushed, limits=SHORT)
        assert not elsewhere.seen


def test_a_redirect_leads_to_a_node_that_has_the_range(
    tmp_path: Path, local_registry: RegistryThread, pushed: Reference
) -> None:
    with Proxy(local_registry.host).running() as proxy, fleet(tmp_path, 3, ids=IDS[:3]) as nodes:
        one, owner, holder = nodes
        holder.reference = one.reference = Reference(proxy.host, pushed.repository, pushed.tag)
        holder.pull(holder.reference)
        before = proxy.sent()

        async def redirects(*_: Any) -> web.Response:
            return web.Response(status=307, headers={"Location": "/", "Aimage-Node": IDS[2]})

        owner.before = instead(redirects)
        _, came = one.pull(one.reference)
        check_right(one)
        assert proxy.sent() == before
        assert came["neighbour"] + came["cache"] >= sum(map(len, LAYERS)) and came["neighbour"]
        asked = [headers for _, headers in holder.blob_requests() if "Cache-Control" in headers]
        assert asked, "a node to which another one redirects is to fetch nothing"


def test_circular_redirects_end(tmp_path: Path, pushed: Reference) -> None:
    with fleet(tmp_path, 3, ids=IDS[:3], limits=SHORT) as nodes:
        for node, other in ((nodes[1], IDS[2]), (nodes[2], IDS[1])):

            async def redirects(*_: Any, other: str = other) -> web.Response:
                return web.Response(status=307, headers={"Location": "/", "Aimage-Node": other})

            node.before = instead(redirects)
        nodes[0].reference = pushed
        nodes[0].pull(pushed)
        check_right(nodes[0])


def test_an_owner_that_is_always_busy_is_left_out(tmp_path: Path, pushed: Reference) -> None:
    async def busy(*_: Any) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "1"})

    one, _, _ = pull_from(busy, tmp_path, pushed, limits=SHORT)
    (peer,) = [each for each in one.sharing.peers._peers.values() if each.id == IDS[1]]
    assert peer.failures == 6


@pytest.mark.parametrize("is_head", [True, False])
def test_a_peer_that_trickles_bytes_times_out(
    tmp_path: Path, pushed: Reference, is_head: bool
) -> None:
    async def drips(request: Any, start: Any, end: Any) -> None:
        if is_head:
            await asyncio.sleep(PATIENCE)
        headers = {"Content-Range": f"bytes {start}-{end - 1}/9"}
        answer = web.StreamResponse(status=206, headers=headers)
        answer.content_length = end - start
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.1)

    one, _, _ = pull_from(drips, tmp_path, pushed, timeouts=PeerTimeouts(stall=0.5, range=1))
    (peer,) = [each for each in one.sharing.peers._peers.values() if each.id == IDS[1]]
    assert peer.failures


def test_only_the_token_of_the_nodes_is_sent_and_only_to_nodes(
    tmp_path: Path, pushed: Reference
) -> None:
    with fleet(tmp_path, 3, ids=IDS[:3]) as nodes:
        nodes[0].pull(pushed)
        for url, headers in [each for node in nodes for each in node.seen]:
            assert headers["Authorization"] == f"Bearer {TOKEN}"
            assert TOKEN not in url
