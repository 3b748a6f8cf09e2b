"""Pushes of one large blob to a real registry through a faulty proxy.

docker-registry 2.8 keeps the bytes of a request that broke off, but refuses to continue after
them: its real offset then differs from the reported one. It does continue an upload at an
offset that a response reported, as behind a proxy that buffers whole requests.
``aimage registry serve`` always continues: see tests/distribution.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import (
    RegistryError,
    UnauthorizedError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.registry import (
    ClientOptions,
    MountOrigins,
    Repository,
    session,
    transport,
    upload,
)
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.retry import ATTEMPTS
from tests.process import Aimage
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import PASSWORD, USER, RealRegistry
from tests.scripted import skip_waiting

if TYPE_CHECKING:
    from clowder_aimage.content.copy_option import CopyEvent


UNIT = 256 * 1024
SIZE = 24 * UNIT
BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 8, 2 and 1 units in place of 64, 16, 4 and 1 MiB."""
    monkeypatch.setattr(upload, "FIRST_CHUNK", 8 * UNIT)
    monkeypatch.setattr(upload, "SMALLEST_CHUNK", UNIT)


@dataclass
class Store:
    """A layout with one artifact, whose large blob is in no registry."""

    layout: ImageLayout
    manifest: Manifest
    blob: Descriptor
    content: bytes = field(repr=False)
    counts: list[int] = field(default_factory=list)

    def push(
        self, name: Reference, connection: ClientOptions, origins: MountOrigins | None = None
    ) -> None:
        """Push in this process; record the totals of progress events."""

        def on_event(event: CopyEvent) -> None:
            if (
                event.kind == "progress"
                and event.content
                and event.content.digest == self.blob.digest
            ):
                self.counts.append(event.count)

        here = Reference(None, "x", "v1")
        with Repository(name, connection, origins) as target:
            copy(self.layout, here, target, name, concurrency=1, on_event=on_event)

    def most(self) -> int:
        """Return the highest number of bytes reported as sent."""
        return max(sum(self.counts[: i + 1]) for i in range(len(self.counts)))


@pytest.fixture
def local(tmp_path: Path, repository: str) -> Store:
    """Return a store with a blob unique to the test: the registry shares blobs across tests."""
    content = hashlib.shake_128(repository.encode()).digest(SIZE)
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
    layout.push(config, build_bytes_body(b"{}"))
    layout.push(blob, build_bytes_body(content))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference(None, "x", "v1"))
    return Store(layout, manifest, blob, content)


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


@dataclass
class Way:
    """The connection to the proxy."""

    proxy: Proxy
    path: str
    connection: ClientOptions

    @property
    def name(self) -> Reference:
        return Reference.parse(f"{self.proxy.host}/{self.path}:v1")


@pytest.fixture(params=["kernel", "tls"])
def way(
    request: pytest.FixtureRequest, registry: RealRegistry, repository: str, tmp_path: Path
) -> Iterator[Way]:
    """With plain HTTP the kernel sends the file; with TLS it is read and encrypted."""
    path = repository.partition("/")[2]
    options: dict[str, Any] = {"docker_config": tmp_path}
    proxy = Proxy(registry.host)
    if request.param == "tls":
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        proxy.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("0.0.0.0").configure_cert(proxy.tls)  # noqa: S104
        options["ca_file"] = tmp_path / "ca.pem"
    with proxy.running():
        if request.param == "tls":  # an address that requires TLS
            proxy.host = proxy.host.replace("127.0.0.1", "0.0.0.0")  # noqa: S104
        yield Way(proxy, path, ClientOptions(**options))


@pytest.fixture
def plain(proxy: Proxy, repository: str, tmp_path: Path) -> Way:
    """Use plain HTTP where TLS makes no difference."""
    return Way(proxy, repository.partition("/")[2], ClientOptions(docker_config=tmp_path))


def is_big(passed: Passed) -> bool:
    """Return whether a request carries the large blob or a chunk of it."""
    return passed.is_upload and int(passed.headers.get("Content-Length") or 0) > UNIT // 2


def first(condition: Callable[[Passed], bool], count: int = 1) -> Callable[[Any], bool]:
    """Return whether it is one of the first ``count`` requests that satisfy the condition."""
    found: list[int] = []

    def is_first(passed: Any) -> bool:
        if passed.number not in found and len(found) < count and condition(passed):
            found.append(passed.number)
        return passed.number in found

    return is_first


def bodies(proxy: Proxy) -> list[Any]:
    """Return the bytes received in each request for the large blob."""
    return [p.received for p in proxy.uploads() if is_big(p)]


def steps(proxy: Proxy) -> list[Any]:
    """Return the requests of the large blob's upload, with their statuses."""
    (begin, *_) = [p.number for p in proxy.uploads() if is_big(p)]
    return [(p.method, p.status) for p in proxy.seen[begin:] if "/blobs/" in p.path]


def arrived(local: Store, registry: RealRegistry, way: Way) -> None:
    """Verify the blob's bytes, the reported progress, and that the local store is unchanged."""
    assert registry.blob(way.path, local.blob.digest) == local.content
    with Repository(way.name, way.connection) as there:
        assert there.resolve(way.name).digest == local.manifest.descriptor.digest
    assert sum(local.counts) == local.most() == SIZE
    assert list((local.layout.root / ".aimage" / "ingest").glob("*")) == []


# -- disconnects


def test_a_broken_put_restarts_when_the_registry_lost_the_upload(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """The offset query reports an unknown upload, and the blob is sent in a new one."""
    breaks = first(is_big)
    plain.proxy.lost = lambda passed: 9 * UNIT if breaks(passed) else None
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [9 * UNIT, SIZE]
    assert steps(plain.proxy)[:2] == [("PUT", 0), ("GET", 404)]


@pytest.mark.parametrize("buffers", [False, True], ids=["passing", "buffering"])
def test_an_interrupted_patch_is_restarted(
    buffers: bool, local: Store, registry: RealRegistry, plain: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large blob is sent by PATCH; this registry loses a broken one."""
    monkeypatch.setattr(upload, "RESUMABLE", 8 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 8 * UNIT)
    breaks = first(is_big)
    plain.proxy.buffers = buffers
    plain.proxy.lost = lambda passed: 9 * UNIT if breaks(passed) else None
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [9 * UNIT, SIZE]
    assert steps(plain.proxy)[:2] == [("PATCH", 0), ("GET", 204 if buffers else 404)]
    assert ("PATCH", 202) in steps(plain.proxy)


@pytest.mark.usefixtures("small")
def test_a_broken_chunk_continues_at_the_registry_s_offset(
    local: Store, registry: RealRegistry, way: Way
) -> None:
    """Only the bytes that the proxy did not forward are sent again."""
    way.proxy.buffers = True
    refuse(way.proxy, 8 * UNIT)
    breaks = first(lambda p: p.method == "PATCH" and f"{8 * UNIT}-" in p.headers["Content-Range"])
    way.proxy.lost = lambda passed: 5 * UNIT if breaks(passed) else None
    local.push(way.name, way.connection)
    arrived(local, registry, way)
    assert bodies(way.proxy) == [0, 8 * UNIT, 5 * UNIT, 8 * UNIT, 8 * UNIT]
    assert ("GET", 204) in steps(way.proxy)
    assert ("GET", 404) not in steps(way.proxy)


@pytest.mark.usefixtures("small")
def test_a_push_with_progress_on_each_attempt_succeeds(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """Every chunk breaks twice, of any size, more often than attempts without progress may fail."""
    plain.proxy.buffers = True
    refuse(plain.proxy, 2 * UNIT)
    broken: dict[str, list[int]] = {}

    def lost(passed: Any) -> int | None:
        span = passed.headers.get("Content-Range", "")
        broken.setdefault(span, [])
        if span and passed.number not in broken[span]:
            broken[span].append(passed.number)
        half = int(passed.headers.get("Content-Length", 0)) // 2
        return half if span and passed.number in broken[span][:2] else None

    plain.proxy.lost = lost
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert sum(len(numbers[:2]) for numbers in broken.values()) > 3 * ATTEMPTS


def test_a_push_without_progress_fails(
    local: Store, plain: Way, aimage: Callable[..., Aimage]
) -> None:
    plain.proxy.lost = lambda passed: 3 * UNIT if is_big(passed) else None
    here = aimage("store")
    here("tag", "x:v1", plain.name)
    err = here("push", plain.name, code=1).err
    # Two bodies of 6 and 1.5 MiB, and three of the smallest size
    assert bodies(plain.proxy) == [3 * UNIT] * 7
    assert f"connection to {plain.proxy.host} lost" in err
    assert "try again" in err
    assert not [p for p in plain.proxy.seen if p.method == "PUT" and "/manifests/" in p.path]


def test_a_lost_final_response_does_not_repeat_the_upload(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """The blob exists and the upload does not: nothing is sent again."""
    loses = first(is_big)

    def change(passed: Any, reply: Any) -> None:
        if loses(passed):
            reply.status, reply.headers = 504, {"Content-Length": "0"}

    plain.proxy.change = change
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [SIZE]
    assert steps(plain.proxy)[:3] == [("PUT", 504), ("GET", 404), ("HEAD", 200)]


def test_a_stalled_registry_is_waited_for(
    local: Store, registry: RealRegistry, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be busy with received bytes, so the upload is not restarted."""
    monkeypatch.setattr(session, "CONNECT_TIMEOUT", 0.2)
    rests = first(lambda p: is_big(p) and p.received >= UNIT)
    rested: list[Passed] = []

    def lull(passed: Any) -> float:
        if rests(passed) and not rested:
            rested.append(passed)
            return 0.6
        return 0.0

    way.proxy.lull = lull
    local.push(way.name, way.connection)
    assert rested
    arrived(local, registry, way)
    assert bodies(way.proxy) == [SIZE]


def test_a_permanently_stalled_connection_is_replaced(
    local: Store, registry: RealRegistry, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection is tried after the timeout."""
    monkeypatch.setattr(transport, "SEND_TIMEOUT", 2.0, raising=False)
    stands = first(lambda p: is_big(p) and p.received >= UNIT)
    way.proxy.lull = lambda passed: math.inf if stands(passed) else 0.0
    local.push(way.name, way.connection)
    arrived(local, registry, way)
    (stood, whole) = bodies(way.proxy)
    assert UNIT <= stood < 2 * UNIT
    assert whole == SIZE


# -- error responses


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
def test_a_transient_error_is_retried(
    method: str, local: Store, registry: RealRegistry, plain: Way
) -> None:
    fails = first(
        lambda p: p.method == method and "/blobs/" in p.path and (method != "PUT" or is_big(p))
    )
    plain.proxy.instead = lambda passed: Reply(503) if fails(passed) else None
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert len([p for p in plain.proxy.seen if p.status == 503]) == 1
    assert bodies(plain.proxy) == ([SIZE, SIZE] if method == "PUT" else [SIZE])


@pytest.mark.usefixtures("small")
def test_a_transient_error_on_a_chunk_is_retried(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """Only that chunk is sent again."""
    refuse(plain.proxy, 8 * UNIT)
    inner = plain.proxy.instead
    assert inner is not None
    fails = first(lambda p: p.method == "PATCH" and f"{8 * UNIT}-" in p.headers["Content-Range"])
    plain.proxy.instead = lambda p: Reply(500) if fails(p) else inner(p)
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [0, 8 * UNIT, 8 * UNIT, 8 * UNIT, 8 * UNIT]


@pytest.mark.usefixtures("small")
def test_a_transient_error_on_the_offset_query_is_retried(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """Received bytes are not discarded."""
    plain.proxy.buffers = True
    refuse(plain.proxy, 8 * UNIT)
    inner = plain.proxy.instead
    assert inner is not None
    breaks = first(lambda p: p.method == "PATCH" and f"{8 * UNIT}-" in p.headers["Content-Range"])
    plain.proxy.lost = lambda passed: UNIT if breaks(passed) else None
    fails = first(lambda p: p.method == "GET" and p.is_upload and plain.proxy.received() > 8 * UNIT)
    plain.proxy.instead = lambda p: Reply(500) if fails(p) else inner(p)
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert ("GET", 500) in steps(plain.proxy)
    assert bodies(plain.proxy) == [0, 8 * UNIT, UNIT, 8 * UNIT, 8 * UNIT]


def test_retry_after_is_respected(local: Store, registry: RealRegistry, plain: Way) -> None:
    slept, now = [], [NOW]

    def sleep(seconds: Any) -> None:
        slept.append(seconds)
        now[0] += seconds

    fails = first(is_big)
    plain.proxy.instead = lambda p: (
        Reply(429, {"Retry-After": "17"}, after=UNIT) if fails(p) else None
    )
    plain.connection = ClientOptions(
        docker_config=plain.connection.docker_config, clock=lambda: now[0], sleep=sleep
    )
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert slept[0] == 17 and sum(slept) < 17.1
    assert sum(bodies(plain.proxy)) <= SIZE + UNIT


@pytest.mark.parametrize("abruptly", [False, True], ids=["peaceful", "abrupt"])
def test_an_error_response_during_the_body_is_read(abruptly: bool, local: Store, way: Way) -> None:
    body = json.dumps({"errors": [{"code": "DENIED", "message": "not for you"}]}).encode()
    way.proxy.instead = lambda p: (
        Reply(403, {}, body, after=UNIT, abruptly=abruptly) if is_big(p) else None
    )
    said = "403" if abruptly else "403 DENIED not for you"  # a reset may discard the rest
    with pytest.raises(UnauthorizedError, match=said):
        local.push(way.name, way.connection)
    assert bodies(way.proxy) == [UNIT]
    assert not [p for p in way.proxy.seen if p.method == "PUT" and "/manifests/" in p.path]


# -- too large


def refuse(proxy: Proxy, limit: int) -> None:
    """Make the proxy refuse bodies of more than ``limit`` bytes at once, like nginx."""
    proxy.instead = lambda p: (
        Reply(413, after=0)
        if p.is_upload and int(p.headers.get("Content-Length") or 0) > limit
        else None
    )


@pytest.mark.parametrize(("limit", "piece"), [(3 * UNIT, 2), (UNIT, 1)])
@pytest.mark.usefixtures("small")
def test_smaller_chunks_are_sent_when_one_is_too_large(
    limit: int, piece: int, local: Store, registry: RealRegistry, plain: Way
) -> None:
    refuse(plain.proxy, limit)
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    taken = [p.received for p in plain.proxy.uploads() if is_big(p) and p.status in (201, 202)]
    assert taken == [piece * UNIT] * (SIZE // (piece * UNIT))
    refused = [p.headers["Content-Length"] for p in plain.proxy.uploads() if p.status == 413]
    assert [int(size) // UNIT for size in refused] == [s for s in (24, 8, 2) if s > piece]
    assert sum(bodies(plain.proxy)) == SIZE


@pytest.mark.usefixtures("small")
def test_a_registry_that_refuses_every_chunk_size_fails(
    local: Store, plain: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(plain.proxy, 1000)
    with pytest.raises(RegistryError, match="413"):
        local.push(plain.name, plain.connection)
    assert plain.proxy.received() == 0


# -- credentials and locations


class Tokens:
    """A token service and its check in a proxy; tokens are valid until ``revoke()``."""

    def __init__(self, proxy: Proxy, then: Callable[[Any], None] = lambda passed: None) -> None:
        self.proxy = proxy
        self.then: Callable[[Passed], Reply | None] = then
        self.good: set[Any]
        self.good, self.count = set(), 0
        proxy.instead = self

    def __call__(self, passed: Any) -> Reply | None:
        if passed.path.startswith("/token"):
            self.count += 1
            token = f"t0k3n-{self.count}"
            self.good.add(token)
            return Reply(200, {}, json.dumps({"token": token}).encode())
        early = self.then(passed)
        if passed.headers.get("Authorization", "").removeprefix("Bearer ") in self.good:
            return early
        realm = f'Bearer realm="http://{self.proxy.host}/token",service="test"'
        return Reply(401, {"WWW-Authenticate": realm}, after=UNIT)

    def revoke(self) -> None:
        self.good.clear()


def test_a_token_that_expires_before_the_body_is_renewed(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """The 401 arrives during the body, and the upload continues with a new token."""
    tokens = Tokens(plain.proxy)
    expires = first(is_big)
    tokens.then = lambda passed: tokens.revoke() if expires(passed) else None
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [UNIT, SIZE]
    assert tokens.count >= 2


@pytest.mark.usefixtures("small")
def test_a_token_that_expires_between_two_chunks_is_renewed(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """Received bytes are kept; only the refused chunk is sent again."""
    tokens = Tokens(plain.proxy)
    expires = first(lambda p: f"{16 * UNIT}-" in p.headers.get("Content-Range", ""))

    def then(passed: Passed) -> Reply | None:
        if expires(passed):
            tokens.revoke()
        if passed.is_upload and int(passed.headers.get("Content-Length") or 0) > 8 * UNIT:
            return Reply(413, after=0)
        return None

    tokens.then = then
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [0, 8 * UNIT, 8 * UNIT, UNIT, 8 * UNIT]


def private(aimage_home: Path, proxy: Proxy) -> None:
    """Return a docker config with the password of the registry behind a proxy."""
    (aimage_home / "config.json").write_text(json.dumps({"auths": {proxy.host: {"auth": BASIC}}}))


def test_a_401_during_an_upload_is_retried(
    local: Store, private_registry: RealRegistry, repository: str, tmp_path: Path
) -> None:
    """The registry challenges once more, and receives the credentials and the blob."""
    with Proxy(private_registry.host).running() as proxy:
        way = Way(proxy, repository.partition("/")[2], ClientOptions(docker_config=tmp_path))
        private(tmp_path, proxy)
        fails = first(is_big)
        basic = {"WWW-Authenticate": 'Basic realm="test"'}
        proxy.instead = lambda p: (
            Reply(401, basic, after=5 * UNIT, abruptly=True) if fails(p) else None
        )
        local.push(way.name, way.connection)
        arrived(local, private_registry, way)
    assert bodies(proxy) == [5 * UNIT, SIZE]


def test_a_repeated_401_fails(
    local: Store,
    private_registry: RealRegistry,
    repository: str,
    aimage: Callable[..., Aimage],
    tmp_path: Path,
) -> None:
    """The error is reported as one of credentials."""
    with Proxy(private_registry.host).running() as proxy:
        here = aimage("store")
        (tmp_path / "docker").mkdir()
        private(tmp_path / "docker", proxy)
        name = f"{proxy.host}/{repository.partition('/')[2]}:v1"
        basic = {"WWW-Authenticate": 'Basic realm="test"'}
        proxy.instead = lambda p: Reply(401, basic, after=UNIT) if is_big(p) else None
        here("tag", "x:v1", name)
        assert "credentials" in here("push", name, code=4).err
    assert set(bodies(proxy)) == {UNIT}
    assert len(bodies(proxy)) <= 4


def test_a_relative_location_is_followed(local: Store, registry: RealRegistry, plain: Way) -> None:
    def change(passed: Any, reply: Any) -> None:
        if reply.headers.get("Location"):
            reply.headers["Location"] = "/" + reply.headers["Location"].split("/", 3)[3]

    plain.proxy.change = change
    local.push(plain.name, plain.connection)
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [SIZE]


@pytest.mark.usefixtures("small")
def test_a_location_on_another_host_gets_no_password(
    local: Store, private_registry: RealRegistry, repository: str, tmp_path: Path
) -> None:
    """Bodies and offset queries go to the other host, without our password."""
    with (
        Proxy(private_registry.host).running() as proxy,
        Proxy(private_registry.host, buffers=True).running() as other,
    ):
        private(tmp_path, proxy)
        settings = {proxy.host: HostSettings(trusted_hosts=frozenset({"localhost"}))}
        connection = ClientOptions(docker_config=tmp_path, registries=settings)
        way = Way(proxy, repository.partition("/")[2], connection)
        other.adds = {"Authorization": f"Basic {BASIC}"}  # the location itself authorises the write
        refuse(other, 8 * UNIT)
        breaks = first(lambda p: p.method == "PATCH")
        other.lost = lambda p: UNIT if breaks(p) else None
        there = other.host.replace("127.0.0.1", "localhost")

        def change(passed: Any, reply: Any) -> None:
            if passed.method == "POST" and passed.status == 0:
                reply.headers["Location"] = reply.headers.get("Location", "").replace(
                    proxy.host, there
                )

        proxy.change = change
        local.push(way.name, way.connection)
        arrived(local, private_registry, way)
    assert proxy.received() == 0
    assert {p.method for p in other.seen} == {"GET", "PATCH", "PUT"}
    assert not [p for p in other.seen if "Authorization" in p.headers]
    assert [p for p in proxy.seen if "Authorization" in p.headers]


def test_a_202_response_to_a_mount_is_used_as_the_upload(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """The real registry answers 202, and no second POST is sent."""
    local.push(plain.name, plain.connection, MountOrigins(lambda digest: ["tests/never-was"]))
    arrived(local, registry, plain)
    assert bodies(plain.proxy) == [SIZE]
    posts = [p for p in plain.proxy.seen if p.method == "POST"]
    assert {(p.status, "mount=" in p.path) for p in posts} == {(202, True)}
    assert len(posts) == 2  # and the config


# -- damaged local blobs


def spoil(local: Store, change: Any) -> None:
    path = local.layout.find_path(local.blob)
    path.chmod(0o644)
    path.write_bytes(change(local.content))


def test_a_damaged_blob_is_not_tagged(local: Store, registry: RealRegistry, way: Way) -> None:
    """The registry detects it and keeps nothing, and the error names the local copy."""
    spoil(local, lambda content: content[: 5 * UNIT] + b"?" + content[5 * UNIT + 1 :])
    with pytest.raises(VerificationError, match="digest mismatch") as raised:
        local.push(way.name, way.connection)
    assert raised.value.exit_code == 5
    assert registry.blob(way.path, local.blob.digest) is None
    assert not [p for p in way.proxy.seen if p.method == "PUT" and "/manifests/" in p.path]
    assert way.proxy.received() <= SIZE + 2


@pytest.mark.parametrize(
    "change", [lambda content: content[:-1], lambda content: content + b"?"], ids=["cut", "grown"]
)
def test_a_blob_of_another_size_is_not_sent(
    change: Callable[[Any], Any], local: Store, registry: RealRegistry, plain: Way
) -> None:
    spoil(local, change)
    with pytest.raises(VerificationError, match=f"expected {SIZE}"):
        local.push(plain.name, plain.connection)
    assert [p for p in plain.proxy.uploads() if is_big(p)] == []
    assert registry.blob(plain.path, local.blob.digest) is None


def test_the_command_reports_a_damaged_blob(
    local: Store, registry: RealRegistry, plain: Way, aimage: Callable[..., Aimage]
) -> None:
    spoil(local, lambda content: b"?" + content[1:])
    here = aimage("store")
    here("tag", "x:v1", plain.name)
    assert "digest mismatch" in here("push", plain.name, code=5).err
    assert registry.blob(plain.path, local.blob.digest) is None


def test_a_resumed_push_of_a_damaged_blob_fails(
    local: Store, registry: RealRegistry, plain: Way
) -> None:
    """The rest alone cannot be verified locally; the registry verifies the whole."""
    spoil(local, lambda content: b"?" + content[1:])
    breaks = first(is_big)
    plain.proxy.lost = lambda passed: 9 * UNIT if breaks(passed) else None
    with pytest.raises(VerificationError, match="digest mismatch"):
        local.push(plain.name, plain.connection)
    assert bodies(plain.proxy) == [9 * UNIT, SIZE]
    assert registry.blob(plain.path, local.blob.digest) is None
