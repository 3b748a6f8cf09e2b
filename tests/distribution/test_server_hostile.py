"""Paths out of the store, cross-site requests, and damaged content."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from clowder_aimage.errors import (
    AImageError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    VerificationError,
)
from clowder_aimage.http.api_error import OCI, convert_error
from tests.distribution.served import Server, digest_of, error_of, manifest_of

HEX = "0123456789abcdef" * 4
# One name per rule; the parser's corpus is in tests/oci
BAD_DIGESTS = [
    "sha256:" + "../" * 21 + "x",
    "sha256:" + HEX.upper(),
    "sha256:" + HEX[:-1] + "\0",
    "md5:" + HEX[:32],
]


def raw_ask(server: Server, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Request a path exactly as written, which requests would normalise."""
    host, port = server.address
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for key, value in {"Content-Length": "0", **headers}.items():
            connection.putheader(key.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def code_of(body: bytes) -> str:
    return str(json.loads(body)["errors"][0]["code"])


@pytest.mark.parametrize("digest", BAD_DIGESTS)
def test_bad_digest_is_refused_everywhere(server: Server, digest: str) -> None:
    before = server.blobs()
    encoded = quote(digest, safe="")
    upload = server.begin()
    targets = [
        ("GET", f"/v2/a/b/blobs/{encoded}"),
        ("DELETE", f"/v2/a/b/blobs/{encoded}"),
        ("GET", f"/v2/a/b/manifests/{encoded}"),
        ("DELETE", f"/v2/a/b/manifests/{encoded}"),
        ("GET", f"/v2/a/b/referrers/{encoded}"),
        ("POST", f"/v2/a/b/blobs/uploads/?digest={encoded}"),
        ("POST", f"/v2/a/b/blobs/uploads/?mount={encoded}&from=a/b"),
        ("PUT", f"{upload}?digest={encoded}"),
    ]
    for method, path in targets:
        status, body = raw_ask(server, method, path)
        assert (status, code_of(body)) == (400, "DIGEST_INVALID"), (method, path)
    raw = manifest_of(config={"mediaType": "x/y", "digest": digest, "size": 2})
    assert error_of(server.put_manifest(raw, "t")) == (400, "MANIFEST_INVALID")
    assert server.ask("DELETE", upload).status_code == 204
    assert server.blobs() == before


@pytest.mark.parametrize(
    "path",
    [
        "/v2/a/b/blobs/sha256:../../../secret",
        "/v2/../../secret/blobs/sha256:" + HEX,
        "/../secret",
        "/v2/a/b/manifests/..%2f..%2f..%2fsecret",
        "/v2/a%00b/blobs/sha256:" + HEX,
        "/v2/%ff%fe/tags/list",
    ],
)
def test_paths_outside_the_layout_are_refused(server: Server, path: str) -> None:
    (server.root.parent / "secret").write_bytes(b"keep out")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        status, body = raw_ask(server, method, path)
        assert 400 <= status < 500, (method, status, body)
        assert b"keep out" not in body
    assert (server.root.parent / "secret").read_bytes() == b"keep out"


@pytest.mark.parametrize(
    "name",
    ["A", "a//b", "ä", "a:b", "a@b", "a" * 256],
)
def test_bad_repository_name_is_refused(server: Server, name: str) -> None:
    for rest in ("tags/list", "manifests/t", f"blobs/{digest_of(b'')}"):
        status, body = raw_ask(server, "GET", f"/v2/{quote(name)}/{rest}")
        assert (status, code_of(body)) == (400, "NAME_INVALID")
    status, body = raw_ask(server, "POST", f"/v2/{quote(name)}/blobs/uploads/")
    assert (status, code_of(body)) == (400, "NAME_INVALID")


@pytest.mark.parametrize("tag", ["-a", "a" * 129, "a@b", "a\n"])
def test_bad_tag_is_refused(server: Server, tag: str) -> None:
    server.push_blob(b"{}")
    answer = server.put_manifest(manifest_of(), quote(tag))
    assert error_of(answer)[1] == "MANIFEST_UNKNOWN"
    assert error_of(server.ask("GET", f"/v2/a/b/manifests/{quote(tag)}"))[0] == 404


@pytest.mark.parametrize("host", ["evil.example:80", "localhost.evil", ""])
def test_foreign_host_headers_are_refused(server: Server, host: str) -> None:
    for method, path in (("GET", "/v2/"), ("POST", "/v2/a/b/blobs/uploads/"), ("GET", "/nope")):
        status, body = raw_ask(server, method, path, Host=host)
        assert (status, code_of(body)) == (403, "DENIED")


@pytest.mark.parametrize("host", ["LOCALHOST:1", "[::1]:5000"])
def test_local_host_headers_are_accepted(server: Server, host: str) -> None:
    assert raw_ask(server, "GET", "/v2/", Host=host)[0] == 200


def test_cross_site_requests_are_refused(server: Server) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        answer = server.ask("POST", "/v2/a/b/blobs/uploads/", headers={"Origin": origin})
        assert error_of(answer) == (403, "DENIED")
    own = server.ask("POST", "/v2/a/b/blobs/uploads/", headers={"Origin": server.url})
    assert own.status_code == 202


def test_readonly(tmp_path: Path, server: Server, serve_layout: Callable[..., Server]) -> None:
    raw = server.push("t", b"x", name="read/only")
    reader = serve_layout(server.root, "readonly")
    assert reader.ask("GET", "/v2/read/only/manifests/t").content == raw
    assert reader.ask("HEAD", f"/v2/read/only/blobs/{digest_of(b'x')}").status_code == 200
    for method, path in (
        ("POST", "/v2/read/only/blobs/uploads/"),
        ("PUT", "/v2/read/only/manifests/t2"),
        ("DELETE", "/v2/read/only/manifests/t"),
        ("PATCH", "/v2/read/only/blobs/uploads/x"),
    ):
        answer = reader.ask(method, path)
        assert error_of(answer) == (405, "UNSUPPORTED")
        assert answer.headers["Allow"] == "GET, HEAD"
    assert reader.ask("GET", "/v2/read/only/tags/list").json()["tags"] == ["t"]


def test_damaged_manifest_is_not_served(server: Server) -> None:
    raw = server.push("t", b"x", name="a/damaged")
    path = server.root / "blobs" / "sha256" / digest_of(raw).partition(":")[2]
    path.chmod(0o644)
    path.write_bytes(raw.replace(b"layers", b"slayer"))
    assert error_of(server.ask("GET", "/v2/a/damaged/manifests/t")) == (500, "UNKNOWN")
    path.unlink()
    assert error_of(server.ask("GET", "/v2/a/damaged/manifests/t")) == (404, "MANIFEST_UNKNOWN")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NoSpaceError("/secret/path is full"), 507, "no space left"),
        (StoreError("cannot use /secret/path"), 503, "cannot access the store"),
        (VerificationError("sha256:... in /secret/path"), 500, "the stored content is damaged"),
        (NotFoundError("gone from /secret/path"), 500, "unknown error"),
    ],
)
def test_store_errors_are_reported(error: AImageError, status: int, message: str) -> None:
    answer = convert_error(error, OCI)
    assert (answer.status, answer.message) == (status, message)


def test_a_store_that_cannot_be_read_is_said_as_that(
    serve_layout: Callable[..., Server], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    server = serve_layout(root)
    raw = server.push("t")
    index = (root / "index.json").read_bytes()
    reads = ["_catalog", "a/b/tags/list", "a/b/manifests/t"]

    def check(status: int, *paths: str) -> None:
        for path in paths:
            answer = server.ask("GET", f"/v2/{path}")
            assert answer.status_code == status, (path, answer.text)
            assert answer.headers.get("Retry-After") == (None if status == 200 else "5")
            assert str(tmp_path) not in answer.text

    (root / "index.json").write_text("garbage")
    os.utime(root / "index.json", (0, 0))  # no other tool is writing it
    check(503, *reads)
    root.rename(tmp_path / "away")
    check(503, *reads, f"a/b/blobs/{digest_of(raw)}")
    query = {"digest": digest_of(b"new")}
    assert server.ask("PUT", server.begin(), params=query, data=b"new").status_code == 503
    assert not root.exists()
    (tmp_path / "away").rename(root)
    (root / "index.json").write_bytes(index)
    check(200, *reads)


def test_layer_is_not_served_as_a_manifest(server: Server) -> None:
    """A blob that parses as a manifest is not one where it was not pushed as one."""
    raw = manifest_of()
    server.push_blob(raw)
    answer = server.ask("GET", f"/v2/a/b/manifests/{digest_of(raw)}")
    assert error_of(answer) == (404, "MANIFEST_UNKNOWN")
