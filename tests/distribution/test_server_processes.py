"""A server of several processes: uploads, tags and metrics are those of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from clowder_aimage.distribution import shared_upload as shared_module
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.shared_upload import SharedUploads
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest
from tests.distribution.served import REPOSITORY_ROOT, Server, digest_of, error_of
from tests.process import run
from tests.wait import until

BLOB = os.urandom(5_000_000)


def list_children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Members:
    """The processes of a server; a request reaches the one that is not stopped."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pids = list_children(server.process.pid)

    def ask(self, pid: int, method: str, path: str, **options: Any) -> requests.Response:
        with contextlib.ExitStack() as stack:
            for other in self.pids:
                if other != pid:
                    os.kill(other, signal.SIGSTOP)
                    stack.callback(os.kill, other, signal.SIGCONT)
            # A connection of its own: an open one is that of some process
            headers = {"Connection": "close"}
            return requests.request(
                method, self.server.url + path, timeout=60, headers=headers, **options
            )


@pytest.fixture
def members(tmp_path: Path, serve_layout: Callable[..., Server]) -> Iterator[Members]:
    if sys.platform != "linux":
        pytest.skip("the children of a process are listed by /proc")
    yield Members(serve_layout(tmp_path / "store", "processes=2"))


@pytest.mark.integration
def test_processes_continue_the_uploads_of_each_other(members: Members) -> None:
    one, other = members.pids
    location = members.ask(one, "POST", "/v2/a/b/blobs/uploads/").headers["Location"]
    half = len(BLOB) // 2
    assert members.ask(other, "PATCH", location, data=BLOB[:half]).status_code == 202
    status = members.ask(one, "GET", location)
    assert (status.status_code, status.headers["Range"]) == (204, f"0-{half - 1}")
    assert members.ask(one, "PATCH", location, data=BLOB[half:-10]).status_code == 202
    put = f"{location}?digest={digest_of(BLOB)}"
    assert members.ask(other, "PUT", put, data=BLOB[-10:]).status_code == 201
    for pid in members.pids:
        assert error_of(members.ask(pid, "PATCH", location, data=b"x")) == (
            404,
            "BLOB_UPLOAD_UNKNOWN",
        )
    blob = f"/v2/a/b/blobs/{digest_of(BLOB)}"
    assert members.ask(one, "GET", blob).content == BLOB
    moved = location.replace("a/b", "a/c")
    assert error_of(members.ask(other, "GET", moved)) == (404, "BLOB_UPLOAD_UNKNOWN")
    assert members.server.ingests() == []


@pytest.mark.integration
def test_a_tag_is_visible_to_all_processes_and_metrics_are_sums(members: Members) -> None:
    one, other = members.pids
    server = members.server
    raws = [server.push("v1", layer) for layer in (b"first", b"second")]
    for raw in raws:
        headers = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
        path = "/v2/a/b/manifests/t"
        answer = requests.put(server.url + path, data=raw, headers=headers, timeout=60)
        assert answer.status_code == 201
        for pid in (one, other):
            assert members.ask(pid, "GET", path).content == raw
    begun = members.ask(one, "POST", "/v2/a/b/blobs/uploads/")
    texts = {pid: members.ask(pid, "GET", "/metrics").text for pid in (one, other)}
    for text in texts.values():
        posts = next(
            line
            for line in text.splitlines()
            if line.startswith("aimage_registry_requests_total{") and 'code="202"' in line
        )
        assert posts.endswith(" 1.0")
        assert "aimage_registry_uploads 1.0" in text.splitlines()
    assert members.ask(other, "DELETE", begun.headers["Location"]).status_code == 204


@pytest.mark.integration
def test_a_process_that_crashes_is_replaced_and_its_uploads_continue(members: Members) -> None:
    one, other = members.pids
    location = members.ask(one, "POST", "/v2/a/b/blobs/uploads/").headers["Location"]
    assert members.ask(one, "PATCH", location, data=BLOB[:1000]).status_code == 202
    os.kill(one, signal.SIGKILL)
    parent = members.server.process.pid

    def list_new() -> bool:
        return len(pids := list_children(parent)) == 2 and one not in pids

    until(list_new, "another process")
    members.pids = list_children(parent)
    assert other in members.pids
    put = f"{location}?digest={digest_of(BLOB)}"
    assert members.ask(other, "PUT", put, data=BLOB[1000:]).status_code == 201
    [new] = set(members.pids) - {other}
    assert members.ask(new, "GET", f"/v2/a/b/blobs/{digest_of(BLOB)}").content == BLOB


@pytest.mark.integration
def test_processes_end_together(members: Members) -> None:
    server = members.server
    server.ask("PATCH", server.begin(), data=b"unfinished")
    code, log = server.stop()
    assert code == 0, log
    assert server.ingests() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in members.pids)


@pytest.mark.integration
def test_processes_end_when_the_first_is_killed(members: Members) -> None:
    members.server.stop(signal.SIGKILL)

    def have_ended() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in members.pids)

    until(have_ended, "the end of the others")


@pytest.mark.integration
def test_a_process_that_ends_before_it_is_ready_ends_all(tmp_path: Path) -> None:
    """The others end, and the error has the status."""
    program = """
import os, select, sys
from clowder_aimage.errors import AccessError
from clowder_aimage.http.process_group import ProcessGroup
def work(member):
    try:
        open(sys.argv[1], "x").close()
    except FileExistsError:
        member.report_ready()
        select.select([member.parent], [], [])
    os._exit(3)
try:
    ProcessGroup(3, work).run(lambda: print("never"))
except AccessError as error:
    print(error)
"""
    done = run([sys.executable, "-c", program, tmp_path / "first"], cwd=REPOSITORY_ROOT, check=True)
    assert done.stdout.decode().strip() == (
        "a process of the server ended at its start, with status 3"
    )


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SharedUploads, SharedUploads]:
    """Return the uploads of two processes. Locks exclude open files, not processes."""
    layout = ImageLayout(tmp_path)
    now = [0.0]
    one, other = (SharedUploads(layout, lambda: now[0], 3600, quota=1000) for _ in range(2))
    return one, other


def test_a_request_waits_for_that_of_another_process(
    pair: tuple[SharedUploads, SharedUploads],
) -> None:
    one, other = pair
    order = []

    async def append(uploads: SharedUploads, key: str, data: bytes) -> None:
        async with uploads.hold("a", key) as upload:
            order.append(upload.offset)
            await uploads.write(upload, data)
            await asyncio.sleep(0.05)

    async def run() -> None:
        begun = await one.begin("a")
        one.suspend(begun)
        await asyncio.gather(append(one, begun.id, b"12345"), append(other, begun.id, b"67890"))
        async with one.hold("a", begun.id) as upload:
            assert upload.offset == 10
            stored = await asyncio.to_thread(lambda: upload.ingest and upload.ingest.digest())
            await one.abort(upload)
        assert order == [0, 5]
        assert stored in {Digest.of(b"1234567890"), Digest.of(b"6789012345")}
        with pytest.raises(DistributionError, match="unknown"):
            await other.find("a", begun.id)
        assert len(one) == len(other) == 0

    asyncio.run(run())


def test_the_quota_is_that_of_all_processes(pair: tuple[SharedUploads, SharedUploads]) -> None:
    one, other = pair

    async def run() -> None:
        first, second = await one.begin("a"), await other.begin("a")
        await one.write(first, bytes(600))
        with pytest.raises(DistributionError, match="1000 bytes together"):
            await other.write(second, bytes(600))
        assert len(one) == 1
        await one.close()
        assert len(one) == 0

    asyncio.run(run())


def test_uploads_of_a_process_that_ended_make_room(
    pair: tuple[SharedUploads, SharedUploads], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(shared_module, "MAX_UPLOADS", 2)

    async def run() -> None:
        left = await one.begin("a")
        one.suspend(left)
        await other.begin("a")
        with pytest.raises(DistributionError) as caught:
            await other.begin("a")
        assert caught.value.status == 429
        [path] = (tmp_path / ".aimage" / "ingest").glob(f"*{left.id}")
        os.utime(path, (0, 0))
        await other.begin("a")
        assert len(other) == 2
        with pytest.raises(DistributionError, match="unknown"):
            await one.find("a", left.id)
        await other.close()

    asyncio.run(run())


def test_old_uploads_expire_but_not_one_that_is_written(
    pair: tuple[SharedUploads, SharedUploads], tmp_path: Path
) -> None:
    one, other = pair

    async def run() -> None:
        left, held = await one.begin("a"), await one.begin("a")
        one.suspend(left)
        for path in (tmp_path / ".aimage" / "ingest").iterdir():
            os.utime(path, (0, 0))
        one.suspend(held)
        async with one.hold("a", held.id):
            await other.expire()
            assert len(one) == 1
        await other.expire()
        assert len(one) == 0

    asyncio.run(run())
