"""Known attacks against the servers: a worker, its node, and a registry.

Attacks through pulls are tested in tests/hostile and tests/registry. Here the attack is a request,
and the tests check what a server then requests, writes and returns.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.app import build_app
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.oci import mediatype
from clowder_aimage.registry import ClientOptions
from tests.hostile.hostile_corpus import TEXTS
from tests.registry_app import registry_app
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact

HEX = "0123456789abcdef" * 4
Asked = tuple[str, str, Any]  # a method, a path, and a body: JSON, or bytes
WORST = (
    "climbs_in_full",
    "upper",
)  # a path, and a malformed digest; tests/oci has the whole corpus


def spoken(
    app: web.Application, asked: list[Asked], **headers: str
) -> list[tuple[int, bytes, Any]]:
    """Send the requests; return status, body and headers of each response."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def ask() -> list[tuple[int, bytes, Any]]:
        found = []
        async with asyncio.timeout(120), TestClient(TestServer(app)) as client:
            for method, path, body in asked:
                is_raw = isinstance(body, bytes | None)
                data = body if is_raw else json.dumps(body).encode()
                kind = {} if data is None else {"Content-Type": "application/json"}
                answer = await client.request(
                    method,
                    path,
                    data=None if data is None else io.BytesIO(data),
                    headers=kind | sent,
                    allow_redirects=False,
                )
                found.append((answer.status, await answer.read(), answer.headers))
        return found

    return asyncio.run(ask())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., list[tuple[int, bytes, Any]]]]:
    """Return a function that sends requests to a worker and node without stored credentials."""
    nowhere = ClientOptions(docker_config=tmp_path / "docker")
    service = make_service(Settings(), ImageLayout(tmp_path / "in" / "store"), nowhere)
    daemon = Daemon(service, NodeSettings(), {})

    def ask(*asked: Asked, **headers: str) -> list[tuple[int, bytes, Any]]:
        app = build_app(WorkerRole(service), daemon)
        return spoken(app, list(asked), **headers)

    yield ask
    daemon._sharing.close()


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def in_base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode().rstrip("=")


def naming(host: str, digest: str) -> list[Asked]:
    """Return every kind of request that may contain a digest, with this invalid one."""
    name, model = f"{host}/a/b@{digest}", {"prompt": "a dog", "stream": False}
    part = quote(digest.encode("utf-8", "surrogatepass"), safe="")
    return [
        ("POST", "/v1/images/generations", {**model, "model": name, "pull": "always"}),
        ("POST", "/api/generate", {**model, "model": name}),
        ("POST", "/api/generate", {"model": name, "keep_alive": 0}),
        ("POST", "/api/show", {"model": name}),
        ("POST", "/api/pull", {"model": name, "stream": False}),
        ("POST", "/api/push", {"model": name, "stream": False}),
        ("POST", "/api/copy", {"source": name, "destination": "x"}),
        ("POST", "/api/copy", {"source": "x", "destination": name}),
        ("DELETE", "/api/delete", {"model": name}),
        ("POST", "/content/", {"url": f"oci://{name}"}),
        ("GET", f"/content/{in_base64(f'oci://{name}')}", None),
        ("DELETE", f"/content/{in_base64(f'oci://{name}')}", None),
        ("GET", f"/v1/models/{host}/a/b@{part}", None),
        ("GET", f"/v2/a/b/blobs/{part}?ns={host}", None),
        ("GET", f"/v2/a/b/manifests/{part}?ns={host}", None),
    ]


@pytest.mark.parametrize("digest", [TEXTS[kind] for kind in WORST], ids=WORST)
def test_an_invalid_digest_causes_no_request_and_no_file_access(
    served: Any, tmp_path: Path, digest: str
) -> None:
    """CVE-2024-37032, CVE-2024-3727, CVE-2026-7020: a digest is not a path or a URL."""
    (tmp_path / "in" / "secret").parent.mkdir(exist_ok=True)
    (tmp_path / "in" / "secret").write_bytes(b"keep out")
    with ScriptedRegistry(lambda _: Answer(500)).running() as registry:
        asked = naming(registry.host, digest)
        for (method, path, _), (status, body, _) in zip(asked, served(*asked), strict=True):
            assert status in (400, 404), (method, path, status, body)
            assert b"keep out" not in body and str(tmp_path).encode() not in body
        assert registry.seen == []
    assert {name for name in files(tmp_path) if "/.aimage/" not in name} == {"in/secret"}


def test_read_only_requests_do_not_contact_a_registry(served: Any, tmp_path: Path) -> None:
    """Only pulls and pushes contact the registry of a name."""
    with ScriptedRegistry(lambda _: Answer(500)).running() as registry:
        fetching = {"/api/pull", "/v1/images/generations"}
        for name in (f"{registry.host}/a/b:v1", f"{registry.host}/a/b@sha256:{HEX}"):
            asked: list[Asked] = [
                ("POST", "/api/show", {"model": name}),
                ("POST", "/api/push", {"model": name}),
                ("POST", "/api/copy", {"source": name, "destination": "x"}),
                ("DELETE", "/api/delete", {"model": name}),
                ("POST", "/api/generate", {"model": name, "keep_alive": 0}),
                ("GET", f"/v1/models/{name}", None),
                ("GET", f"/content/{in_base64(f'oci://{name}')}", None),
                ("DELETE", f"/content/{in_base64(f'oci://{name}')}", None),
                ("GET", f"/v2/a/b/manifests/sha256:{HEX}?ns={registry.host}", None),
                ("GET", f"/v2/a/b/blobs/sha256:{HEX}?ns={registry.host}", None),
                *((method, path, None) for method in ("GET", "HEAD") for path in fetching),
            ]
            for one, (status, _, _) in zip(asked, served(*asked), strict=True):
                assert status == (405 if one[1] in fetching else 404), one
        assert registry.seen == []
    assert not [name for name in files(tmp_path) if "/.aimage/" not in name]


CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("coding", CODINGS)
def test_every_route_refuses_coded_bodies(served: Any, coding: str) -> None:
    """CVE-2024-12886, in the direction of requests."""
    bomb = CODINGS[coding](b" " * (2 << 20))
    assert len(bomb) < 1 << 14
    routes = [("POST", f"/api/{verb}") for verb in ("generate", "show", "pull", "push", "copy")]
    routes += [("DELETE", "/api/delete"), ("POST", "/content/")]
    routes += [("POST", "/v1/images/generations"), ("POST", "/v1/node/retry"), ("POST", "/x")]
    asked = [(method, path, bomb) for method, path in routes]
    for one, (status, body, _) in zip(asked, served(*asked, Content_Encoding=coding), strict=True):
        assert status == 415, (one[:2], status, body)


def wrong_manifest(bad: str) -> bytes:
    raw, _ = artifact(b"{}", b"layer")
    document = json.loads(raw)
    document["layers"][0]["digest"] = bad
    return json.dumps(document).encode()


PULLS: list[Callable[[str], Asked]] = [
    lambda name: ("POST", "/api/pull", {"model": name, "stream": False}),
    lambda name: ("POST", "/content/", {"url": f"oci://{name}"}),
    lambda name: ("POST", "/v1/images/generations", {"model": name, "prompt": "a dog"}),
    lambda name: ("POST", "/api/generate", {"model": name, "prompt": "a dog", "stream": False}),
]


@pytest.mark.parametrize("kind", WORST)
def test_a_manifest_with_an_invalid_digest_causes_no_further_request(
    served: Any, tmp_path: Path, kind: str
) -> None:
    manifest = wrong_manifest(TEXTS[kind])

    def script(seen: Seen) -> Answer:
        assert seen.method in ("GET", "HEAD")
        return Answer(200, {"Content-Type": mediatype.OCI_MANIFEST}, manifest)

    with ScriptedRegistry(script).running() as registry:
        asked = [make(f"{registry.host}/a/b:v1") for make in PULLS]
        for status, body, _ in served(*asked):
            assert 500 <= status < 504, (status, body)
            assert json.loads(body)["error"], body
        assert {seen.path for seen in registry.seen} == {"/v2/a/b/manifests/v1"}
    left = {name for name in files(tmp_path) if not re.search(r"/\.aimage/|oci-layout$", name)}
    assert left == set()


def test_credentials_are_sent_to_the_named_registry_only(served: Any) -> None:
    """CVE-2025-51471, CVE-2026-33990, CVE-2020-15157: a realm, a redirect or ``urls`` elsewhere."""
    secret = base64.b64encode(b"operator:open sesame").decode()
    raw, _ = artifact(b"{}", b"layer")
    document = json.loads(raw)

    def elsewhere(seen: Seen) -> Answer:
        if seen.path.startswith("/token"):
            return Answer(200, {"Content-Type": "application/json"}, b'{"token": "of-nobody"}')
        return Answer(401, {"WWW-Authenticate": 'Basic realm="give"'})

    with ScriptedRegistry(elsewhere).running() as other:
        document["layers"][0]["urls"] = [f"http://{other.host}/layer"]
        manifest = json.dumps(document).encode()

        def script(seen: Seen) -> Answer:
            if seen.path.startswith("/v2/realm"):
                host = other.host.replace("127.0.0.1", "localhost")
                realm = f'Bearer realm="http://{host}/token",service="x"'
                return Answer(401, {"WWW-Authenticate": realm})
            if "Authorization" not in seen.headers:
                return Answer(401, {"WWW-Authenticate": 'Basic realm="x"'})
            if "/manifests/" in seen.path:
                return Answer(200, {"Content-Type": mediatype.OCI_MANIFEST}, manifest)
            if seen.path.startswith("/v2/redirect"):
                return Answer(307, {"Location": f"http://{other.host}/blob"})
            return Answer(404)

        with ScriptedRegistry(script).running() as registry:
            said = {"credentials": secret, "credentialsType": "Basic"}
            names = [f"{registry.host}/{name}/x:v1" for name in ("realm", "redirect", "urls")]
            asked = [("POST", "/content/", {"url": f"oci://{name}", **said}) for name in names]
            for status, body, _ in served(*asked):
                assert status >= 400, body
                assert secret.encode() not in body and b"sesame" not in body
            assert any(f"Basic {secret}" in seen.headers.values() for seen in registry.seen)
        assert {seen.path.partition("?")[0] for seen in other.seen} >= {"/token", "/blob"}
        assert "/layer" not in {seen.path for seen in other.seen}
        for seen in other.seen:
            assert "Authorization" not in seen.headers
            text = f"{seen.path} {seen.headers} {seen.body!r}"
            assert secret not in text and "sesame" not in text and "operator" not in text


# -- a registry


@pytest.mark.parametrize("digest", [TEXTS[kind] for kind in WORST], ids=WORST)
def test_a_cache_sends_no_invalid_digest_upstream(tmp_path: Path, digest: str) -> None:
    part = quote(digest.encode("utf-8", "surrogatepass")[:2000], safe="")
    kinds = ("blobs", "manifests", "referrers")
    asked = [
        (method, f"/v2/a/b/{kind}/{part}", None) for kind in kinds for method in ("GET", "HEAD")
    ]
    if ":" not in digest and re.fullmatch(r"[\w.-]*", digest, re.ASCII):
        asked = [one for one in asked if "/manifests/" not in one[1]]  # it is a valid tag
    with ScriptedRegistry(lambda _: Answer(500)).running() as registry:
        upstream = UpstreamRegistry.parse(
            registry.host, ClientOptions(docker_config=tmp_path / "docker")
        )
        app = registry_app(ImageLayout(tmp_path / "store"), upstream=upstream)
        for one, (status, _, _) in zip(asked, spoken(app, asked), strict=True):
            assert status == 400, one
        assert registry.seen == []


TOKEN = "r" * 16


def every_route(app: web.Application) -> list[Asked]:
    table = {
        (route.method, re.sub(r"\{[^}]*\}", "x", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None
    }
    assert len(table) > 15
    return sorted((method, path, None) for method, path in table)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}, 403),
        ({"Origin": "http://evil.example", "Authorization": f"Bearer {TOKEN}"}, 403),
    ],
    ids=["wrong", "host", "origin"],
)
def test_a_registry_checks_access_on_every_route(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    app = registry_app(ImageLayout(tmp_path / "store"), token=TOKEN)
    asked = [*every_route(app), ("GET", "/nothing", None), ("OPTIONS", "/v2/", None)]
    for one, (found, _, answered) in zip(asked, spoken(app, asked, **headers), strict=True):
        assert found == status, one
        assert not any(name.lower().startswith("access-control") for name in answered), one
    assert not (tmp_path / "store").exists()


def manifest_with(**layer: Any) -> bytes:
    raw, _ = artifact(b"{}", b"layer")
    document = json.loads(raw)
    document["layers"][0] |= layer
    return json.dumps(document).encode()


INDEX = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
MANIFEST_WITH_MANIFESTS = manifest_with()[:-1] + b', "manifests": []}'
DOCUMENTS = [
    ("packed", gzip.compress(b" " * (8 << 20)), mediatype.OCI_MANIFEST),
    ("negative", manifest_with(size=-1), mediatype.OCI_MANIFEST),
    ("enormous", manifest_with(size=2**63), mediatype.OCI_MANIFEST),
    ("manifests too", MANIFEST_WITH_MANIFESTS, mediatype.OCI_MANIFEST),
    ("config too", json.dumps(INDEX | {"config": {}}).encode(), mediatype.OCI_INDEX),
    ("another", json.dumps(INDEX).encode(), mediatype.OCI_MANIFEST),
    ("twice", b'{"layers": [], ' + json.dumps(INDEX).encode()[1:], mediatype.OCI_INDEX),
]


@pytest.mark.parametrize(
    ("raw", "kind"), [one[1:] for one in DOCUMENTS], ids=[one[0] for one in DOCUMENTS]
)
def test_a_registry_refuses_ambiguous_or_invalid_manifests(
    tmp_path: Path, raw: bytes, kind: str
) -> None:
    """CVE-2021-41190, CVE-2024-12886, and the sizes of GHSA-f36w-mj3v-6jqv."""
    app = registry_app(ImageLayout(tmp_path / "store"))
    coding = "gzip" if raw.startswith(b"\x1f\x8b") else "identity"
    asked: list[Asked] = [("PUT", "/v2/a/b/manifests/t", raw), ("GET", "/v2/a/b/tags/list", None)]
    put, listed = spoken(app, asked, Content_Type=kind, Content_Encoding=coding)
    assert put[0] in ((400, 413) if coding == "gzip" else (400,)), put
    assert json.loads(put[1])["errors"][0]["code"] == "MANIFEST_INVALID", put
    assert listed[0] == 404


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Content-Length: -1",),
        ("Content-Length: +4",),
        ("Transfer-Encoding: chunked, identity",),
        ("Host: evil.example",),
        ("X-Folded: a\r\n b: c", "Content-Length : 4"),
    ],
    ids=["two lengths", "both", "negative", "plus", "codings", "two hosts", "spaces"],
)
def test_a_registry_refuses_request_smuggling(tmp_path: Path, lines: tuple[str, ...]) -> None:
    head = ["PUT /v2/a/b/manifests/t HTTP/1.1", "Host: 127.0.0.1", *lines]
    sent = "\r\n".join(head).encode() + b"\r\n\r\n0\r\n\r\nGET /v2/ HTTP/1.1\r\n\r\n"

    async def ask() -> bytes:
        app = registry_app(ImageLayout(tmp_path / "store"))
        async with asyncio.timeout(60), TestServer(app) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(sent)
            answer = await reader.read()  # until the connection is closed
            writer.close()
            return answer

    answer = asyncio.run(ask())
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer
    assert answer.count(b"HTTP/1.") == 1  # the rest was not read as a second request
