"""Many clients at once, large blobs in limited memory, and skopeo as the client."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import requests

from tests.distribution.served import OCI_MANIFEST, RegistryClient, Server, digest_of, manifest_of
from tests.process import run

MIB = 1024 * 1024


@pytest.mark.integration
def test_concurrent_clients(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    server = serve_layout(tmp_path / "store")
    shared = os.urandom(300_000)

    def client(number: int) -> None:
        with requests.Session() as http:
            mine = RegistryClient(server.root, server.url, http)
            own = [f"layer {number} {i}".encode() * 1000 for i in range(4)]
            raw = mine.push(f"tag{number}", shared, *own, name="many/clients")
            back = mine.ask("GET", f"/v2/many/clients/manifests/tag{number}")
            assert back.content == raw
            for layer in json.loads(raw)["layers"]:
                data = mine.ask("GET", f"/v2/many/clients/blobs/{layer['digest']}").content
                assert digest_of(data) == layer["digest"]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    tags = server.ask("GET", "/v2/many/clients/tags/list").json()["tags"]
    assert tags == sorted(f"tag{number}" for number in range(16))
    assert server.ingests() == []


def test_two_clients_push_the_same_blob(server: Server) -> None:
    data = os.urandom(3 * MIB)
    first, second = server.begin("twice/a"), server.begin("twice/b")
    half = len(data) // 2
    for location in (first, second):
        server.ask("PATCH", location, data=data[:half])
    for location in (second, first):
        query = {"digest": digest_of(data)}
        done = server.ask("PUT", location, params=query, data=data[half:])
        assert done.status_code == 201
    assert server.ask("GET", f"/v2/twice/a/blobs/{digest_of(data)}").content == data


def peak_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.integration
def test_memory_is_bounded(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    """160 MiB in and out, by PATCH, PUT and GET, cost the server less than 40 MB."""
    server = serve_layout(tmp_path / "store")
    server.push("warm", os.urandom(MIB))
    before = peak_mib(server)
    piece, hasher = os.urandom(MIB), sha256()

    def body(count: int) -> Iterator[bytes]:
        for _ in range(count):
            hasher.update(piece)
            yield piece

    location = server.begin()
    assert server.ask("PATCH", location, data=body(128)).status_code == 202
    last = piece * 32
    hasher.update(last)
    digest = "sha256:" + hasher.hexdigest()
    done = server.ask("PUT", location, params={"digest": digest}, data=last)
    assert done.status_code == 201
    with server.ask("GET", done.headers["Location"], stream=True) as answer:
        received = sha256()
        for chunk in answer.iter_content(MIB):
            received.update(chunk)
    assert f"sha256:{received.hexdigest()}" == digest
    assert peak_mib(server) - before < 40


@pytest.mark.integration
def test_skopeo_copies_in_and_out(server: Server, skopeo: str, tmp_path: Path) -> None:
    layers = [os.urandom(100_000), b"small"]
    raw = server.push("v1", *layers, name="for/skopeo")
    host = server.url.removeprefix("http://")

    def run_skopeo(*arguments: str) -> bytes:
        command = [skopeo, "--insecure-policy", *arguments]
        return run(command, check=True, timeout=60).stdout

    out, back = f"docker://{host}/for/skopeo:v1", f"docker://{host}/skopeo.back/again:v2"
    run_skopeo("copy", "--src-tls-verify=false", out, f"oci:{tmp_path}/layout:v1")
    index = json.loads((tmp_path / "layout" / "index.json").read_text())
    assert index["manifests"][0]["digest"] == digest_of(raw)
    run_skopeo("copy", "--dest-tls-verify=false", f"oci:{tmp_path}/layout:v1", back)
    assert run_skopeo("inspect", "--raw", "--tls-verify=false", back) == raw
    answer = server.ask("GET", "/v2/skopeo.back/again/manifests/v2")
    assert (answer.content, answer.headers["Content-Type"]) == (raw, OCI_MANIFEST)
    listed = run_skopeo("list-tags", "--tls-verify=false", f"docker://{host}/for/skopeo")
    assert json.loads(listed)["Tags"] == ["v1"]


@pytest.mark.integration
def test_skopeo_pushes_new_blobs(server: Server, skopeo: str, tmp_path: Path) -> None:
    """The layout is unknown to the server, so skopeo uploads every blob."""
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers = [os.urandom(2 * MIB), os.urandom(10)]
    raw = manifest_of(*layers)
    for data in (b"{}", *layers, raw):
        (blobs / digest_of(data).partition(":")[2]).write_bytes(data)
    root = tmp_path / "layout"
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    entry = {"mediaType": OCI_MANIFEST, "digest": digest_of(raw), "size": len(raw)}
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    target = f"docker://{server.url.removeprefix('http://')}/new/blobs:v1"
    command = [
        skopeo,
        "--insecure-policy",
        "copy",
        "--dest-tls-verify=false",
        f"oci:{root}",
        target,
    ]
    run(command, check=True, timeout=60)
    assert server.ask("GET", "/v2/new/blobs/manifests/v1").content == raw
    assert server.ask("GET", f"/v2/new/blobs/blobs/{digest_of(layers[0])}").content == layers[0]
