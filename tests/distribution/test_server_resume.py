"""aimage pushes to ``registry serve`` over connections that break."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import NetworkError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository, retry, upload
from tests.distribution.served import Server
from tests.proxy import Passed, Proxy, Reply

MIB = 1024 * 1024
SIZE = 24 * MIB
BUFFERS = MIB  # bytes that the proxy had and the server had not, when a connection broke


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays; the server needs a moment to detect a broken connection."""
    defaults = retry.retry_call.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "sleep", lambda _: time.sleep(0.02))


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.url.removeprefix("http://")).running() as running:
        yield running


@pytest.fixture
def push(
    proxy: Proxy, server: Server, request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[], list[int]]:
    """Push one large new blob to the server; return the reported progress."""
    content = hashlib.shake_128(request.node.name.encode()).digest(SIZE)
    config = Descriptor.of("application/vnd.example.config", b"{}")
    blob = Descriptor.of("application/vnd.example.blob", content)
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config.to_json(),
        "layers": [blob.to_json()],
    }
    manifest = Manifest.parse(json.dumps(document).encode())
    layout = ImageLayout(tmp_path / "store")
    here = Reference(None, "x", "v1")
    layout.push(config, build_bytes_body(b"{}"))
    layout.push(blob, build_bytes_body(content))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), here)

    def run() -> list[int]:
        counts: list[int] = []

        def on_event(event: Any) -> None:
            if event.kind == "progress" and event.content == blob:
                counts.append(event.count)

        name = Reference.parse(f"{proxy.host}/resume/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as target:
            copy(layout, here, target, name, concurrency=1, on_event=on_event)
        kept = server.root / "blobs" / "sha256" / blob.digest.encoded
        assert kept.read_bytes() == content
        assert sum(counts) == max(sum(counts[: i + 1]) for i in range(len(counts))) == SIZE
        return counts

    return run


def is_big(passed: Passed) -> bool:
    return passed.is_upload and int(passed.headers.get("Content-Length") or 0) > MIB // 2


def begun(proxy: Proxy) -> int:
    """Return the uploads started up to the last byte of the large blob."""
    end = max(passed.number for passed in proxy.uploads() if is_big(passed))
    return len([passed for passed in proxy.uploads("POST") if passed.number < end])


def steps(proxy: Proxy) -> list[tuple[str, int, int]]:
    return [(passed.method, passed.status, passed.received) for passed in proxy.seen]


def bodies(proxy: Proxy) -> list[int]:
    return [passed.received for passed in proxy.uploads() if is_big(passed)]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_broken_body_is_resumed(
    method: str, proxy: Proxy, push: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GET on the upload's location returns the bytes that the server received."""
    if method == "PATCH":
        monkeypatch.setattr(upload, "RESUMABLE", 8 * MIB)
        monkeypatch.setattr(upload, "LARGEST_PUT", 8 * MIB)
    first: list[int] = []

    def lost(passed: Passed) -> int | None:
        if is_big(passed) and not first:
            first.append(passed.number)
        return 9 * MIB if passed.number in first else None

    proxy.lost = lost
    push()
    broken, *rest = [passed for passed in proxy.uploads() if is_big(passed)]
    assert broken.received == 9 * MIB
    # while still writing, the server reported a smaller offset, and then refused it
    assert {passed.status for passed in rest[:-1]} <= {416}, steps(proxy)
    assert rest[-1].status in (201, 202)
    assert SIZE - 9 * MIB <= rest[-1].received <= SIZE - 9 * MIB + BUFFERS
    assert [passed.status for passed in proxy.uploads("GET")] == [204] * len(rest)
    assert begun(proxy) == 1


def test_push_succeeds_over_connections_that_always_break(
    proxy: Proxy, push: Callable[[], object]
) -> None:
    """Twelve chunks over connections of 2 MiB each: every attempt makes progress."""
    proxy.lost = lambda passed: 2 * MIB if is_big(passed) else None
    push()
    assert len(bodies(proxy)) >= 12


def test_push_fails_without_progress(proxy: Proxy, push: Callable[[], object]) -> None:
    proxy.lost = lambda passed: 0 if is_big(passed) else None
    with pytest.raises(NetworkError, match=r"connection to .* lost"):
        push()
    # Two bodies of 24, 6 and 1.5 MiB, and three of the smallest size
    assert bodies(proxy) == [0] * 9


def test_smaller_chunks_are_sent_when_one_is_too_large(
    proxy: Proxy, push: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FIRST_CHUNK", 8 * MIB)
    proxy.instead = lambda p: (
        Reply(413, after=0) if int(p.headers.get("Content-Length") or 0) > 8 * MIB else None
    )
    push()
    assert bodies(proxy) == [0, 8 * MIB, 8 * MIB, 8 * MIB]
