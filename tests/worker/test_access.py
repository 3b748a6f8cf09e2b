"""Access control: every route is requested with every kind of credentials."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.api.service import Service

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.config.token_file import read_tokens
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.settings import Settings
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.http.access import ANY_ADDRESS, parse_host
from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import check_access, listen, listen_unix
from clowder_aimage.http.route import ADMIN, INFER, NODE, OPEN, SCOPES, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.registry import ClientOptions

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from tests.worker.conftest import LocalWorker


ADMIN_TOKEN, INFER_TOKEN = "a" * 16, "i" * 16
TOKENS = {ADMIN_TOKEN: ADMIN, INFER_TOKEN: INFER}
NOT_THERE = [("GET", "/nothing"), ("POST", "/../etc/passwd"), ("PUT", "/metrics")]
# Routes that change nothing but what their callers brought, and so do not need the admin scope
IMAGES = ("generations", "edits", "variations")
HARMLESS = {("POST", "/api/generate"), ("POST", "/api/show")}
HARMLESS |= {("POST", f"/v1/images/{name}") for name in IMAGES}
HARMLESS |= {("POST", path) for path in ("/v1/files", "/v1/batches", "/v1/batches/{id}/cancel")}
HARMLESS.add(("DELETE", "/v1/files/{id}"))
TEXTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
HARMLESS |= {("POST", path) for path in (*TEXTS, "/api/chat", "/api/embed", "/api/embeddings")}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())


def asked(
    service: Service,
    paths: list[Any] | str | None = None,
    *,
    tokens: Any = None,
    hosts: Any = frozenset({"127.0.0.1"}),
    origins: str | tuple[str, ...] = (),
    advice: Any = None,
    **headers: Any,
) -> list[tuple[Any, Any, int, CIMultiDictProxy[str], str]]:
    """Request every route, or ``paths``; return method, path, status, headers and text of each."""
    app = build_app(WorkerRole(service), tokens=tokens, hosts=hosts, origins=origins, advice=advice)
    table = {
        (route.method, re.sub(r"\{[^}]*\}", "x", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None
    }
    found = []

    async def ask() -> None:
        async with TestClient(TestServer(app)) as client:
            for method, path in sorted(paths or {*table, *NOT_THERE}):
                timeout = 10
                async with asyncio.timeout(timeout):
                    sent = {name.replace("_", "-"): value for name, value in headers.items()}
                    answer = await client.request(method, path, headers=sent, allow_redirects=False)
                    text = "" if answer.content_type == "text/event-stream" else await answer.text()
                    found.append((method, path, answer.status, answer.headers, text))
                    answer.close()

    asyncio.run(ask())
    assert len(found) > 6 or paths
    return found


def test_every_route_has_a_scope(service: Service) -> None:
    routes = WorkerRole(service).build_routes()
    assert {route.scope for route in routes} <= set(SCOPES)
    table = [(route.method, route.path) for route in routes]
    assert len(table) == len(set(table))
    with pytest.raises(ValueError, match="invalid scope"):
        Route("GET", "/x", routes[0].handler, "anyone")


def test_routes_that_change_state_need_the_admin_scope(service: Service) -> None:
    for route in WorkerRole(service).build_routes():
        if route.method not in ("GET", "HEAD") and (route.method, route.path) not in HARMLESS:
            assert route.scope == ADMIN, route.path
    known = {"/", "/healthz", "/readyz", "/api/version", "/openapi.json", "/docs"}
    known |= {"/v1/worker", "/page/{name:.+}"}
    signed = {"/v1/files/pictures/{name}"}  # the signed URL is the credential
    assert {
        route.path for route in WorkerRole(service).build_routes() if route.scope == OPEN
    } <= known | signed


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        *((kind, True) for kind in ("application/octet-stream", "text/plain", "image/png")),
        *((kind, False) for kind in ("application/json; charset=utf-8", "")),
        ("application/x-www-form-urlencoded", False),
    ],
)
def test_a_body_must_be_declared_as_json(service: Service, kind: str, is_refused: bool) -> None:
    """A client of a registry that uploads a blob to a worker changes nothing."""
    app = build_app(WorkerRole(service), origins=())
    routes = [each for each in WorkerRole(service).build_routes() if each.body is not None]

    async def ask() -> set[bool]:
        async with TestClient(TestServer(app)) as client:
            found = set()
            for route in routes:
                if route.method in ("GET", "HEAD"):
                    continue
                path = re.sub(r"\{[^}]*\}", "x", route.path)
                headers = {"Content-Type": kind} if kind else {}
                skipped = () if kind else ("Content-Type",)
                async with client.request(
                    route.method, path, data=b"[1]", headers=headers, skip_auto_headers=skipped
                ) as answer:
                    found.add(answer.status == 415)
            return found

    assert asyncio.run(ask()) == {is_refused}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:11434", "127.0.0.1.evil.example", "169.254.169.254"]
)
def test_unknown_host_headers_are_refused(service: Service, host: str) -> None:
    ((_, _, status, _, text),) = asked(service, [("GET", "/healthz")], Host=host)
    assert status == 403 and "add it to the allowed hosts" in text


@pytest.mark.parametrize(
    "host",
    [
        "evil@127.0.0.1",
        "127.0.0.1@evil.example",
        "a:b@127.0.0.1:1",
        "127.0.0.1/",
        "127.0.0.1/x",
        "127.0.0.1?x",
        "127.0.0.1#x",
        "http://127.0.0.1",
        "//127.0.0.1",
        "127.0.0.1 evil.example",
        "127.0.0.1,evil.example",
        "127.0.0.1:x",
        "127.0.0.1:-1",
        "127.0.0.1:65536",
        "127.0.0.1:1:2",
        "local%68ost",
        "localhost\\@evil.example",
        "[",
        "[]",
        "[::1",
        "::1",
        "[::1]x",
        "[::1%25lo]",
        "[1.2.3]",
        "[v1.x]",
        ":11434",
        "löcalhost",
    ],
)
@pytest.mark.parametrize("hosts", [None, frozenset({"127.0.0.1", "::1", "localhost"})])
def test_a_host_header_is_a_name_and_a_port(
    service: Service, host: str, hosts: frozenset[str] | None
) -> None:
    """Of any server, also of one that allows all hosts (RFC 9110, 7.2)."""
    assert parse_host(host) is None
    ((_, _, status, _, text),) = asked(service, [("GET", "/healthz")], hosts=hosts, Host=host)
    assert (status, json.loads(text)["error"]["code"]) == (400, "invalid_host")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("LocalHost", "localhost"),
        ("localhost:", "localhost"),
        ("localhost:65535", "localhost"),
        ("[::1]:80", "::1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("my_box-1.example.", "my_box-1.example."),
    ],
)
def test_hosts_of_headers(host: str, name: str) -> None:
    assert parse_host(host) == name


@pytest.mark.parametrize(
    ("headers", "option"),
    [
        ({"Host": "pc.example:1"}, "--allow-host pc.example"),
        ({"Origin": "https://app.example"}, "--allow-origin https://app.example"),
    ],
)
def test_a_refusal_names_the_option_of_the_server(
    service: Service, headers: dict[str, str], option: str
) -> None:
    ((_, _, status, _, text),) = asked(
        service, [("GET", "/v1/models")], advice=format_advice, **headers
    )
    assert status == 403
    assert json.loads(text)["error"]["message"].endswith(f"; start the server with {option}")


@pytest.mark.parametrize(
    ("sent", "message"), [("", "requires a token"), ("x" * 16, "unknown token")]
)
def test_a_wrong_token_is_not_answered_like_a_missing_one(
    service: Service, sent: str, message: str
) -> None:
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    ((_, _, status, _, text),) = asked(service, [("GET", "/v1/models")], tokens=TOKENS, **headers)
    assert status == 401 and message in text


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1.evil.example", "ftp://localhost", "http://["],
)
def test_foreign_origin_headers_are_refused(service: Service, origin: str) -> None:
    ((_, _, status, headers, _),) = asked(service, [("GET", "/healthz")], Origin=origin)
    assert status == 403
    assert not any(name.lower().startswith("access-control") for name in headers)


@pytest.mark.parametrize("form", ["file://{}", "//{}", "http://{}/@evil", "javascript://{}", "{}"])
def test_an_origin_that_no_browser_sends_is_another_one(service: Service, form: str) -> None:
    asking = [("GET", "/healthz")]
    host = "worker.example:80"
    for origin, expected in ((form.format(host), 403), (f"http://{host}", 200)):
        ((_, _, status, _, _),) = asked(
            service, asking, hosts=frozenset({"worker.example"}), Host=host, Origin=origin
        )
        assert status == expected


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://[::1]:1", "app://x"])
def test_allowed_origins_read_and_get_cors_headers(service: Service, origin: str) -> None:
    paths = [("GET", "/v1/models"), ("GET", "/nothing")]
    found = asked(service, paths, origins=("app://x",), Origin=origin, Sec_Fetch_Site="cross-site")
    assert sorted(answer[2] for answer in found) == [200, 404]
    for _, _, _, headers, _ in found:
        assert headers["Access-Control-Allow-Origin"] == origin and headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in headers


def test_a_preflight_request_is_answered_without_a_token(service: Service) -> None:
    paths = [("OPTIONS", "/v1/images/generations")]
    names = "authorization, content-type"
    sent = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    sent["Access-Control-Request-Headers"] = names
    ((_, _, status, headers, _),) = asked(service, paths, tokens=TOKENS, **sent)
    assert (status, headers["Access-Control-Allow-Headers"]) == (204, names)
    assert "POST" in headers["Access-Control-Allow-Methods"]
    sent["Origin"] = "http://evil.example"
    assert asked(service, paths, tokens=TOKENS, **sent)[0][2] == 403


def test_admin_routes_require_a_token_from_other_origins(service: Service) -> None:
    headers = {"Origin": "http://localhost:3000"}
    refused = {
        (method, path) for method, path, status, _, _ in asked(service, **headers) if status == 403
    }
    assert {item for item in refused if item[0] != "HEAD"} == admins(service)
    headers["Authorization"] = f"Bearer {ADMIN_TOKEN}"
    assert not [one for one in asked(service, tokens=TOKENS, **headers) if one[2] in (401, 403)]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_state_changing_requests_from_other_sites_are_refused(service: Service, site: str) -> None:
    for method, path, status, _, _ in asked(service, Sec_Fetch_Site=site):
        if method not in ("GET", "HEAD"):
            assert status == 403, (method, path)


def test_responses_have_no_cors_headers(service: Service) -> None:
    paths = [("OPTIONS", "/v1/images/generations"), ("GET", "/metrics"), ("GET", "/nothing")]
    for _, path, _, headers, _ in asked(service, paths, Access_Control_Request_Method="POST"):
        assert not any(name.lower().startswith("access-control") for name in headers), path
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"] == "aimage"
        assert re.fullmatch(r"[0-9a-f]{16}", headers["X-Request-Id"])


@pytest.mark.parametrize("shown", ["Bearer", "Bearer wrong", "Bearer \u00e9", "Basic !", "x y z"])
def test_invalid_authorization_headers_are_refused(service: Service, shown: str) -> None:
    paths = [("GET", "/metrics")]
    ((_, _, status, headers, text),) = asked(service, paths, tokens=TOKENS, Authorization=shown)
    assert status == 401
    is_unknown = shown in ("Bearer wrong", "Bearer \u00e9")
    assert ("unknown token" if is_unknown else "requires a token") in text
    assert headers["WWW-Authenticate"].startswith("Bearer")


def admins(service: Service) -> set[Any]:
    return {
        (route.method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in WorkerRole(service).build_routes()
        if route.scope == ADMIN
    }


def test_an_infer_token_is_refused_on_admin_routes(service: Service) -> None:
    headers = {"Authorization": f"Bearer {INFER_TOKEN}"}
    refused = set()
    for method, path, status, _, _ in asked(service, tokens=TOKENS, **headers):
        assert status != 401, (method, path)
        if status == 403 and method != "HEAD":
            refused.add((method, path))
    assert refused == admins(service)


def test_an_admin_token_is_accepted_as_bearer_or_basic_password(service: Service) -> None:
    basic = "Basic " + __import__("base64").b64encode(f"me:{ADMIN_TOKEN}".encode()).decode()
    for shown in (f"Bearer {ADMIN_TOKEN}", f"bearer {ADMIN_TOKEN}", basic):
        answers = asked(service, [("GET", "/metrics")], tokens=TOKENS, Authorization=shown)
        assert [answer[2] for answer in answers] == [200]


def test_any_key_is_accepted_without_configured_tokens(service: Service) -> None:
    answers = asked(service, [("GET", "/metrics")], Authorization="Bearer sk-whatever")
    assert answers[0][2] == 200


def test_a_configured_host_header_is_accepted(service: Service) -> None:
    answers = asked(
        service,
        [("GET", "/healthz")],
        hosts=frozenset({"pictures.example"}),
        Host="Pictures.Example",
    )
    assert answers[0][2] == 200


# -- tokens


def test_a_token_file_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# mine\nadmin {ADMIN_TOKEN}\n\n  infer\t{INFER_TOKEN}  \nnode {'b' * 16}\n")
    assert read_tokens(path) == {ADMIN_TOKEN: ADMIN, INFER_TOKEN: INFER, "b" * 16: NODE}


@pytest.mark.parametrize(("mode", "is_warned"), [(0o644, True), (0o640, False), (0o600, False)])
def test_a_token_file_that_all_users_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"admin {ADMIN_TOKEN}")
    path.chmod(mode)
    assert read_tokens(path) == {ADMIN_TOKEN: ADMIN}
    assert ("all users can read" in caplog.text) == is_warned


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing\n", "short\n", "admin short\n", f"owner {'x' * 16}\n"),
        *(f"admin {'x' * 16} y\n", "x" * 15 + "\u00e9\n"),
        f"admin {'x' * 16}\ninfer {'x' * 16}\n",
    ],
)
def test_an_invalid_token_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        read_tokens(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_tokens(tmp_path / "absent")


SECRET = "s3cret" * 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SECRET, "no scope"),
        (f"infer:{SECRET}", "a space separates"),
        (f"Admin: {SECRET}", "a space separates"),
        (f"owner {SECRET}", "its scope is unknown"),
        (f"owner:{SECRET}", "no scope"),
        (f"read {SECRET}", "no scope 'read'"),
        (f"{SECRET} infer", "its scope is unknown"),
        (f"infer {SECRET} # of a client", "more than a scope and a token"),
        (f"infer {SECRET[:15]}", "too short"),
        ("infer", "no token"),
    ],
)
def test_an_invalid_line_is_named_and_not_shown(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# the first\nadmin {ADMIN_TOKEN}\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_tokens(path)
    assert f"line 3 of {path}: " in caught.value.message
    assert reason in caught.value.message
    assert "'infer TOKEN'" in str(caught.value.hint)
    assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "worker.example:80"])
def test_a_non_loopback_address_requires_a_token(address: str) -> None:
    with pytest.raises(UsageError, match="without tokens") as caught:
        check_access(Endpoint.parse_listen(address), is_allowed=False)
    assert caught.value.remedy == "listen_without_tokens"
    check_access(Endpoint.parse_listen(address), is_allowed=True)


@pytest.mark.parametrize("address", ["localhost:11434", "[::1]:1"])
def test_a_loopback_address_requires_no_token(address: str) -> None:
    check_access(Endpoint.parse_listen(address), is_allowed=False)


def test_remote_access_without_tokens_is_allowed_by_address_and_by_the_name_of_the_machine() -> (
    None
):
    with contextlib.closing(listen("0.0.0.0:0", has_tokens=False, allow_remote=True)) as opened:
        hosts = opened.hosts
    assert hosts is not None and socket.gethostname().lower() in hosts
    with contextlib.closing(listen("0.0.0.0:0", has_tokens=True)) as opened:
        assert opened.hosts is None


@pytest.mark.parametrize(
    ("host", "status"), [("192.0.2.7:11434", 200), ("[2001:db8::1]", 200), ("evil.example", 403)]
)
def test_the_names_of_other_sites_are_refused_without_tokens(
    service: Service, host: str, status: int
) -> None:
    hosts = frozenset({"localhost", ANY_ADDRESS})
    assert asked(service, [("GET", "/healthz")], hosts=hosts, Host=host)[0][2] == status


# -- the unix socket


def test_a_unix_socket_is_accessible_to_its_group_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "aimage.sock"
    with listen_unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o777 == 0o750 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen_unix(path).close()
    assert path.exists()
    with listen_unix(path), pytest.raises(AccessError, match="another process is listening"):
        listen_unix(path)


def test_a_unix_socket_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="is not a socket"):
            listen_unix(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_unix_socket_in_a_world_writable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(UsageError, match="is world-writable"):
        listen_unix(tmp_path / "open" / "s")
    with pytest.raises(AccessError, match="cannot listen"):
        listen_unix(tmp_path / ("x" * 200))


# -- over the wire


def over(path: Path, text: bytes) -> bytes:
    """Send raw bytes to a unix socket and return the status line."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(str(path))
        line.sendall(text)
        return line.makefile("rb").readline()


def test_a_unix_socket_checks_the_host_header(
    worker: LocalWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "run" / "s"
    other = worker.start("--socket", path)
    assert other.urls == [f"unix://{path}"]
    assert b" 200 " in over(path, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 403 " in over(path, b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert b" 403 " in over(path, b"GET /healthz HTTP/1.0\r\n\r\n")
    other.end()
    assert not path.exists()


def test_a_non_loopback_address_is_served_with_a_token_only(
    worker: LocalWorker, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {ADMIN_TOKEN}\ninfer {INFER_TOKEN}\n")
    done = worker.aimage("serve", "--addr", "0.0.0.0:0", code=2)
    assert "without tokens" in done.err
    other = worker.start("--addr", "0.0.0.0:0", "--token-file", tokens)
    port = int(other.url.rpartition(":")[2])
    for token, status in (("", 401), (INFER_TOKEN, 200), (ADMIN_TOKEN, 200)):
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"Authorization": f"Bearer {token}", "Host": "worker.example"} if token else {}
        line.request("GET", "/metrics", headers=headers)
        assert line.getresponse().status == status
        line.close()


# -- limits


def raw(worker: LocalWorker, text: bytes) -> bytes:
    """Send raw bytes over TCP and return the status line."""
    host, port = worker.host.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(text)
        return line.makefile("rb").readline()


def request(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "text",
    [
        request("GET", "/" + "x" * 20_000),
        request("GET", "/healthz", "X-Long: " + "x" * 20_000),
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        request("POST", "/api/show", "Content-Length: 4", "Content-Length: 5", body=b"null"),
        request("POST", "/api/show", "Content-Length: -1"),
        request("POST", "/x", "Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n"),
        b"GET /healthz HTTP/9.9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids="line header hosts lengths length smuggled version tls".split(),
)
def test_malformed_or_oversized_requests_are_refused(worker: LocalWorker, text: bytes) -> None:
    assert raw(worker, text).split()[1:2] == [b"400"]
    assert worker.get("/healthz") == {"status": "ok"}


def test_a_large_body_is_refused_before_it_is_sent(worker: LocalWorker) -> None:
    head = request("POST", "/nothing", f"Content-Length: {1 << 40}")
    assert b" 413 " in raw(worker, head)


def test_an_endless_body_is_refused(worker: LocalWorker) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    host, port = worker.host.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(request("POST", "/nothing", "Transfer-Encoding: chunked"))
        with pytest.raises(ConnectionError):
            while True:
                line.sendall(chunk)
    assert worker.get("/healthz") == {"status": "ok"}


def test_a_compressed_body_is_not_decompressed(worker: LocalWorker) -> None:
    import gzip

    body = gzip.compress(b"0" * (64 << 20))
    head = request(
        "POST", "/nothing", "Content-Encoding: gzip", f"Content-Length: {len(body)}", body=body
    )
    assert raw(worker, head).split()[1] == b"415"
    assert worker.get("/healthz") == {"status": "ok"}
