"""Invalid requests to a worker or a node are refused in the format of each interface.

Every route is requested, including those of the node and of its embedded registry, so that no
interface bypasses the checks of another.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("pydantic", reason="pydantic is not installed")

from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.openai import image as openai
from clowder_aimage.api.picture import link as picture_link
from clowder_aimage.api.picture.upload import PictureUploads
from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.app import build_app
from clowder_aimage.http.route import ADMIN, INFER, NODE, OPEN, Role, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.oci import Digest, mediatype
from clowder_aimage.registry import ClientOptions
from tests.hostile.hostile_world import plant
from tests.store import copy_store

TOKENS = {ADMIN: "a" * 16, INFER: "i" * 16, NODE: "n" * 16}
ROUTES = 25  # the least number of routes expected
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Routes of ollama's and OpenAI's APIs that this worker does not implement
ELSEWHERE = [
    ("POST", "/api/create"),
    *((method, f"/api/blobs/sha256:{'0' * 64}") for method in ("HEAD", "POST")),
    *(("POST", f"/v1/{verb}") for verb in ("responses", "audio/speech")),
    ("POST", "/engines/_configure"),
    ("POST", "/_configure"),
]


@dataclass(frozen=True)
class Said:
    """A response and its request."""

    method: str
    path: str
    status: int
    kind: str
    headers: Any
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Walk:
    """The routes of a worker that is also a node, without a pipeline."""

    def __init__(self, root: Path) -> None:
        service = make_service(Settings(), ImageLayout(root / "store"), ClientOptions())
        known = {token: scope for scope, token in TOKENS.items()}
        self._daemon = Daemon(service, NodeSettings(), known)
        self.routes: list[Route] = [
            *WorkerRole(service).build_routes(),
            *self._daemon.build_routes(),
        ]
        self.service, self._known = service, known

    def close(self) -> None:
        self._daemon._sharing.close()

    def every(self) -> list[tuple[str, str]]:
        """Return the method and a concrete path of each route."""
        found = {(route.method, concrete(route.path)) for route in self.routes}
        assert len(found) > ROUTES
        return sorted(found)

    def scope(self, method: str, path: str) -> str:
        (found,) = {
            route.scope
            for route in self.routes
            if (route.method, concrete(route.path)) == (method, path)
        }
        return found

    def ask(
        self,
        paths: list[tuple[str, str]],
        body: bytes | None = None,
        *,
        is_guarded: bool = False,
        **headers: str,
    ) -> Iterator[Said]:
        """Send the requests and yield the responses. Streams are not read."""
        role = Role()
        role.build_routes = lambda: self.routes  # type: ignore[method-assign]
        tokens = self._known if is_guarded else None
        app = build_app(role, hosts=frozenset({"127.0.0.1"}), tokens=tokens)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")

        async def ask() -> list[Said]:
            found = []
            async with asyncio.timeout(120), TestClient(TestServer(app)) as client:
                for method, path in paths:
                    answer = await client.request(
                        method,
                        path,
                        headers=sent,
                        data=None if body is None else io.BytesIO(body),
                        allow_redirects=False,
                    )
                    is_stream = answer.content_type == "text/event-stream"
                    raw = b"" if is_stream else await answer.read()
                    kind = answer.content_type
                    found.append(Said(method, path, answer.status, kind, answer.headers, raw))
                    answer.close()
            return found

        yield from asyncio.run(ask())


def concrete(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    found = Walk(tmp_path)
    yield found
    found.close()


def check_shape(said: Said) -> None:
    """Check that an error has the format of its interface."""
    assert said.kind == "application/json", said
    if said.path.startswith("/api/"):
        body = json.loads(said.body)
        assert set(body) == {"error", "code"}, said
        assert isinstance(body["error"], str) and body["error"], said
        return
    if said.path.startswith("/v2/"):
        for each in json.loads(said.body)["errors"]:
            assert each["code"].isupper() and each["message"], said
        return
    error = said.error
    assert set(error) == {"message", "type", "param", "code"}, said
    assert error["message"] and error["code"], said
    kinds = {401: "authentication_error", 403: "permission_error"}
    usual = "server_error" if said.status >= 500 else "invalid_request_error"
    assert error["type"] == kinds.get(said.status, usual), said


# -- access


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
    ],
    ids=lambda said: "".join(said.values()),
)
def test_every_route_refuses_foreign_hosts_and_origins(walk: Walk, headers: dict[str, str]) -> None:
    """DNS rebinding (CVE-2024-28224): health and metrics are checked too."""
    for said in walk.ask(walk.every(), None, is_guarded=False, **headers):
        assert said.status == 403, said
        check_shape(said)
        assert not any(name.lower().startswith("access-control") for name in said.headers)


@pytest.mark.parametrize("shown", ["", "Bearer wrong"])
def test_every_route_but_open_ones_requires_a_token(walk: Walk, shown: str) -> None:
    """Other servers have protected /v1 but not /api."""
    headers = {"Authorization": shown} if shown else {}
    for said in walk.ask(walk.every(), None, is_guarded=True, **headers):
        if walk.scope(said.method, said.path) == OPEN:
            assert said.status not in (401, 403), said
        else:
            assert said.status == 401, said
            check_shape(said)


@pytest.mark.parametrize("scope", [INFER, NODE])
def test_a_token_is_accepted_on_routes_of_its_scope_only(walk: Walk, scope: str) -> None:
    for said in walk.ask(walk.every(), is_guarded=True, Authorization=f"Bearer {TOKENS[scope]}"):
        if walk.scope(said.method, said.path) in (scope, OPEN):
            assert said.status not in (401, 403), said
        else:
            assert said.status == 403, said
            check_shape(said)


# Open routes, and routes that change nothing but what their callers brought
OPENED = {"/", "/api/version", "/docs", "/healthz", "/openapi.json", "/readyz"} | {
    picture_link.PATH + "{name}",
    *("/v1/worker", "/page/{name:.+}"),  # what the page for browsers loads first
}
TEXTS = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}
TEXTS |= {"/api/chat", "/api/embed", "/api/embeddings"}
BATCHES = {"/v1/files", "/v1/files/{id}", "/v1/batches", "/v1/batches/{id}/cancel"}
HARMLESS = {"/api/generate", "/api/show", *TEXTS, *BATCHES} | {
    f"/v1/images/{verb}" for verb in ("generations", "edits", "variations")
}


def test_state_changing_routes_need_the_admin_scope(walk: Walk) -> None:
    """This includes the routes of a node."""
    assert {route.path for route in walk.routes if route.scope == OPEN} <= OPENED
    for route in walk.routes:
        if route.method not in ("GET", "HEAD") and route.path not in HARMLESS:
            assert route.scope == ADMIN, route.path


def test_a_node_token_is_read_only(walk: Walk) -> None:
    """Routes with the node scope allow no push, mount or upload."""
    assert {route.method for route in walk.routes if route.scope == NODE} == {"GET"}
    paths = ["/v2/a/blobs/uploads/", f"/v2/a/blobs/sha256:{'0' * 64}", "/v2/a/manifests/t"]
    paths.append(f"/v2/a/blobs/uploads/?mount=sha256:{'0' * 64}&from=b")
    asked = [(method, path) for path in paths for method in ("POST", "PUT", "PATCH", "DELETE")]
    for said in walk.ask(asked, is_guarded=True, Authorization=f"Bearer {TOKENS[NODE]}"):
        assert said.status == 403, said
    for said in walk.ask(asked, is_guarded=True, Authorization=f"Bearer {TOKENS[ADMIN]}"):
        assert said.status == (404 if "/uploads/" in said.path else 405), said


def test_no_route_changes_settings(walk: Walk) -> None:
    """CVE-2026-28400: no route accepts settings of the engine."""
    for route in walk.routes:
        is_setting = re.search(r"config|setting|engine|flag|option|backend|runtime", route.path)
        assert is_setting is None, route.path
        assert route.method not in ("PUT", "PATCH"), route.path


# -- requests


def test_unknown_routes_are_404_in_the_format_of_their_interface(walk: Walk) -> None:
    for said in walk.ask(ELSEWHERE, b"{}"):
        assert said.status == 404, said
        if said.method != "HEAD":
            check_shape(said)
    for said in walk.ask(ELSEWHERE, b"{}", is_guarded=True):
        assert said.status == 401, said  # routes are not disclosed without a token


def test_an_unsupported_method_is_405_with_allow(walk: Walk) -> None:
    """Paths with parameters are left out, because the resource decides."""
    every = walk.every()
    there = {path: {method for method, other in every if other == path} for _, path in every}
    wrong = [
        (method, path)
        for path, known in there.items()
        for method in METHODS
        if method not in known and "x" not in path.split("/")
    ]
    assert len(wrong) > 50
    for said in walk.ask(wrong, b"{}"):
        assert said.status == 405, said
        check_shape(said)
        assert there[said.path] <= set(said.headers["Allow"].split(", ")), said


# Not a form; no such batch, whatever the body
UNREAD = {"/v1/files": {400: 415, 413: 415}, "/v1/batches/x/cancel": {400: 404}}
BODIES: list[tuple[str, bytes, int]] = [
    ("none", b"", 400),
    ("no json", b"{", 400),
    ("deep", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400),
    ("twice", b'{"model": "a", "model": "b", "prompt": "c", "url": "d"}', 400),
    ("large", b'{"model": "' + b"x" * (1 << 20) + b'"}', 413),
    ("huge", b'{"model": "' + b"x" * (4 << 20) + b'"}', 413),
    ("form", b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\ntiny\r\n--x--\r\n", 400),
]


@pytest.mark.parametrize(
    ("body", "status"), [one[1:] for one in BODIES], ids=[b[0] for b in BODIES]
)
def test_every_route_with_a_body_refuses_invalid_bodies(
    walk: Walk, body: bytes, status: int
) -> None:
    asked = [
        (method, path)
        for method, path in walk.every()
        if method in ("POST", "PUT") or path == "/api/delete"
    ]
    assert len(asked) >= 9
    for said in walk.ask(asked, body):
        if (said.path, body) == ("/v1/node/retry", b""):  # no body means everything
            assert said.status == 202, said
            continue
        if said.path in TEXTS and (1 << 20) < len(body) < (4 << 20):
            assert said.status in (400, 404), said  # its model is wrong
        else:
            assert said.status == UNREAD.get(said.path, {}).get(status, status), said
        check_shape(said)


@pytest.mark.parametrize("path", ["/api/generate", "/v1/images/generations"])
def test_multipart_bodies_are_not_parsed(walk: Walk, path: str) -> None:
    """A body that is not JSON is refused regardless of its content type."""
    part = b"--x\r\nContent-Disposition: form-data; name=image\r\n\r\n\r\n"
    for body, status in ((part * 15_000, 400), (part * 30_000, 413)):
        for end in (b"--x--\r\n", b""):
            kind = "multipart/form-data; boundary=x"
            (said,) = walk.ask([("POST", path)], body + end, Content_Type=kind)
            assert said.status == status, said
            check_shape(said)


def test_errors_of_head_requests_have_no_body(walk: Walk) -> None:
    paths = [("HEAD", path) for path in ("/nothing", "/api/nothing", "/v1/models/nothing")]
    for said in walk.ask(paths):
        assert (said.status, said.body) == (404, b""), said


def test_an_expired_link_is_410_and_an_invalid_one_is_404(walk: Walk) -> None:
    """A link expires after 60 minutes."""
    now = [1000.0]
    images = openai.ImageRoutes(walk.service, PictureUploads(walk.service))
    images._pictures = picture_link.PictureLinks(clock=lambda: now[0])
    walk.routes = [Route("GET", picture_link.PATH + "{name}", images.fetch, OPEN)]
    place = images._pictures.keep(b"picture", "webp")
    (said,) = walk.ask([("GET", place)])
    assert (said.status, said.kind, said.body) == (200, "image/webp", b"picture")
    now[0] += 3600
    for wrong, status, code in (
        (place, 410, "picture_expired"),
        (place[:-1], 404, "picture_not_found"),
        (place.replace("expires=4600", "expires=9999"), 404, "picture_not_found"),
    ):
        (said,) = walk.ask([("GET", wrong)])
        assert (said.status, said.error["code"]) == (status, code), wrong
        check_shape(said)


BAD = "sha256:../../outside/secret"
LEFT: dict[str, bytes | None] = {  # None: the entry itself has no digest
    "an entry": None,
    "a layer": b'{"schemaVersion": 2, "config": {}, "layers": [{"digest": "%s"}]}' % BAD.encode(),
    "no json": b"{",
    "deep": b"[" * 100_000,
    "a size": b'{"schemaVersion": 2, "config": {"size": -1}, "layers": []}',
}


@pytest.mark.parametrize("data", LEFT.values(), ids=LEFT)
def test_invalid_index_entries_are_skipped(
    stocked: Path, tmp_path: Path, data: bytes | None
) -> None:
    """An invalid digest or manifest in index.json is not followed and breaks no list."""
    copy_store(stocked, tmp_path / "store")
    place = tmp_path / "store" / "index.json"
    index = json.loads(place.read_bytes())
    entry: dict[str, Any] = {"mediaType": mediatype.OCI_MANIFEST, "digest": BAD, "size": 5}
    if data is not None:
        plant(tmp_path / "store", data)
        entry |= {"digest": str(Digest.of(data)), "size": len(data)}
    index["manifests"].insert(0, entry | {"annotations": {mediatype.REF_NAME: "ghost:latest"}})
    place.write_text(json.dumps(index))
    walk = Walk(tmp_path)
    lists = [("GET", path) for path in ("/api/tags", "/v1/models", "/content/", "/v1/node")]
    for said in walk.ask([*lists, ("GET", "/readyz")]):
        assert said.status == 200, said
        assert b"ghost" not in said.body, said
        assert b"tiny" in said.body or said.path in ("/v1/node", "/readyz"), said
    for path, more in (("show", {}), ("generate", {"prompt": "a dog"}), ("copy", {})):
        body = {"model": "ghost", "source": "ghost", "destination": "x", "stream": False} | more
        (said,) = walk.ask([("POST", f"/api/{path}")], json.dumps(body).encode())
        assert said.status == (404 if data is None else 500), said
        check_shape(said)
        assert str(tmp_path).encode() not in said.body
    walk.close()
