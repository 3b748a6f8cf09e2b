"""Pulls from a real registry through a faulty proxy.

test_resume.py has stalls, ignored and wrong ranges, repeated disconnects and damage on the
registry's disk, with a blob large enough for several connections.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    RegistryError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout, ingest
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository, download
from tests.process import Aimage
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import PASSWORD, USER, RealRegistry
from tests.scripted import skip_waiting

MIB = 1024 * 1024
BLOB = hashlib.shake_128(b"a blob that comes in pieces").digest(8 * MIB)
SIZE = len(BLOB)
BUFFERS = MIB  # bytes that may be in flight when a connection is abandoned
PATH = "tests/download-faults"
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
NOW = 1_800_000_000.0
DIGEST = str(Digest.of(BLOB))
CONFIG = Descriptor.of("application/vnd.example.config", b"{}")
LAYER = Descriptor.of("application/vnd.example.blob", BLOB)
MANIFEST = Manifest.parse(
    json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": CONFIG.to_json(),
            "layers": [LAYER.to_json()],
        }
    ).encode()
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


def publish(host: str, directory: Path) -> None:
    name = Reference.parse(f"{host}/{PATH}:v1")
    with Repository(name, ClientOptions(docker_config=directory)) as target:
        target.push(CONFIG, build_bytes_body(b"{}"))
        target.push(LAYER, build_bytes_body(BLOB))
        target.push(MANIFEST.descriptor, build_bytes_body(MANIFEST.raw), name)


@pytest.fixture(scope="module")
def published(registry: RealRegistry, tmp_path_factory: pytest.TempPathFactory) -> RealRegistry:
    publish(registry.host, tmp_path_factory.mktemp("docker"))
    return registry


@pytest.fixture
def proxy(published: RealRegistry) -> Iterator[Proxy]:
    with Proxy(published.host).running() as running:
        yield running


def layout_of(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "store")


def left_over(tmp_path: Path) -> list[Any]:
    """Return the remains of unfinished downloads."""
    return list((tmp_path / "store" / ".aimage" / "ingest").glob("*"))


def names(tmp_path: Path) -> list[Any]:
    return [name for name, _ in layout_of(tmp_path).list_tags()]


def pull(proxy: Proxy, tmp_path: Path, tail: str = ":v1", **options: Any) -> None:
    """Pull over one connection, so that the requests show what had arrived."""
    name = Reference.parse(f"{proxy.host}/{PATH}{tail}")
    with Repository(name, ClientOptions(docker_config=tmp_path, **options)) as source:
        copy(source, name, layout_of(tmp_path), concurrency=1)


def arrived(tmp_path: Path) -> None:
    layout = layout_of(tmp_path)
    assert layout.find_path(LAYER).read_bytes() == BLOB
    assert layout.find_path(MANIFEST.descriptor).read_bytes() == MANIFEST.raw
    assert left_over(tmp_path) == []


def is_big(passed: Passed) -> bool:
    return passed.is_blob and DIGEST in passed.path


def is_manifest(passed: Passed) -> bool:
    return "/manifests/" in passed.path


def first(condition: Any) -> Callable[[Any], bool]:
    """Return whether it is the first request that satisfies the condition."""
    found: list[int] = []

    def is_first(passed: Any) -> bool:
        if not found and condition(passed):
            found.append(passed.number)
        return passed.number in found

    return is_first


def starts(proxy: Proxy) -> list[Any]:
    """Return the start of each request for the blob."""
    spans = proxy.asked(DIGEST)
    return [int((span or "bytes=0-").removeprefix("bytes=").partition("-")[0]) for span in spans]


# -- disconnects


@pytest.mark.parametrize(
    ("at", "reset"), [(0, True), (1, False), (3 * MIB + 1, True), (SIZE - 1, False)]
)
def test_an_interrupted_body_is_resumed(at: int, reset: bool, proxy: Proxy, tmp_path: Path) -> None:
    breaks = first(is_big)
    proxy.cut, proxy.reset = lambda p: at if breaks(p) else None, reset
    pull(proxy, tmp_path)
    arrived(tmp_path)
    begin, again = starts(proxy)
    assert begin == 0
    assert again <= at if reset else again == at  # a reset discards unread bytes
    assert proxy.sent(DIGEST) == at + SIZE - again


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "short"])
def test_a_failed_pull_keeps_the_received_bytes(
    reset: bool, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four attempts without progress end the pull; the next pull requests the rest."""
    monkeypatch.setattr(ingest, "JOURNALED", MIB)  # large enough for a journal
    proxy.reset = reset
    proxy.cut = lambda p: (0 if p.range else 3 * MIB) if is_big(p) else None
    with pytest.raises(NetworkError):
        pull(proxy, tmp_path)
    assert names(tmp_path) == []
    assert len(left_over(tmp_path)) > 0
    kept = starts(proxy)[-1]
    mark, proxy.cut = len(proxy.seen), None
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert proxy.sent(DIGEST, since=mark) == SIZE - kept
    assert kept <= 3 * MIB if reset else kept == 3 * MIB


def test_a_dripping_connection_is_replaced(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rate is below any real network's: another connection continues at its offset."""
    monkeypatch.setattr(download, "_WINDOW", 0.2)
    monkeypatch.setattr(download, "_MIN_SPEED", 4 * MIB)
    proxy.pace = MIB / 2
    drips = first(is_big)

    def instead(passed: Any) -> None:
        if is_big(passed) and not drips(passed):
            proxy.pace = None

    proxy.instead = instead
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert len(starts(proxy)) == 2
    assert 0 < starts(proxy)[1] < 2 * MIB
    assert proxy.sent(DIGEST) <= SIZE + BUFFERS


def test_a_slow_connection_is_not_replaced(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_WINDOW", 0.1)
    proxy.pace = 16 * MIB
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert starts(proxy) == [0]
    assert proxy.sent(DIGEST) == SIZE


# -- ranges


def lying(span: str) -> Callable[[Any, Any], None]:
    """Return the treatment of the Content-Range header."""

    def change(passed: Any, reply: Any) -> None:
        if reply.status == 206:
            reply.headers["Content-Range"] = span

    return change


@pytest.mark.parametrize("span", [f"bytes 7-{SIZE - 1}/{SIZE}", ""])
def test_a_wrong_content_range_is_refused(span: str, proxy: Proxy, tmp_path: Path) -> None:
    """The blob is then read from the start, up to the current offset."""
    breaks = first(is_big)
    proxy.cut = lambda p: 3 * MIB if breaks(p) else None
    proxy.change = lying(span)
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert proxy.asked(DIGEST) == [None, f"bytes={3 * MIB}-{SIZE - 1}", None]
    assert proxy.sent(DIGEST) <= 3 * MIB + SIZE + BUFFERS


@pytest.mark.parametrize("ranges", ["ignored", "wrong", 416])
def test_a_refused_range_falls_back_to_the_whole_blob(
    ranges: str | int, proxy: Proxy, tmp_path: Path
) -> None:
    breaks = first(is_big)
    proxy.cut, proxy.ranges = lambda p: 3 * MIB if breaks(p) else None, ranges
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert proxy.sent(DIGEST) <= 3 * MIB + SIZE + BUFFERS


# -- error responses


@pytest.mark.parametrize("what", [is_manifest, is_big], ids=["manifest", "blob"])
def test_a_transient_error_is_retried(
    what: Callable[[Passed], bool], proxy: Proxy, tmp_path: Path
) -> None:
    fails = first(what)
    proxy.instead = lambda p: Reply(503) if fails(p) else None
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert len([p for p in proxy.seen if p.status == 503]) == 1
    assert proxy.sent(DIGEST) == SIZE


def test_a_transient_error_on_resumption_is_retried(proxy: Proxy, tmp_path: Path) -> Any:
    breaks, fails = first(is_big), first(lambda p: is_big(p) and p.range)
    proxy.cut = lambda p: 3 * MIB if breaks(p) else None
    proxy.instead = lambda p: Reply(500) if fails(p) else None
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert starts(proxy) == [0, 3 * MIB, 3 * MIB]
    assert proxy.sent(DIGEST) == SIZE


@pytest.mark.parametrize("what", [is_manifest, is_big], ids=["manifest", "blob"])
def test_retry_after_is_respected(
    what: Callable[[Passed], bool], proxy: Proxy, tmp_path: Path
) -> None:
    slept, now = [], [NOW]

    def sleep(seconds: Any) -> None:
        slept.append(seconds)
        now[0] += seconds

    fails = first(what)
    proxy.instead = lambda p: Reply(429, {"Retry-After": "17"}) if fails(p) else None
    pull(proxy, tmp_path, clock=lambda: now[0], sleep=sleep)
    arrived(tmp_path)
    assert slept[0] == 17 and sum(slept) < 17.1
    assert proxy.sent(DIGEST) == SIZE


@pytest.mark.parametrize(("status", "code"), [(401, 4), (404, 3), (500, 1), (507, 1), (None, 5)])
def test_exit_codes_of_a_failed_pull(
    status: int | None, code: int, proxy: Proxy, aimage: Callable[..., Aimage]
) -> None:
    def change(passed: Any, reply: Any) -> None:
        if is_big(passed):
            reply.body = reply.body[:-1] + b"?"

    proxy.change = change if status is None else None
    proxy.instead = lambda p: Reply(status) if status and is_big(p) else None
    here = aimage()
    err = here("pull", f"{proxy.host}/{PATH}:v1", code=code).err
    assert (str(status) if status else "digest mismatch") in err
    assert proxy.host in err or status is None
    assert [p for p in (here.store / ".aimage" / "ingest").glob("*") if p.stat().st_size] == []
    assert len(proxy.asked(DIGEST)) == (4 if status == 500 else 1)
    proxy.change = proxy.instead = None
    here("pull", f"{proxy.host}/{PATH}:v1")
    assert ImageLayout(here.store).find_path(LAYER).read_bytes() == BLOB


# -- wrong bytes


def test_wrong_bytes_of_the_right_length_are_discarded(proxy: Proxy, tmp_path: Path) -> None:
    """Nothing is kept, and the next pull starts from the beginning."""
    spoils = first(is_big)

    def change(passed: Any, reply: Any) -> None:
        if spoils(passed):
            reply.body = reply.body[: 5 * MIB] + b"?" + reply.body[5 * MIB + 1 :]

    proxy.change = change
    with pytest.raises(VerificationError, match="digest mismatch"):
        pull(proxy, tmp_path)
    assert proxy.sent(DIGEST) == SIZE
    assert left_over(tmp_path) == names(tmp_path) == []
    assert not layout_of(tmp_path).exists(LAYER)
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert proxy.sent(DIGEST) == 2 * SIZE


def test_wrong_bytes_after_a_disconnect_are_detected(proxy: Proxy, tmp_path: Path) -> None:
    """A wrong part is detected when the whole blob is verified."""
    breaks = first(is_big)
    proxy.cut = lambda p: 3 * MIB if breaks(p) else None

    def change(passed: Any, reply: Any) -> None:
        if passed.range:
            reply.body = bytes(len(reply.body))

    proxy.change = change
    with pytest.raises(VerificationError, match="digest mismatch"):
        pull(proxy, tmp_path)
    assert proxy.sent(DIGEST) == SIZE
    assert left_over(tmp_path) == []


def test_a_compressed_blob_of_the_same_size_is_not_decompressed(
    proxy: Proxy, tmp_path: Path
) -> None:
    """Servers label blobs that are compressed files; the digest covers the exact bytes."""

    def change(passed: Any, reply: Any) -> None:
        if is_big(passed):
            reply.headers["Content-Encoding"] = "gzip"
            reply.put(gzip.compress(BLOB, 1)[:SIZE].ljust(SIZE, b"\0"))

    proxy.change = change
    with pytest.raises(VerificationError, match="digest mismatch"):
        pull(proxy, tmp_path)
    assert proxy.sent(DIGEST) == SIZE
    assert left_over(tmp_path) == []


def for_manifests(alter: Any) -> Callable[[Any, Any], Any]:
    return lambda passed, reply: alter(reply) if is_manifest(passed) else None


def shorter(reply: Any) -> None:
    reply.put(reply.body[:-20])


def longer(reply: Any) -> None:
    reply.put(reply.body + b" ")


def says_less(reply: Any) -> None:
    reply.headers["Content-Length"] = str(len(reply.body) - 20)


def says_more(reply: Any) -> None:
    reply.headers |= {"Content-Length": str(len(reply.body) + 20), "Connection": "close"}


def endless(reply: Any) -> None:
    reply.put(reply.body + b" " * 5 * MIB)


def packed(reply: Any) -> None:
    reply.headers["Content-Encoding"] = "gzip"
    reply.put(gzip.compress(reply.body + b" " * 20 * MIB))


def other_kind(reply: Any) -> None:
    reply.headers["Content-Type"] = "application/vnd.oci.image.index.v1+json"


BY_DIGEST = f"@{MANIFEST.descriptor.digest}"


@pytest.mark.parametrize(
    ("alter", "error", "said", "tail"),
    [
        (shorter, VerificationError, "sent sha256", ":v1"),
        (longer, VerificationError, "sent sha256", BY_DIGEST),
        (says_less, VerificationError, "sent sha256", ":v1"),
        (endless, VerificationError, "exceeds", BY_DIGEST),
        (packed, VerificationError, "exceeds", ":v1"),
        (says_more, NetworkError, "ended early", BY_DIGEST),
        (other_kind, FormatError, "image.manifest", ":v1"),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_a_wrong_manifest_fetches_nothing(
    alter: Callable[[Any], None],
    error: type[AImageError],
    said: str,
    tail: str,
    proxy: Proxy,
    tmp_path: Path,
) -> None:
    """Longer or shorter than declared, compressed, or with another digest."""
    proxy.change = for_manifests(alter)
    with pytest.raises(error, match=said):
        pull(proxy, tmp_path, tail)
    assert proxy.sent() == 0
    assert left_over(tmp_path) == names(tmp_path) == []
    asked = [p for p in proxy.seen if is_manifest(p)]
    assert len(asked) == (4 if alter is says_more else 1)
    assert max(p.sent for p in asked) <= 5 * MIB + len(MANIFEST.raw)


@pytest.mark.parametrize("more", [-1, 1 << 40])
def test_a_manifest_of_another_size_than_in_its_index_is_refused(
    more: int, published: RealRegistry, proxy: Proxy, tmp_path: Path
) -> None:
    entry = MANIFEST.descriptor.to_json() | {"size": len(MANIFEST.raw) + more}
    kind = "application/vnd.oci.image.index.v1+json"
    document = {"schemaVersion": 2, "mediaType": kind, "manifests": [entry]}
    raw = json.dumps(document).encode()
    name = Reference.parse(f"{published.host}/{PATH}:index")
    with Repository(name, ClientOptions(docker_config=tmp_path)) as target:
        target.push(Descriptor(kind, Digest.of(raw), len(raw)), build_bytes_body(raw), name)
    with pytest.raises(VerificationError):
        pull(proxy, tmp_path, ":index")
    assert proxy.sent() == 0
    assert left_over(tmp_path) == names(tmp_path) == []


# -- credentials and redirects


class Tokens:
    """A token service and its check in a proxy; tokens are valid until ``revoke()``."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.good: set[Any]
        self.good, self.count = set(), 0
        self.body = lambda token: Reply(200, {}, json.dumps({"token": token}).encode())
        proxy.instead = self

    def __call__(self, passed: Any) -> Reply | None:
        if passed.path.startswith("/token"):
            self.count += 1
            self.good.add(f"t0k3n-{self.count}")
            return self.body(f"t0k3n-{self.count}")
        if passed.headers.get("Authorization", "").removeprefix("Bearer ") in self.good:
            return None
        realm = f'Bearer realm="http://{self.proxy.host}/token",service="test"'
        return Reply(401, {"WWW-Authenticate": realm})


def test_a_token_that_expires_during_a_download_is_renewed(proxy: Proxy, tmp_path: Path) -> None:
    """Received bytes are kept, and the rest is requested with a new token."""
    tokens = Tokens(proxy)
    breaks = first(is_big)

    def cut(passed: Any) -> int | None:
        if breaks(passed) and passed.sent >= 3 * MIB:
            tokens.good.clear()
        return 3 * MIB if breaks(passed) else None

    proxy.cut = cut
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert tokens.count == 2
    assert starts(proxy) == [0, 3 * MIB, 3 * MIB]  # refused, then accepted
    assert proxy.sent(DIGEST) == SIZE


def test_a_compressed_token_response_is_decompressed_to_the_limit(
    proxy: Proxy, tmp_path: Path
) -> None:
    tokens = Tokens(proxy)
    bomb = gzip.compress(b'{"token": "' + b"x" * 20 * MIB + b'"}')
    tokens.body = lambda token: Reply(200, {"Content-Encoding": "gzip"}, bomb)
    with pytest.raises(VerificationError, match="exceeds"):
        pull(proxy, tmp_path)
    assert proxy.sent() == 0
    assert left_over(tmp_path) == []


@pytest.fixture
def content_network(
    private_registry: RealRegistry, tmp_path: Path
) -> Iterator[tuple[Proxy, Proxy]]:
    """Return a registry with a password, and the CDN of its blobs without one."""
    (tmp_path / "config.json").write_text(
        json.dumps({"auths": {private_registry.host: {"auth": BASIC}}})
    )
    publish(private_registry.host, tmp_path)
    with (
        Proxy(private_registry.host).running() as proxy,
        Proxy(private_registry.host).running() as cdn,
    ):
        (tmp_path / "config.json").write_text(json.dumps({"auths": {proxy.host: {"auth": BASIC}}}))
        cdn.adds = {"Authorization": f"Basic {BASIC}"}
        there = cdn.host.replace("127.0.0.1", "localhost")

        def instead(passed: Any) -> Reply | None:
            if passed.is_blob and "Authorization" in passed.headers:
                return Reply(307, {"Location": f"http://{there}{passed.path}?sig=s1gnature"})
            return None

        proxy.instead = instead
        yield proxy, cdn


def test_blobs_are_fetched_from_a_cdn(content_network: tuple[Proxy, Proxy], tmp_path: Path) -> None:
    """The CDN gets the range without the password; every request starts at the registry."""
    proxy, cdn = content_network
    breaks = first(is_big)
    cdn.cut = lambda p: 3 * MIB if breaks(p) else None
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert cdn.asked(DIGEST) == proxy.asked(DIGEST)[-2:] == [None, f"bytes={3 * MIB}-{SIZE - 1}"]
    assert cdn.sent(DIGEST) == SIZE
    assert proxy.sent() == 0
    usual = {"host", "user-agent", "accept", "accept-encoding", "connection", "range"}
    for passed in cdn.seen:
        assert {name.lower() for name in passed.headers} <= usual
        assert BASIC not in "".join(passed.headers.values())


def test_an_expired_cdn_signature_fails(
    content_network: tuple[Proxy, Proxy], tmp_path: Path
) -> None:
    """A 403 of the CDN is not reported as the registry's."""
    proxy, cdn = content_network
    cdn.instead = lambda p: Reply(403, {}, b"<Error>ExpiredToken</Error>")
    with pytest.raises(Exception, match="localhost") as raised:
        pull(proxy, tmp_path)
    assert "s1gnature" not in str(raised.value)
    assert "s1gnature" not in str(getattr(raised.value, "hint", ""))


def test_a_failing_cdn_is_retried(content_network: tuple[Proxy, Proxy], tmp_path: Path) -> None:
    proxy, cdn = content_network
    fails = first(is_big)
    cdn.instead = lambda p: Reply(503) if fails(p) else None
    pull(proxy, tmp_path)
    arrived(tmp_path)
    assert cdn.sent(DIGEST) == SIZE


def test_endless_redirects_fail(proxy: Proxy, tmp_path: Path) -> None:
    def instead(passed: Any) -> Reply | None:
        return Reply(307, {"Location": passed.path}) if is_big(passed) else None

    proxy.instead = instead
    with pytest.raises((NetworkError, RegistryError), match="redirects"):
        pull(proxy, tmp_path)
    assert len(proxy.asked(DIGEST)) <= 6
    assert proxy.sent(DIGEST) == 0
