"""Uploads in every way of the specification ("Pushing blobs")."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.distribution import served_blobs as kept_module
from clowder_aimage.distribution import upload_session as upload_module
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.served_blobs import ServedLeases
from clowder_aimage.distribution.upload_session import UploadSessions
from clowder_aimage.errors import NoSpaceError
from clowder_aimage.http.body_receiver import DIRECT_SIZE
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.lease import read_leases
from clowder_aimage.oci import Descriptor, Digest
from tests.distribution.served import Server, digest_of, error_of
from tests.wait import until

BLOB = bytes(range(256)) * 40


def test_post_then_put(server: Server) -> None:
    location = server.begin()
    answer = server.ask("PUT", location, params={"digest": digest_of(BLOB)}, data=BLOB)
    assert answer.status_code == 201
    assert answer.headers["Docker-Content-Digest"] == digest_of(BLOB)
    assert server.ask("GET", answer.headers["Location"]).content == BLOB
    assert error_of(server.ask("GET", location)) == (404, "BLOB_UPLOAD_UNKNOWN")


def test_post_with_digest_and_body_sent_later_as_ollama_does(server: Server) -> None:
    data = b"in ollama's way" * 100
    path = f"/v2/a/b/blobs/uploads/?digest={digest_of(data)}"
    headers = {"Content-Length": "0", "X-Content-Length": str(len(data))}
    began = server.ask("POST", path, headers=headers)
    assert (began.status_code, began.headers["Range"]) == (202, "0-0")
    part = {"Content-Range": f"0-{len(data) - 1}", "X-Redirect-Uploads": "1"}
    sent = server.ask("PATCH", began.headers["Location"], data=data, headers=part)
    done = server.ask("PUT", sent.headers["Location"], params={"digest": digest_of(data)})
    assert (sent.status_code, done.status_code) == (202, 201)
    again = server.ask("POST", path, headers=headers)
    assert (again.status_code, again.headers["Docker-Content-Digest"]) == (201, digest_of(data))


def test_chunks_in_order(server: Server) -> None:
    location = server.begin()
    for start in range(0, 9000, 3000):
        headers = {"Content-Range": f"{start}-{start + 2999}"}
        answer = server.ask("PATCH", location, data=BLOB[start : start + 3000], headers=headers)
        assert (answer.status_code, answer.headers["Range"]) == (202, f"0-{start + 2999}")
        location = answer.headers["Location"]
        status = server.ask("GET", location)
        assert (status.status_code, status.headers["Range"]) == (204, f"0-{start + 2999}")
    rest = {"Content-Range": f"9000-{len(BLOB) - 1}"}
    query = {"digest": digest_of(BLOB)}
    done = server.ask("PUT", location, params=query, data=BLOB[9000:], headers=rest)
    assert done.status_code == 201
    assert server.ask("GET", done.headers["Location"]).content == BLOB


def test_stream_without_length(server: Server) -> None:
    location = server.begin()
    pieces = (BLOB[i : i + 100] for i in range(0, len(BLOB), 100))
    assert server.ask("PATCH", location, data=pieces).headers["Range"] == f"0-{len(BLOB) - 1}"
    done = server.ask("PUT", location, params={"digest": digest_of(BLOB)})
    assert done.status_code == 201


def test_upload_with_sha512(server: Server) -> None:
    digest = "sha512:" + hashlib.sha512(BLOB).hexdigest()
    done = server.ask("PUT", server.begin(), params={"digest": digest}, data=BLOB)
    assert (done.status_code, done.headers["Docker-Content-Digest"]) == (201, digest)
    assert server.ask("GET", f"/v2/a/b/blobs/{digest}").content == BLOB


@pytest.mark.parametrize("content_range", ["5-14", "11-20"])
def test_chunk_out_of_order_is_refused(server: Server, content_range: str) -> None:
    location = server.begin()
    server.ask("PATCH", location, data=BLOB[:10], headers={"Content-Range": "0-9"})
    headers = {"Content-Range": content_range}
    answer = server.ask("PATCH", location, data=BLOB[:10], headers=headers)
    assert error_of(answer) == (416, "BLOB_UPLOAD_INVALID")
    assert answer.headers["Range"] == "0-9"
    headers = {"Content-Range": "10-19"}
    goes_on = server.ask("PATCH", location, data=BLOB[10:20], headers=headers)
    assert (goes_on.status_code, goes_on.headers["Range"]) == (202, "0-19")


@pytest.mark.parametrize("content_range", ["bytes 0-9/10", "0-", "a-b"])
def test_invalid_content_range_is_refused(server: Server, content_range: str) -> None:
    headers = {"Content-Range": content_range}
    answer = server.ask("PATCH", server.begin(), data=BLOB[:10], headers=headers)
    assert error_of(answer) == (400, "BLOB_UPLOAD_INVALID")


@pytest.mark.parametrize("end", [3, 30])
def test_chunk_with_a_wrong_length_is_refused(server: Server, end: int) -> None:
    headers = {"Content-Range": f"0-{end}"}
    location = server.begin()
    with_length = server.ask("PATCH", location, data=BLOB[:10], headers=headers)
    assert error_of(with_length) == (400, "SIZE_INVALID")
    streamed = server.ask("PATCH", location, data=iter([BLOB[:10]]), headers=headers)
    assert error_of(streamed) == (400, "SIZE_INVALID")
    kept = 0 if end == 3 else 10  # an excess chunk is discarded, a short one can be continued
    headers = {"Content-Range": f"{kept}-{kept + 4}"}
    goes_on = server.ask("PATCH", location, data=BLOB[kept : kept + 5], headers=headers)
    assert (goes_on.status_code, goes_on.headers["Range"]) == (202, f"0-{kept + 4}")


@pytest.mark.parametrize("way", ["single", "put", "patch"])
def test_wrong_digest_leaves_nothing(server: Server, way: str) -> None:
    lie = digest_of(f"not what is sent {way}".encode())
    if way == "single":
        answer = server.ask("POST", f"/v2/a/b/blobs/uploads/?digest={lie}", data=BLOB)
    else:
        location = server.begin()
        if way == "patch":
            server.ask("PATCH", location, data=BLOB)
        body = b"" if way == "patch" else BLOB
        answer = server.ask("PUT", location, params={"digest": lie}, data=body)
        assert error_of(server.ask("GET", location)) == (404, "BLOB_UPLOAD_UNKNOWN")
    assert error_of(answer) == (400, "DIGEST_INVALID")
    assert server.ask("HEAD", f"/v2/a/b/blobs/{lie}").status_code == 404
    assert lie.partition(":")[2] not in server.blobs()


def test_put_without_digest_keeps_the_upload(server: Server) -> None:
    location = server.begin()
    server.ask("PATCH", location, data=BLOB)
    assert error_of(server.ask("PUT", location)) == (400, "DIGEST_INVALID")
    assert server.ask("PUT", location, params={"digest": digest_of(BLOB)}).status_code == 201


def test_cancelled_upload_is_removed(server: Server) -> None:
    before = set(server.ingests())
    location = server.begin()
    server.ask("PATCH", location, data=BLOB)
    assert len(set(server.ingests()) - before) == 1
    assert server.ask("DELETE", location).status_code == 204
    assert error_of(server.ask("DELETE", location)) == (404, "BLOB_UPLOAD_UNKNOWN")
    assert set(server.ingests()) == before


def test_upload_belongs_to_its_repository(server: Server) -> None:
    location = server.begin("one/repo")
    for method in ("GET", "PATCH", "PUT", "DELETE"):
        answer = server.ask(method, location.replace("one/repo", "two/repo"))
        assert error_of(answer) == (404, "BLOB_UPLOAD_UNKNOWN")


def test_mount_from_another_repository(server: Server) -> None:
    server.push_blob(BLOB, "from/here")
    query = {"mount": digest_of(BLOB), "from": "from/here"}
    mounted = server.ask("POST", "/v2/to/there/blobs/uploads/", params=query)
    assert mounted.status_code == 201
    assert mounted.headers["Location"] == f"/v2/to/there/blobs/{digest_of(BLOB)}"
    query["mount"] = digest_of(b"absent")
    begun = server.ask("POST", "/v2/to/there/blobs/uploads/", params=query)
    assert begun.status_code == 202
    done = server.ask(
        "PUT", begun.headers["Location"], params={"digest": digest_of(b"absent2")}, data=b"absent2"
    )
    assert done.status_code == 201


def test_content_encoding_is_not_decoded(server: Server) -> None:
    """A gzip layer stays compressed, and a small body cannot expand."""
    packed = gzip.compress(b"0" * 10_000_000)
    headers = {"Content-Encoding": "gzip"}
    path = f"/v2/a/b/blobs/uploads/?digest={digest_of(packed)}"
    answer = server.ask("POST", path, data=packed, headers=headers)
    assert answer.status_code == 201, answer.text
    assert server.ask("GET", answer.headers["Location"]).content == packed


def send_half(server: Server, location: str, total: int, half: bytes) -> socket.socket:
    """Send the head of a PATCH and the first part of a body of ``total`` bytes."""
    connection = socket.create_connection(server.address)
    head = f"PATCH {location} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {total}\r\n\r\n"
    connection.sendall(head.encode() + half)
    return connection


def wait_for_range(server: Server, location: str, wanted: str) -> None:
    until(lambda: server.ask("GET", location).headers["Range"] == wanted, wanted)


def test_broken_connection_keeps_received_bytes(server: Server) -> None:
    location = server.begin()
    with send_half(server, location, len(BLOB), BLOB[:5000]):
        pass
    wait_for_range(server, location, "0-4999")
    headers = {"Content-Range": f"5000-{len(BLOB) - 1}"}
    query = {"digest": digest_of(BLOB)}
    done = server.ask("PUT", location, params=query, data=BLOB[5000:], headers=headers)
    assert done.status_code == 201


LARGE = os.urandom(2 * DIRECT_SIZE + 12_345)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(10_000):
        received += data
    return received


def test_large_body_is_received_past_the_parser(server: Server) -> None:
    """Of the pieces, the first is with the head, and others end within a page of the file."""
    location = server.begin()
    with send_half(server, location, len(LARGE), LARGE[:777]) as connection:
        for start, end in ((777, 3_000_001), (3_000_001, len(LARGE))):
            connection.sendall(LARGE[start:end])
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 202"), answer
    assert b"\r\nConnection: close\r\n" in answer
    assert server.ask("GET", location).headers["Range"] == f"0-{len(LARGE) - 1}"
    query = {"digest": digest_of(LARGE)}
    assert server.ask("PUT", location, params=query).status_code == 201
    assert server.ask("GET", f"/v2/a/b/blobs/{digest_of(LARGE)}").content == LARGE


def test_broken_connection_keeps_the_received_bytes_of_a_large_body(server: Server) -> None:
    location, half = server.begin(), len(LARGE) // 2 + 7
    with send_half(server, location, len(LARGE), LARGE[:half]):
        pass
    wait_for_range(server, location, f"0-{half - 1}")
    query = {"digest": digest_of(LARGE)}
    assert server.ask("PUT", location, params=query, data=LARGE[half:]).status_code == 201


def test_stalled_large_body_is_refused(impatient: Server) -> None:
    location = impatient.begin()
    with send_half(impatient, location, len(LARGE), LARGE[:5_000_000]) as connection:
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert impatient.ask("GET", location).headers["Range"] == "0-4999999"


def test_request_behind_a_large_body_is_not_a_part_of_it(server: Server) -> None:
    """It is left to the client, as the connection ends."""
    location = f"{server.begin()}?digest={digest_of(LARGE)}".encode()
    head = b"PUT %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    further = b"DELETE /v2/a/b/manifests/t HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(head % (location, len(LARGE)) + LARGE + further)
        with contextlib.suppress(ConnectionResetError):
            assert read_to_end(connection).count(b"HTTP/1.1") == 1
    blob = server.ask("GET", f"/v2/a/b/blobs/{digest_of(LARGE)}")
    assert blob.content == LARGE


def test_broken_single_post_leaves_nothing(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path)
    with socket.create_connection(server.address) as connection:
        path = f"/v2/a/b/blobs/uploads/?digest={digest_of(BLOB)}"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BLOB)}\r\n\r\n"
        connection.sendall(head.encode() + BLOB[:5000])
        until(lambda: count_uploads(server) == "1.0", "the upload")
    until(lambda: count_uploads(server) == "0.0", "its end")
    assert server.ingests() == []


def count_uploads(server: Server) -> str:
    lines = server.ask("GET", "/metrics").text.splitlines()
    return next(line for line in lines if line.startswith("aimage_registry_uploads ")).split()[1]


def test_chunks_of_one_upload_do_not_mix(server: Server) -> None:
    """A second request waits while the first one of the same upload is being received."""
    location = server.begin()
    first, second = bytes(2 * 1024 * 1024), b"second"
    with send_half(server, location, 2 * len(first), first) as one:
        for _ in range(10_000):
            if server.ask("GET", location).headers["Range"] != "0-0":
                break
        with send_half(server, location, len(second), second) as two:
            for _ in range(20):
                server.ask("GET", location)
            one.sendall(first)
            for connection in (one, two):
                assert connection.recv(1000).startswith(b"HTTP/1.1 202")
    query = {"digest": digest_of(first + first + second)}
    assert server.ask("PUT", location, params=query).status_code == 201


@pytest.mark.parametrize("rest", [b"", b"not the size of a chunk\r\n"])
def test_stalled_or_malformed_body_is_refused(impatient: Server, rest: bytes) -> None:
    """The client receives an error, and received bytes are kept."""
    server = impatient
    location = server.begin()
    head = f"PATCH {location} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode() + b"200000\r\n" + bytes(0x200000) + b"\r\n")
        for _ in range(10_000):
            if server.ask("GET", location).headers["Range"] != "0-0":
                break
        connection.sendall(rest)
        answer = b""
        while not answer.endswith(b"]}"):
            received = connection.recv(1000)
            assert received, answer
            answer += received
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b"BLOB_UPLOAD_INVALID" in answer
    assert server.ask("GET", location).headers["Range"] == "0-2097151"


@pytest.mark.integration
def test_killed_server_keeps_no_blob(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    root = tmp_path / "store"
    server = serve_layout(root)
    location = server.begin()
    half = bytes(2 * 1024 * 1024)
    with send_half(server, location, 2 * len(half), half):
        for _ in range(10_000):
            sizes = [path.stat().st_size for path in server.ingests()]
            if sizes and sizes[0] >= 1024 * 1024:
                break
            server.ask("GET", "/v2/")
        assert sizes[0] >= 1024 * 1024
        server.stop(signal.SIGKILL)
    assert server.blobs() == set()

    again = serve_layout(root)
    assert error_of(again.ask("GET", location)) == (404, "BLOB_UPLOAD_UNKNOWN")
    raw = again.push("t", BLOB)
    assert again.ask("GET", "/v2/a/b/manifests/t").content == raw


@pytest.mark.integration
def test_stop_aborts_uploads(tmp_path: Path, serve_layout: Callable[..., Server]) -> None:
    server = serve_layout(tmp_path / "store")
    server.ask("PATCH", server.begin(), data=BLOB)
    assert len(server.ingests()) == 1
    assert server.stop() == (0, "")
    assert server.ingests() == []


@pytest.mark.integration
def test_stop_does_not_wait_for_stalled_clients(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    server = serve_layout(tmp_path / "store", "impatient=2")
    large = bytes(32 * 1024 * 1024)  # more than the sockets buffer
    server.push_blob(large)
    get = f"GET /v2/a/b/blobs/{digest_of(large)} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    location = server.begin()
    with (
        send_half(server, location, 2 * len(BLOB), BLOB),
        socket.create_connection(server.address) as reader,
    ):
        reader.sendall(get.encode())
        assert reader.recv(10) == b"HTTP/1.1 2"
        assert server.stop() == (0, "")
    assert server.ingests() == []


def test_idle_uploads_expire(tmp_path: Path) -> None:
    now = [0.0]

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: now[0], expiry=100)
        silent, lively = await uploads.begin("a"), await uploads.begin("a")
        now[0] = 60
        await uploads.write(lively, bytes(200_000))
        await uploads.expire()
        assert len(uploads) == 2
        now[0] = 120
        await uploads.expire()
        with pytest.raises(DistributionError, match="unknown"):
            uploads.get("a", silent.id)
        with pytest.raises(DistributionError, match="unknown"):
            await uploads.write(silent, b"y")
        assert uploads.get("a", lively.id) is lively
        now[0] = 160
        async with lively.lock:  # a request is in progress
            await uploads.expire()
        assert len(uploads) == 1
        await uploads.close()

    asyncio.run(run())
    assert list((tmp_path / ".aimage" / "ingest").iterdir()) == []


def test_an_upload_of_single_bytes_expires(tmp_path: Path) -> None:
    now = [0.0]

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: now[0], expiry=100)
        dripping = await uploads.begin("a")
        for now[0] in (50, 100):
            await uploads.write(dripping, b"x")
            await uploads.expire()
            assert len(uploads) == 1
        now[0] = 101
        await uploads.expire()
        assert len(uploads) == 0

    asyncio.run(run())


def test_uploads_that_begin_at_once_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "MAX_UPLOADS", 3)

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: 0.0, expiry=100)
        begun = await asyncio.gather(*map(uploads.begin, "abcdefgh"), return_exceptions=True)
        assert sum(isinstance(each, DistributionError) for each in begun) == 5
        assert len(uploads) == 3
        await uploads.close()

    asyncio.run(run())


def test_an_upload_is_given_up_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1000]
    monkeypatch.setattr(ImageLayout, "measure_free", lambda _: free[0])
    now = [0.0]

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: now[0], expiry=3600)
        upload = await uploads.begin("a")
        await uploads.check_space(upload, 1000)
        with pytest.raises(NoSpaceError, match="1001 bytes"):
            await uploads.check_space(upload, 1001)
        assert len(uploads) == 0
        idle, upload = await uploads.begin("a"), await uploads.begin("a")
        for begun in (idle, upload):
            await uploads.write(begun, b"x")
        assert idle.ingest is not None
        now[0] = upload_module.IDLE + 1
        upload.touched = now[0]
        abort = idle.ingest.abort
        monkeypatch.setattr(idle.ingest, "abort", lambda: (abort(), free.__setitem__(0, 9999)))
        await uploads.check_space(upload, 5000)  # the idle upload makes room
        assert len(uploads) == 1

        def full(*_: object) -> None:
            raise NoSpaceError("the disk is full")

        monkeypatch.setattr(upload.ingest, "write_at", full)
        with pytest.raises(NoSpaceError):
            await uploads.write(upload, b"x")
        assert len(uploads) == 0

    asyncio.run(run())
    assert list((tmp_path / ".aimage" / "ingest").iterdir()) == []


def test_a_quota_limits_all_unfinished_uploads(tmp_path: Path) -> None:
    now = [0.0]

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: now[0], expiry=3600, quota=100)
        first, second = await uploads.begin("a"), await uploads.begin("b")
        await uploads.write(first, bytes(60))
        with pytest.raises(DistributionError, match="100 bytes together") as caught:
            await uploads.write(second, bytes(41))
        assert caught.value.status == 429 and len(uploads) == 1
        second = await uploads.begin("b")
        now[0] = second.touched = upload_module.IDLE + 1
        await uploads.write(second, bytes(41))  # the idle upload makes room
        assert len(uploads) == 1
        await uploads.close()

    asyncio.run(run())


def test_chunks_that_arrive_at_once_count_for_the_quota(tmp_path: Path) -> None:
    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: 0.0, expiry=3600, quota=100)
        begun = [await uploads.begin("a") for _ in range(4)]
        writes = [uploads.write(one, bytes(60)) for one in begun]
        found = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(each, DistributionError) for each in found) == 3
        assert len(uploads) == 1
        await uploads.close()

    asyncio.run(run())


def test_too_many_uploads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "MAX_UPLOADS", 2)

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: 0.0, expiry=100)
        first = await uploads.begin("a")
        await uploads.begin("a")
        with pytest.raises(DistributionError) as caught:
            await uploads.begin("a")
        assert (caught.value.code, caught.value.status) == ("TOOMANYREQUESTS", 429)
        await uploads.abort(first)
        await uploads.begin("a")
        await uploads.close()

    asyncio.run(run())


def test_idle_uploads_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandoned uploads do not block other clients for an hour."""
    monkeypatch.setattr(upload_module, "MAX_UPLOADS", 2)
    now = [0.0]

    async def run() -> None:
        uploads = UploadSessions(ImageLayout(tmp_path), lambda: now[0], expiry=3600)
        silent, lively = await uploads.begin("a"), await uploads.begin("a")
        now[0] = upload_module.IDLE + 1
        await uploads.write(lively, b"x")
        await uploads.begin("a")
        assert uploads.get("a", lively.id) is lively
        with pytest.raises(DistributionError, match="unknown"):
            uploads.get("a", silent.id)
        await uploads.close()

    asyncio.run(run())


@pytest.mark.integration
def test_collection_keeps_blobs_of_active_clients(
    tmp_path: Path, serve_layout: Callable[..., Server]
) -> None:
    """A pushed, found or mounted blob is leased until a manifest may reference it."""
    pushed, found, mounted, unused = blobs = b"pushed", b"found", b"mounted", b"unused"
    server = serve_layout(tmp_path)
    for data in blobs[1:]:
        server.push_blob(data)
    server.stop()  # its leases end with the server
    server = serve_layout(tmp_path)
    server.push_blob(pushed)
    assert server.ask("HEAD", f"/v2/a/b/blobs/{digest_of(found)}").status_code == 200
    path = f"/v2/c/d/blobs/uploads/?mount={digest_of(mounted)}"
    assert server.ask("POST", path).status_code == 201
    Collector(ImageLayout(tmp_path), grace=0).run()
    for data in (pushed, found, mounted):
        assert server.ask("GET", f"/v2/a/b/blobs/{digest_of(data)}").content == data
    assert server.ask("GET", f"/v2/a/b/blobs/{digest_of(unused)}").status_code == 404
    server.stop()
    Collector(ImageLayout(tmp_path), grace=0).run()
    assert server.blobs() == set()


def test_leases_expire(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path)
    digests = [Digest.of(data) for data in (b"a", b"b")]
    for data in (b"a", b"b"):
        layout.push(Descriptor.of("x/y", data), build_bytes_body(data))
    now = [0.0]
    kept = ServedLeases(layout, lambda: now[0])
    kept.add(digests[0])
    now[0] = kept_module.PERIOD + 1
    kept.add(digests[1])
    assert read_leases(tmp_path, remove=False) == set(digests)
    now[0] = 2 * kept_module.PERIOD + 2
    kept.rotate()
    assert read_leases(tmp_path, remove=False) == {digests[1]}
    kept.close()
    assert read_leases(tmp_path, remove=False) == set()
