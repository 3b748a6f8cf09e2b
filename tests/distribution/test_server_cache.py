"""A server as the cache of another registry."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.distribution.role import RegistryRole
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.errors import UsageError
from clowder_aimage.http.api_error import OCI
from clowder_aimage.http.app import build_app
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Descriptor
from clowder_aimage.registry import ClientOptions
from tests.distribution.conformance import MANIFEST, Client
from tests.distribution.served import Server, descriptor_of, digest_of, error_of, manifest_of
from tests.process import Aimage, run
from tests.real_registry import PASSWORD, USER, RealRegistry, find_registry, free_port
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.wait import until

MIB = 1024 * 1024
Serve = Callable[..., Server]


def upload(host: str, name: str, tag: str, *layers: bytes) -> bytes:
    """Push an artifact to a registry; return its manifest."""
    client = Client(f"http://{host}", name)
    for data in (*layers, b"{}"):
        client.post_put(digest_of(data), data)
    raw = manifest_of(*layers)
    client.put(tag, raw, digest=digest_of(raw))
    client.http.close()
    return raw


def names(server: Server, repository: str) -> list[str]:
    """Return the names of a repository in the store."""
    found = [name for name, _ in ImageLayout(server.root).list_tags()]
    return [name for name in found if name.startswith((f"{repository}:", f"{repository}@"))]


@pytest.fixture
def name(repository: str) -> str:
    return repository.partition("/")[2]


@pytest.fixture
def layers() -> tuple[bytes, bytes]:
    return os.urandom(MIB), os.urandom(11)


@pytest.fixture(scope="module")
def cache(
    registry: RealRegistry, tmp_path_factory: pytest.TempPathFactory, serve_layout: Serve
) -> Server:
    """Return a shared cache: its config may exist, but the layers are new for each test."""
    return serve_layout(tmp_path_factory.mktemp("cache") / "store", f"upstream={registry.host}")


def test_content_is_fetched_once_and_kept(
    registry: RealRegistry,
    repository: str,
    name: str,
    layers: tuple[bytes, bytes],
    tmp_path: Path,
    serve_layout: Serve,
) -> None:
    cache = serve_layout(tmp_path / "cache", f"upstream={registry.host}")
    raw = upload(registry.host, name, "v1", *layers)
    mark = registry.mark()
    for _ in range(2):
        for method, body in (("HEAD", b""), ("GET", raw)):
            answer = cache.ask(method, f"/v2/{name}/manifests/v1")
            assert (answer.status_code, answer.content) == (200, body)
            assert answer.headers["Docker-Content-Digest"] == digest_of(raw)
            assert answer.headers["Content-Type"] == MANIFEST
        for data in (*layers, b"{}"):
            path = f"/v2/{name}/blobs/{digest_of(data)}"
            head = cache.ask("HEAD", path)
            assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(data)))
            assert cache.ask("GET", path).content == data
        assert cache.ask("GET", f"/v2/{name}/manifests/{digest_of(raw)}").content == raw
    counted = registry.count(mark, repository)
    assert counted["GET blob"] == 3
    assert counted["GET manifest"] == 4  # each time by tag, never by digest
    assert names(cache, repository) == [f"{repository}:v1"]


def test_name_is_set_after_the_last_blob(
    cache: Server, registry: RealRegistry, repository: str, name: str, layers: tuple[bytes, bytes]
) -> None:
    """A garbage collection meanwhile removes none of its blobs."""
    raw = upload(registry.host, name, "v1", *layers)
    for target in ("v1", digest_of(raw)):
        assert cache.ask("GET", f"/v2/{name}/manifests/{target}").content == raw
    for data in (b"{}", *layers):
        assert names(cache, repository) == []
        cache.ask("GET", f"/v2/{name}/blobs/{digest_of(data)}")
        Collector(ImageLayout(cache.root), grace=0).run()
    assert names(cache, repository) == [f"{repository}:v1"]
    assert {digest_of(each).partition(":")[2] for each in (raw, *layers, b"{}")} <= cache.blobs()


def test_by_digest_only(cache: Server, registry: RealRegistry, repository: str, name: str) -> None:
    raw = upload(registry.host, name, "v1", b"x")
    digest = digest_of(raw)
    assert cache.ask("GET", f"/v2/{name}/manifests/{digest}").content == raw
    for data in (b"x", b"{}"):
        cache.ask("GET", f"/v2/{name}/blobs/{digest_of(data)}")
    assert names(cache, repository) == [f"{repository}@{digest}"]


def test_index_is_named_once_one_manifest_is_complete(
    cache: Server, registry: RealRegistry, repository: str, name: str
) -> None:
    """A client pulls one manifest of an index: the others may never be requested."""
    kind = "application/vnd.oci.image.index.v1+json"
    layers = [os.urandom(9) for _ in range(2)]
    children = [upload(registry.host, name, f"child{i}", layers[i]) for i in range(2)]
    described = [descriptor_of(child, MANIFEST) for child in children]
    document = {"schemaVersion": 2, "mediaType": kind, "manifests": described}
    raw = json.dumps(document).encode()
    client = Client(f"http://{registry.host}", name)
    client.put("all", raw, digest=digest_of(raw))
    client.http.close()
    assert cache.ask("GET", f"/v2/{name}/manifests/all").content == raw
    cache.ask("GET", f"/v2/{name}/manifests/{digest_of(children[1])}")
    for data in (b"{}", layers[1]):
        assert names(cache, repository) == []
        cache.ask("GET", f"/v2/{name}/blobs/{digest_of(data)}")
    assert names(cache, repository) == [f"{repository}:all"]


def test_a_page_of_another_site_does_not_fill_the_cache(tmp_path: Path) -> None:
    upstream = UpstreamRegistry.parse("registry.example.com", ClientOptions())

    async def run() -> list[int]:
        role = RegistryRole(ImageLayout(tmp_path), upstream=upstream)
        async with TestClient(TestServer(build_app(role, interface=OCI))) as client:
            found = []
            for site in ("cross-site", "same-site", "same-origin", "none"):
                answer = await client.get("/v2/", headers={"Sec-Fetch-Site": site})
                found.append(answer.status)
            return found

    assert asyncio.run(run()) == [403, 403, 200, 200]


@pytest.mark.integration
def test_unreachable_upstream_serves_cached_content(
    tmp_path: Path, serve_layout: Serve, layers: tuple[bytes, bytes]
) -> None:
    with find_registry(tmp_path) as registry:
        cache = serve_layout(tmp_path / "cache", f"upstream={registry.host}")
        raw = upload(registry.host, "a/b", "v1", *layers)
        upload(registry.host, "a/b", "half", b"never asked for")
        cache.ask("GET", "/v2/a/b/manifests/v1")
        for data in (*layers, b"{}"):
            cache.ask("GET", f"/v2/a/b/blobs/{digest_of(data)}")
    for target in ("v1", digest_of(raw)):
        answer = cache.ask("GET", f"/v2/a/b/manifests/{target}")
        assert (answer.status_code, answer.content) == (200, raw)
    assert cache.ask("GET", f"/v2/a/b/blobs/{digest_of(layers[0])}").content == layers[0]
    assert cache.ask("GET", "/v2/a/b/tags/list").json()["tags"] == ["v1"]
    assert error_of(cache.ask("GET", "/v2/a/b/manifests/half")) == (502, "UNKNOWN")
    path = f"/v2/a/b/blobs/{digest_of(b'never asked for')}"
    assert error_of(cache.ask("GET", path)) == (502, "UNKNOWN")
    assert cache.ask("HEAD", path).status_code == 502
    _, log = cache.stop()
    assert f"serving the stored {registry.host}/a/b:v1" in log


def test_moved_and_deleted_tags_follow_the_upstream(
    cache: Server, registry: RealRegistry, repository: str, name: str
) -> None:
    for layer in (b"old", b"new"):
        raw = upload(registry.host, name, "v1", layer)
        assert cache.ask("GET", f"/v2/{name}/manifests/v1").content == raw
        for data in (layer, b"{}"):
            cache.ask("GET", f"/v2/{name}/blobs/{digest_of(data)}")
    assert names(cache, repository) == [f"{repository}:v1"]
    requests.delete(
        f"http://{registry.host}/v2/{name}/manifests/{digest_of(raw)}", timeout=60
    ).raise_for_status()
    answer = cache.ask("GET", f"/v2/{name}/manifests/v1")
    assert error_of(answer) == (404, "MANIFEST_UNKNOWN")


def test_missing_content_is_404(cache: Server, registry: RealRegistry, name: str) -> None:
    upload(registry.host, name, "v1", b"x")
    absent = digest_of(b"not there")
    for target in ("v2", absent):
        answer = cache.ask("GET", f"/v2/{name}/manifests/{target}")
        assert error_of(answer) == (404, "MANIFEST_UNKNOWN")
    assert error_of(cache.ask("GET", f"/v2/{name}/blobs/{absent}")) == (404, "BLOB_UNKNOWN")
    assert error_of(cache.ask("GET", "/v2/no/such/tags/list")) == (404, "NAME_UNKNOWN")
    assert cache.ask("HEAD", f"/v2/{name}/blobs/{absent}").status_code == 404


def test_tag_lists_come_from_the_upstream(cache: Server, registry: RealRegistry, name: str) -> None:
    upload(registry.host, name, "v1", b"x")
    upload(registry.host, name, "v2", b"y")
    assert cache.ask("GET", f"/v2/{name}/tags/list").json()["tags"] == ["v1", "v2"]
    paged = cache.ask("GET", f"/v2/{name}/tags/list?n=1")
    assert (paged.json()["tags"], "next" in paged.links) == (["v1"], True)


def test_pushes_are_refused(cache: Server, registry: RealRegistry) -> None:
    for method, path in (
        ("POST", "/v2/a/b/blobs/uploads/"),
        ("PUT", "/v2/a/b/manifests/t"),
        ("DELETE", "/v2/a/b/manifests/t"),
    ):
        answer = cache.ask(method, path)
        assert error_of(answer) == (405, "UNSUPPORTED")
        message = answer.json()["errors"][0]["message"]
        assert message == f"this registry is a cache of {registry.host}: push to {registry.host}"


def test_concurrent_clients_share_one_download(
    cache: Server, registry: RealRegistry, repository: str, name: str
) -> None:
    large = os.urandom(12 * MIB)
    raw = upload(registry.host, name, "v1", large)
    mark = registry.mark()
    barrier = threading.Barrier(4)

    def client(_: int) -> None:
        barrier.wait(60)
        with requests.Session() as http:
            url = f"{cache.url}/v2/{name}"
            assert http.get(f"{url}/manifests/v1", timeout=60).content == raw
            assert http.get(f"{url}/blobs/{digest_of(large)}", timeout=60).content == large

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    counted = registry.count(mark, repository)
    assert counted["GET blob"] == 1


def test_upstream_prefix_is_applied(
    registry: RealRegistry, repository: str, name: str, tmp_path: Path, serve_layout: Serve
) -> None:
    raw = upload(registry.host, name, "v1", b"x")
    cache = serve_layout(tmp_path / "cache", f"upstream={registry.host}/tests/")
    short = name.removeprefix("tests/")
    assert cache.ask("GET", f"/v2/{short}/manifests/v1").content == raw
    for data in (b"x", b"{}"):
        cache.ask("GET", f"/v2/{short}/blobs/{digest_of(data)}")
    assert names(cache, repository) == [f"{repository}:v1"]
    assert cache.ask("GET", "/v2/_catalog").json()["repositories"] == [short]


def test_private_upstream_is_authenticated(
    private_registry: RealRegistry, tmp_path: Path, serve_layout: Serve
) -> None:
    client = Client(f"http://{private_registry.host}", "private/one")
    client.http.auth = (USER, PASSWORD)
    for data in (b"x", b"{}"):
        client.post_put(digest_of(data), data)
    raw = manifest_of(b"x")
    client.put("v1", raw, digest=digest_of(raw))
    client.http.close()
    known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "docker").mkdir()
    config = {"auths": {private_registry.host: {"auth": known}}}
    (tmp_path / "docker/config.json").write_text(json.dumps(config))
    path = "/v2/private/one/manifests/v1"
    flag = f"upstream={private_registry.host}"
    stranger = serve_layout(tmp_path / "stranger", flag)
    assert error_of(stranger.ask("GET", path)) == (403, "DENIED")
    cache = serve_layout(tmp_path / "cache", flag, f"docker={tmp_path}/docker")
    assert cache.ask("GET", path).content == raw
    blob = f"/v2/private/one/blobs/{digest_of(b'x')}"
    assert cache.ask("GET", blob).content == b"x"


def test_wrong_bytes_are_never_sent_completely(tmp_path: Path, serve_layout: Serve) -> None:
    true = [os.urandom(size) for size in (1, 200_000, 3 * MIB)]
    wrong = [bytes([data[0] ^ 1]) + data[1:] for data in true] + [data[:-1] for data in true]
    blobs = [(len(data), sent) for data, sent in zip(true * 2, wrong, strict=True)]

    def script(seen: Seen) -> Answer:
        size, sent = blobs[int(seen.path.split("/")[3])]
        if seen.method == "HEAD":
            return Answer(headers={"Content-Length": str(size)})
        return Answer(body=sent)

    with ScriptedRegistry(script).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}")
        for number, data in enumerate(true * 2):
            got = b""
            with pytest.raises(requests.RequestException):
                path = f"{cache.url}/v2/a/{number}/blobs/{digest_of(data)}"
                with requests.get(path, stream=True, timeout=60) as answer:
                    answer.raise_for_status()
                    for piece in answer.iter_content(1000):
                        got += piece
            assert len(got) < len(data)
        assert cache.blobs() == set()
        assert cache.ingests() == []


def test_wrong_manifest_is_not_served(tmp_path: Path, serve_layout: Serve) -> None:
    """Neither one with another digest, nor an invalid one by tag."""
    wrong = {
        digest_of(manifest_of()): manifest_of() + b" ",
        "empty": b"",
        "nested": b"[" * 100_000,
        "digest": manifest_of(config={"mediaType": "x/y", "digest": "sha256:../x", "size": 2}),
        "large": b" " * (4 * MIB + 1),
    }

    def script(seen: Seen) -> Answer:
        body = wrong[seen.path.rpartition("/")[2]]
        return Answer(headers={"Content-Type": MANIFEST}, body=body)

    with ScriptedRegistry(script).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}")
        for target in wrong:
            got = cache.ask("GET", f"/v2/a/b/manifests/{target}")
            assert error_of(got) == (502, "UNKNOWN"), target
        assert cache.blobs() == set()


def test_ranges_of_a_blob_being_fetched(tmp_path: Path, serve_layout: Serve) -> None:
    """Received bytes are sent as a range; missing ones with the whole blob, in order."""
    data = os.urandom(MIB)
    half = len(data) // 2

    def script(seen: Seen) -> Answer:
        if seen.method == "HEAD":
            return Answer(headers={"Content-Length": str(len(data))})
        if "Range" in seen.headers:
            return Answer(body=data)  # resumes, without range support
        upstream.released.clear()
        return Answer(headers={"Content-Length": str(len(data))}, body=data, cut=half, hang=True)

    with ScriptedRegistry(script).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}")
        url = f"{cache.url}/v2/a/b/blobs/{digest_of(data)}"
        with requests.get(url, stream=True, timeout=60) as whole:
            first = whole.raw.read(half)  # the bytes received so far
            assert first == data[:half]
            here = requests.get(url, headers={"Range": "bytes=10-19"}, timeout=60)
            assert (here.status_code, here.content) == (206, data[10:20])
            ahead = {"Range": f"bytes={half + 10}-"}
            with requests.get(url, headers=ahead, stream=True, timeout=60) as other:
                assert other.status_code == 200
                upstream.released.set()
                assert other.content == data
            assert first + whole.raw.read() == data
        later = requests.get(url, headers=ahead, timeout=60)
        assert (later.status_code, later.content) == (206, data[half + 10 :])


def test_broken_fetch_is_resumed(tmp_path: Path, serve_layout: Serve) -> None:
    """Received bytes of a large blob are kept: the next client waits only for the rest."""
    data = os.urandom(24 * MIB)
    there = 18 * MIB
    up = threading.Event()
    starts: list[int] = []

    def script(seen: Seen) -> Answer:
        if seen.method == "HEAD":
            return Answer(headers={"Content-Length": str(len(data))})
        start = int(seen.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        starts.append(start)
        if start and not up.is_set():
            return Answer(404)
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        headers["Content-Length"] = str(len(data) - start)
        cut = None if up.is_set() else there
        return Answer(206, headers, data[start:], cut=cut)

    with ScriptedRegistry(script).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}")
        url = f"{cache.url}/v2/a/b/blobs/{digest_of(data)}"
        with pytest.raises(requests.RequestException):
            requests.get(url, timeout=60)
        up.set()
        for left in reversed(range(20)):  # the next client may still join the failing fetch
            try:
                content = requests.get(url, timeout=60).content
                break
            except requests.RequestException:
                if not left:
                    raise
        assert content == data
    assert starts[0] == 0
    assert starts[-1] == there
    assert cache.blobs() == {digest_of(data).partition(":")[2]}


def test_blob_being_fetched_by_another_process(
    cache: Server, registry: RealRegistry, name: str
) -> None:
    """The other download reports no progress, so the client does not wait for it."""
    data = os.urandom(MIB)
    upload(registry.host, name, "v1", data)
    content = Descriptor.of("application/octet-stream", data)
    ingest = ImageLayout(cache.root).ingest(content.digest.encoded, content)
    try:
        answer = cache.ask("GET", f"/v2/{name}/blobs/{content.digest}")
        assert answer.content == data
    finally:
        ingest.abort()
    assert content.digest.encoded in cache.blobs()
    assert cache.ingests() == []


def test_blob_larger_than_the_disk_is_refused(tmp_path: Path, serve_layout: Serve) -> None:
    """A size beyond any disk is refused before a byte is requested."""
    huge = {"Content-Length": str(1 << 50)}
    with ScriptedRegistry(lambda seen: Answer(headers=huge)).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}")
        answer = cache.ask("GET", f"/v2/a/b/blobs/{digest_of(b'x')}")
        assert error_of(answer) == (507, "UNKNOWN")
        assert upstream.asked("GET") == []


@pytest.mark.integration
def test_server_stops_while_a_fetch_hangs(tmp_path: Path, serve_layout: Serve) -> None:
    data = os.urandom(MIB)
    headers = {"Content-Length": str(len(data))}

    def script(seen: Seen) -> Answer:
        if seen.method == "HEAD":
            return Answer(headers=headers)
        return Answer(headers=headers, body=data, cut=MIB // 2, hang=True)

    with ScriptedRegistry(script).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}", "impatient")
        url = f"{cache.url}/v2/a/b/blobs/{digest_of(data)}"
        with requests.get(url, stream=True, timeout=60) as answer:
            assert answer.raw.read(MIB // 2) == data[: MIB // 2]
            assert cache.stop()[0] == 0


@pytest.mark.integration
def test_server_stops_while_its_upstream_is_silent(tmp_path: Path, serve_layout: Serve) -> None:
    silent = Answer(headers={"Content-Length": "9"}, cut=0, hang=True)
    with ScriptedRegistry(lambda _: silent).running() as upstream:
        cache = serve_layout(tmp_path / "cache", f"upstream={upstream.host}", "impatient")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(cache.ask, "GET", "/v2/a/b/manifests/v1")
            until(lambda: upstream.seen, "the request")
            assert cache.stop()[0] == 0
            with pytest.raises(requests.RequestException):
                asked.result(60)


def test_mutual_caches_do_not_deadlock(
    registry: RealRegistry,
    repository: str,
    name: str,
    layers: tuple[bytes, bytes],
    tmp_path: Path,
    serve_layout: Serve,
) -> None:
    """Each requests from the other before the upstream; no request waits for itself."""
    raw = upload(registry.host, name, "v1", *layers)
    mark = registry.mark()
    ports = free_port(), free_port()
    nodes = [
        serve_layout(
            tmp_path / f"node{i}",
            f"upstream={registry.host}",
            f"mirror=127.0.0.1:{ports[1 - i]}",
            address=f"127.0.0.1:{ports[i]}",
        )
        for i in range(2)
    ]
    for node in nodes:
        for target in ("v1", digest_of(raw)):
            assert node.ask("GET", f"/v2/{name}/manifests/{target}").content == raw
        for data in (*layers, b"{}"):
            assert node.ask("GET", f"/v2/{name}/blobs/{digest_of(data)}").content == data
        assert names(node, repository) == [f"{repository}:v1"]
    assert registry.count(mark, repository)["GET blob"] == 3


def test_aimage_pulls_through_the_cache(
    cache: Server,
    registry: RealRegistry,
    repository: str,
    name: str,
    aimage: Callable[..., Aimage],
) -> None:
    """Cold, then warm, with a blob that several connections fetch."""
    raw = upload(registry.host, name, "v1", os.urandom(24 * MIB), os.urandom(9))
    host = cache.url.removeprefix("http://")
    for store in ("cold", "warm"):
        aimage(store)("pull", f"{host}/{name}:v1", "--quiet")
    assert names(cache, repository) == [f"{repository}:v1"]
    assert cache.ask("GET", f"/v2/{name}/manifests/v1").content == raw


@pytest.mark.integration
def test_skopeo_copies_through_the_cache(
    cache: Server,
    registry: RealRegistry,
    name: str,
    layers: tuple[bytes, bytes],
    skopeo: str,
    tmp_path: Path,
) -> None:
    raw = upload(registry.host, name, "v1", *layers)
    source = f"docker://{cache.url.removeprefix('http://')}/{name}:v1"
    target = f"oci:{tmp_path}/layout:v1"
    command = [skopeo, "--insecure-policy", "copy", "--src-tls-verify=false", source, target]
    run(command, check=True, timeout=60)
    index = json.loads((tmp_path / "layout/index.json").read_text())
    assert index["manifests"][0]["digest"] == digest_of(raw)


@pytest.mark.parametrize("text", ["", "name", "https://host.example", "host.example/A"])
def test_upstream_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="invalid registry"):
        UpstreamRegistry.parse(text, ClientOptions())


def test_upstream_names_are_parsed() -> None:
    for text, name in (
        ("localhost", "localhost"),
        ("host.example:5000/", "host.example:5000"),
        ("host.example/a/b", "host.example/a/b"),
    ):
        assert UpstreamRegistry.parse(text, ClientOptions()).name == name
