"""Ranges for other nodes over ``GET /v2/<name>/blobs/<digest>``."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import NetworkError
from clowder_aimage.node import range_routes
from clowder_aimage.node.range_source import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import LIMITS, TOKEN, Node, acquaint, all_at_once, noise, push_model
from tests.proxy import Proxy
from tests.registry_app import RegistryThread
from tests.wait import PATIENCE, until

BLOB = noise(2 * RANGE + 1000, "shared")
CONTENT = Descriptor("application/octet-stream", Digest.of(BLOB), len(BLOB))
ASKER = "9" * 32
ONE_UPLOAD = replace(LIMITS, uploads=1)
STORED = {"Cache-Control": "only-if-cached"}


@pytest.fixture(scope="module")
def model(local_registry: RegistryThread, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Push BLOB and return its reference."""
    return push_model(tmp_path_factory.mktemp("model"), f"{local_registry.host}/tests/blob", BLOB)


@pytest.fixture
def pushed(model: Reference, proxy: Proxy) -> Reference:
    """Return the reference of BLOB behind the proxy."""
    return Reference(proxy.host, model.repository, model.tag)


@contextlib.contextmanager
def running(tmp_path: Path, count: int = 1, **options: Any) -> Iterator[list[Node]]:
    """Run nodes that are peers of each other; the first of them has BLOB."""
    with contextlib.ExitStack() as stack:
        nodes = [Node(tmp_path / f"node{number}", **options).start() for number in range(count)]
        for node in nodes:
            stack.callback(node.stop)
        acquaint(nodes)
        nodes[0].layout.push(CONTENT, build_bytes_body(BLOB))
        yield nodes


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path / "node").start()
    yield found
    found.stop()


def request(
    node: Node,
    number: int = 0,
    reference: Any = None,
    *,
    method: str = "GET",
    asker: str = ASKER,
    path: Any = None,
    **headers: Any,
) -> Any:
    """Send a request for a range of BLOB and return the response unread."""
    start = number * RANGE
    host = reference.registry if reference else "registry.example.com"
    name = reference.repository if reference else "a/b"
    sent = {
        "Range": f"bytes={start}-{min(start + RANGE, len(BLOB)) - 1}",
        "Authorization": f"Bearer {TOKEN}",
    }
    sent |= {"Aimage-Node": asker} if asker else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(node.address, timeout=60)
    connection.request(
        method,
        path or f"/v2/{name}/blobs/{CONTENT.digest}?ns={host}&size={CONTENT.size}",
        headers=sent,
    )
    response: Any = connection.getresponse()
    response.connection = connection
    return response


def ask(*args: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Send a request and return the status, headers and body of the response."""
    response = request(*args, **options)
    with contextlib.closing(response.connection):
        return response.status, response.headers, response.read()


def check(answer: Any, number: int = 0) -> None:
    """Check that the response is that range of BLOB."""
    status, headers, body = answer
    data = BLOB[number * RANGE :][:RANGE]
    start = number * RANGE
    assert status == 206 and body == data
    assert headers["Content-Range"] == f"bytes {start}-{start + len(data) - 1}/{len(BLOB)}"


def test_a_ping_response_contains_the_node_id(node: Node) -> None:
    assert ask(node, path="/v2/")[1]["Aimage-Node"] == node.id


@pytest.mark.parametrize("authorization", ["", "Bearer another"])
def test_a_request_without_the_node_token_is_401(tmp_path: Path, authorization: str) -> None:
    with running(tmp_path) as (node,):
        assert ask(node, Authorization=authorization)[0] == 401


def test_a_stored_blob_is_served_in_ranges(tmp_path: Path) -> None:
    with running(tmp_path) as (node,):
        for number in range(3):
            check(ask(node, number), number)
        until(lambda: node.bytes == {"sent": len(BLOB)})


def test_a_part_of_a_range_is_served(tmp_path: Path) -> None:
    with running(tmp_path) as (node,):
        status, headers, body = ask(node, Range=f"bytes={RANGE + 5}-{RANGE + 9}")
        assert (status, body) == (206, BLOB[RANGE + 5 : RANGE + 10])
        assert headers["Content-Range"] == f"bytes {RANGE + 5}-{RANGE + 9}/{len(BLOB)}"


def test_head_is_answered_from_the_store_only(node: Node, pushed: Reference, proxy: Proxy) -> None:
    assert ask(node, 0, pushed, method="HEAD", **STORED)[0] == 404
    node.layout.push(CONTENT, build_bytes_body(BLOB))
    assert ask(node, 0, pushed, method="HEAD", **STORED)[0] == 200
    assert not proxy.seen and not node.bytes


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"path": "/v2/a/b/blobs/sha256:..%2F..%2Fetc%2Fpasswd?ns=registry.example.com"}, 400),
        ({"path": f"/v2/a/b/blobs/{CONTENT.digest}?ns=http://169.254.169.254&size=9"}, 400),
        ({"path": f"/v2/a/b/blobs/{CONTENT.digest}"}, 404),  # no registry to fetch from
        ({"Range": f"bytes=0-{2 * RANGE}"}, 404),  # spans several ranges
        ({"Range": "bytes=5-3"}, 404),
        ({"asker": "../../etc"}, 404),  # not a node id
    ],
)
def test_an_invalid_range_request_fetches_nothing(
    node: Node, wrong: dict[str, str], status: int
) -> None:
    assert ask(node, **wrong)[0] == status
    assert not (node.layout.root / "blobs").exists()


def test_a_missing_range_is_fetched_from_the_registry_once(
    node: Node, pushed: Reference, proxy: Proxy
) -> None:
    for answer in all_at_once([partial(ask, node, 1, pushed) for _ in range(5)]):
        check(answer, 1)
    check(ask(node, 1, pushed), 1)
    assert proxy.sent() == RANGE
    assert node.bytes["registry"] == RANGE and len(node.sharing.cache._files) == 1


def test_a_missing_range_is_fetched_from_a_peer_before_the_registry(
    tmp_path: Path, pushed: Reference, proxy: Proxy
) -> None:
    with running(tmp_path, 2) as (_, other):
        check(ask(other, 1, pushed), 1)
        assert proxy.sent() == 0 and other.bytes["received"] == RANGE


def test_a_range_past_the_end_is_404(node: Node, pushed: Reference) -> None:
    assert ask(node, 0, pushed, Range=f"bytes={2 * RANGE}-{len(BLOB)}")[0] == 404
    assert ask(node, 0, pushed, Range=f"bytes={5 * RANGE}-{5 * RANGE}")[0] == 404


def test_only_if_cached_fetches_nothing(node: Node, pushed: Reference, proxy: Proxy) -> None:
    assert ask(node, 0, pushed, **STORED)[0] == 404
    assert not proxy.seen


def test_only_if_cached_waits_for_a_range_being_fetched(
    node: Node, pushed: Reference, proxy: Proxy
) -> None:
    proxy.hold = 1000
    with ThreadPoolExecutor(2) as pool:
        cause = pool.submit(ask, node, 0, pushed)
        proxy.wait_until(lambda: proxy.held > 0)
        waits = pool.submit(ask, node, 0, pushed, **STORED)
        proxy.release()
        check(cause.result(60))
        check(waits.result(60))
    assert proxy.sent() == RANGE


def test_a_node_fetches_only_from_repositories_of_its_models(
    tmp_path: Path, pushed: Reference, proxy: Proxy
) -> None:
    with running(tmp_path, 3) as (one, other, third):
        third.has_repository = False
        asker = one.id
        assert ask(third, 0, pushed, asker=asker)[0] == 404
        status, headers, _ = ask(third, 0, pushed, asker=other.id)
        assert (status, headers["Aimage-Node"]) == (307, asker), "the first one fetches it"
        assert headers["Location"].startswith(f"http://{one.address}/v2/")
        assert ask(third, 0, pushed, asker=asker)[0] == 404
    assert not proxy.seen


def test_a_blob_that_the_registry_lacks_is_404(node: Node, pushed: Reference) -> None:
    path = f"/v2/{pushed.repository}/blobs/{Digest.of(b'missing')}?ns={pushed.registry}&size=7"
    assert ask(node, path=path, Range="bytes=0-6")[0] == 404


def test_an_unreachable_registry_is_502(node: Node) -> None:
    assert ask(node, 0, Reference.parse("127.0.0.1:9/a/b:1"))[0] == 502


# -- a busy node


def hold(node: Node) -> Any:
    """Read only the head of a response, so that its slot stays occupied."""
    return request(node, 1)


def test_a_busy_node_redirects_to_a_peer_that_fetched_the_range(tmp_path: Path) -> None:
    with running(tmp_path, 3, limits=ONE_UPLOAD) as (one, other, third):
        check(ask(one, asker=other.id))
        check(ask(one))  # from an unknown node
        slow = hold(one)
        status, headers, _ = ask(one, asker=third.id)
        assert (status, headers["Aimage-Node"]) == (307, other.id)
        slow.connection.close()


def test_a_request_waits_for_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_routes, "TURN_TIMEOUT", PATIENCE)
    with running(tmp_path, limits=ONE_UPLOAD) as (node,):
        slow = hold(node)
        timer = threading.Timer(0.3, slow.read)
        timer.start()
        check(ask(node))
        timer.join()
        slow.connection.close()


def test_a_request_without_a_free_slot_is_429(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_routes, "TURN_TIMEOUT", 0.1)
    with running(tmp_path, limits=ONE_UPLOAD) as (node,):
        slow = hold(node)
        status, headers, _ = ask(node)
        assert status == 429 and "Retry-After" not in headers
        slow.read()
        slow.connection.close()
        check(ask(node))


def test_a_range_being_fetched_is_429_with_retry_after(
    node: Node, pushed: Reference, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_routes, "COMING_TIMEOUT", 0.1)
    proxy.hold = 1000
    status, headers, _ = ask(node, 0, pushed)
    assert status == 429 and headers["Retry-After"] == "1"
    proxy.release()


def test_a_client_that_does_not_read_loses_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_routes, "_STALL_TIMEOUT", 0.3)
    with running(tmp_path, limits=replace(LIMITS, uploads=2)) as (node,):
        slow = [hold(node), hold(node)]
        until(lambda: ask(node)[0] == 206)
        for each in slow:
            each.connection.close()


def test_a_disconnected_client_frees_its_slot(tmp_path: Path) -> None:
    with running(tmp_path, limits=ONE_UPLOAD) as (node,):
        for _ in range(3):
            slow = hold(node)
            slow.connection.close()
            slow.close()
        check(ask(node))


def test_requests_beyond_the_limit_are_refused(
    node: Node, pushed: Reference, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_routes, "MAX_REQUESTS", 2)
    proxy.hold = 1000
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, node, 0, pushed) for _ in range(2)]
        until(lambda: node.sharing.ranges._inside == 2)
        status, headers, _ = ask(node, 0, pushed)
        assert status == 429 and "Retry-After" not in headers
        proxy.release()
        for each in waiting:
            check(each.result(60))
    check(ask(node, 0, pushed))


def test_a_stalled_range_is_502(
    node: Node, pushed: Reference, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_routes, "COMING_TIMEOUT", 0.05)
    monkeypatch.setattr(range_routes, "_MAX_STALL", 0.0)
    proxy.hold = 1000
    assert ask(node, 0, pushed)[0] == 502
    proxy.release()


def test_a_range_is_sent_while_it_arrives(node: Node, pushed: Reference, proxy: Proxy) -> None:
    proxy.hold = RANGE // 2
    response = request(node, 0, pushed)
    with contextlib.closing(response.connection), response:
        assert response.status == 206
        assert response.read(RANGE // 4) == BLOB[: RANGE // 4]
        assert ask(node, 0, pushed, method="HEAD", **STORED)[0] == 200
        check_part(ask(node, 0, pushed, Range="bytes=5-9", **STORED), 5, 10)
        proxy.release()
        assert response.read() == BLOB[RANGE // 4 : RANGE]
    assert proxy.sent() == RANGE


def check_part(answer: Any, start: int, end: int) -> None:
    assert (answer[0], answer[2]) == (206, BLOB[start:end])


@pytest.mark.parametrize("stalls", [True, False])
def test_a_response_breaks_off_if_its_range_stops_arriving(
    node: Node, pushed: Reference, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    if stalls:
        monkeypatch.setattr(range_routes, "_STALL_TIMEOUT", 0.5)
    proxy.hold = RANGE // 2
    response = request(node, 0, pushed)
    with contextlib.closing(response.connection), response:
        assert response.read(RANGE // 4) == BLOB[: RANGE // 4]
        arrival = node.sharing.cache.find_arrival(BlobRange.at(CONTENT, 0))
        assert arrival is not None
        if not stalls:
            arrival.end(NetworkError("no more"))
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    proxy.release()


def test_ranges_of_a_running_pull_are_served(
    tmp_path: Path, pushed: Reference, proxy: Proxy
) -> None:
    connection = ClientOptions(
        docker_config=tmp_path, connections_override=1
    )  # one range after the other
    node = Node(tmp_path / "node", connection=connection).start()
    try:
        node.addresses.append("127.0.0.1:9")  # so that ranges are shared
        proxy.hold = RANGE + 1
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(node.pull, pushed)
            proxy.wait_until(lambda: proxy.held > 0)
            first = ask(node, 0, pushed, **STORED)
            found = [ask(node, n, pushed, method="HEAD", **STORED)[0] for n in range(3)]
            proxy.release()
            pulling.result(60)
        check(first)
        assert found == [200, 200, 404]  # the second is being fetched
        assert proxy.sent() <= 1.05 * len(BLOB)
    finally:
        node.stop()
