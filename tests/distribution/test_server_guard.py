"""Token authentication, and timeouts of connections."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import requests
from aiohttp import web

from clowder_aimage.config.token_file import REGISTRY_SCOPES, read_tokens
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.errors import UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.repository_record import RepositoryRecords
from clowder_aimage.oci import Descriptor, Reference, mediatype, parse_document
from tests.distribution.served import Server, digest_of, error_of
from tests.process import run
from tests.registry_app import registry_app

TOKEN = "correct-horse-battery-staple"
READ_TOKEN, WRITE_TOKEN = "r" * 16, "w" * 16
Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, serve_layout: Serve) -> Server:
    more = (f"read-token={READ_TOKEN}", f"write-token={WRITE_TOKEN}")
    server = serve_layout(tmp_path_factory.mktemp("guarded") / "store", f"token={TOKEN}", *more)
    server.http.headers["Authorization"] = f"Bearer {TOKEN}"
    server.push("t", b"x")
    return server


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        f"Bearer {TOKEN}x",
        f"Token {TOKEN}",
        basic(TOKEN, ""),
        "Basic %%%",
        "Bearer ünïcode",
    ],
)
def test_other_authorizations_are_refused(guarded: Server, authorization: str) -> None:
    headers = {"Authorization": authorization.encode("latin-1")} if authorization else {}
    answer = requests.get(guarded.url + "/v2/", headers=headers, timeout=60)
    assert error_of(answer) == (401, "UNAUTHORIZED")
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")


def test_every_route_requires_the_token(guarded: Server) -> None:
    digest = digest_of(b"x")
    for method, path in (
        ("GET", "/v2/_catalog"),
        ("GET", "/v2/a/b/tags/list"),
        ("GET", "/v2/a/b/manifests/t"),
        ("DELETE", "/v2/a/b/manifests/t"),
        ("GET", f"/v2/a/b/blobs/{digest}"),
        ("POST", "/v2/a/b/blobs/uploads/"),
        ("GET", f"/v2/a/b/referrers/{digest}"),
        ("GET", "/nowhere"),
    ):
        answer = requests.request(method, guarded.url + path, timeout=60)
        assert error_of(answer) == (401, "UNAUTHORIZED"), path


@pytest.mark.parametrize("authorization", [f"bearer {TOKEN}", basic("", TOKEN)])
def test_valid_token_is_accepted(guarded: Server, authorization: str) -> None:
    headers = {"Authorization": authorization}
    path = f"{guarded.url}/v2/a/b/manifests/t"
    assert requests.get(path, headers=headers, timeout=60).status_code == 200


@pytest.mark.integration
def test_skopeo_authenticates(guarded: Server, skopeo: str, tmp_path: Path) -> None:
    source = f"docker://{guarded.url.removeprefix('http://')}/a/b:t"
    command = [skopeo, "inspect", "--raw", "--tls-verify=false", source]
    refused = run(command, timeout=60)
    assert refused.returncode != 0
    known = run([*command, f"--creds=me:{TOKEN}"], timeout=60)
    assert known.returncode == 0, known.stderr


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v2/", (READ_TOKEN, WRITE_TOKEN, TOKEN)),
        ("GET", "/v2/a/b/manifests/t", (READ_TOKEN, WRITE_TOKEN, TOKEN)),
        ("HEAD", "/v2/a/b/manifests/t", (READ_TOKEN, WRITE_TOKEN, TOKEN)),
        ("GET", "/metrics", (READ_TOKEN, WRITE_TOKEN, TOKEN)),
        ("POST", "/v2/a/b/blobs/uploads/", (WRITE_TOKEN, TOKEN)),
        ("PUT", "/v2/a/b/manifests/u", (WRITE_TOKEN, TOKEN)),
        ("DELETE", "/v2/a/b/blobs/uploads/none", (WRITE_TOKEN, TOKEN)),
        ("DELETE", "/v2/a/b/manifests/absent", (TOKEN,)),
        ("DELETE", f"/v2/a/b/blobs/sha256:{'0' * 64}", (TOKEN,)),
    ],
)
def test_a_token_allows_what_its_scope_does(
    guarded: Server, method: str, path: str, allowed: tuple[str, ...]
) -> None:
    for token in (READ_TOKEN, WRITE_TOKEN, TOKEN):
        headers = {"Authorization": basic("me", token)}
        answer = requests.request(method, guarded.url + path, headers=headers, timeout=60)
        assert (answer.status_code == 403) == (token not in allowed), token
        assert answer.status_code != 401


def test_a_registry_has_scopes_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"read {READ_TOKEN}\nadmin {TOKEN}\n")
    assert read_tokens(path, REGISTRY_SCOPES) == {READ_TOKEN: "read", TOKEN: "admin"}
    with pytest.raises(UsageError, match=r"line 1 .* has no scope 'read'"):
        read_tokens(path)


def wait_closed(connection: socket.socket) -> bytes:
    """Read until the server closes the connection; return the data."""
    connection.settimeout(20)
    got = b""
    try:
        while piece := connection.recv(1000):
            got += piece
    except ConnectionResetError:
        pass
    return got


def test_connection_without_a_request_is_closed(impatient: Server) -> None:
    for sent in (b"", b"GET /v2/ HTTP/1.1\r\nHost: local"):
        with socket.create_connection(impatient.address) as connection:
            connection.sendall(sent)
            assert wait_closed(connection) == b""
    with socket.create_connection(impatient.address) as connection:  # kept alive, and then idle
        connection.sendall(b"GET /v2/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wait_closed(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/v2/a/b/manifests/t", "/v2/a/b/blobs/uploads/?digest="])
def test_missing_body_times_out(impatient: Server, path: str) -> None:
    method = "PUT" if "manifests" in path else "POST"
    path += digest_of(b"x" * 9) if "digest" in path else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    with socket.create_connection(impatient.address) as connection:
        kind = "Content-Type: application/vnd.oci.image.manifest.v1+json\r\n\r\n"
        connection.sendall((head + kind).encode() + b"x")
        assert wait_closed(connection).startswith(b"HTTP/1.1 408")
    assert impatient.ingests() == []


@pytest.mark.parametrize("code", [0, errno.EINVAL, errno.ENOSYS])
def test_blobs_are_sent_with_sendfile(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read if the file system of the store refuses it."""

    def refuse(*_: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(os, "sendfile", refuse)
    data = os.urandom(9_000_000)
    layout = ImageLayout(tmp_path)
    content = Descriptor.of("application/octet-stream", data)
    layout.push(content, build_bytes_body(data))
    RepositoryRecords(tmp_path).add_blob("a", content.digest)
    by_kernel: list[int] = []

    async def ask() -> bytes:
        loop = asyncio.get_running_loop()
        sock_sendfile = loop.sock_sendfile

        async def counted(*arguments: Any, **options: Any) -> int:
            assert options["fallback"] is False  # sendfile, or an error
            by_kernel.append(await sock_sendfile(*arguments, **options))
            return by_kernel[-1]

        loop.sock_sendfile = counted  # type: ignore[method-assign]
        runner = web.AppRunner(registry_app(layout))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port)
        head = f"GET /v2/a/blobs/{content.digest} HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        answer = await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        await runner.cleanup()
        return answer

    answer = asyncio.run(ask())
    assert answer.partition(b"\r\n\r\n")[2] == data
    assert sum(by_kernel) == (0 if code else len(data))


def test_referrers_read_each_manifest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ImageLayout(tmp_path)
    subject = Descriptor.of(mediatype.OCI_MANIFEST, b"elsewhere")
    layout.push(Descriptor.of("x/y", b"{}"), build_bytes_body(b"{}"))
    for i in range(3):
        config = Descriptor.of("x/y", b"{}").to_json()
        document = {"schemaVersion": 2, "config": config, "layers": [], "n": i}
        if i:
            document["subject"] = subject.to_json()
        manifest = parse_document(json.dumps(document).encode())
        layout.push(
            manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse(f"a/b:t{i}")
        )
    catalog = Catalog(layout)
    read: list[Descriptor] = []
    original = Catalog.read

    def counted(self: Catalog, descriptor: Descriptor) -> bytes:
        read.append(descriptor)
        return original(self, descriptor)

    monkeypatch.setattr(Catalog, "read", counted)
    catalog = Catalog(layout)
    for _ in range(3):
        found = [each for each in catalog.iter_summaries("a/b") if each.subject == subject.digest]
        assert len(found) == 2
    assert len(read) == 3


def test_remote_access_with_a_token_requires_no_flag(tmp_path: Path, serve_layout: Serve) -> None:
    server = serve_layout(tmp_path, f"token={TOKEN}", address="0.0.0.0:0")
    url = f"http://127.0.0.1:{server.address[1]}/v2/"
    assert requests.get(url, timeout=60).status_code == 401
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "registry.example"}
    assert requests.get(url, headers=headers, timeout=60).status_code == 200
