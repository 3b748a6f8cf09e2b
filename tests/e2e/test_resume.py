"""Interrupted pulls of one large blob from a real registry, with bytes counted."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.content.fetch import NOTED
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository, repository
from tests.process import Aimage
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import RealRegistry

MIB = 1024 * 1024
BIG = hashlib.shake_128(b"big").digest(64 * MIB)
SIZE = len(BIG)
# What the kernel may keep for four connections: lost when another one takes over their rest.
BUFFERS = 16 * MIB


@dataclass
class Artifact:
    """One large blob in a registry."""

    manifest: Manifest
    blob: Descriptor
    path: str = "tests/resume:v1"

    @property
    def digest(self) -> str:
        return str(self.blob.digest)


@pytest.fixture(scope="module")
def artifact(registry: RealRegistry, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    config = Descriptor.of("application/vnd.example.config", b"{}")
    blob = Descriptor.of("application/vnd.example.blob", BIG)
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config.to_json(),
        "layers": [blob.to_json()],
    }
    manifest = Manifest.parse(json.dumps(document).encode())
    made = Artifact(manifest, blob)
    name = Reference.parse(f"{registry.host}/{made.path}")
    connection = ClientOptions(docker_config=tmp_path_factory.mktemp("docker"))
    with Repository(name, connection) as target:
        target.push(config, build_bytes_body(b"{}"))
        target.push(blob, build_bytes_body(BIG))
        target.push(manifest.descriptor, build_bytes_body(manifest.raw), name)
    return made


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


@pytest.fixture
def pull_here(artifact: Artifact, proxy: Proxy, tmp_path: Path) -> Callable[..., None]:
    """Pull in this process over that number of connections."""

    def pull(connections: int = 3, on_event: Callable[[Any], None] = lambda _: None) -> None:
        layout = ImageLayout(tmp_path / "store")
        name = Reference.parse(f"{proxy.host}/{artifact.path}")
        connection = ClientOptions(docker_config=tmp_path, connections_override=connections)
        with Repository(name, connection) as source:
            copy(source, name, layout, concurrency=connections, on_event=on_event)
        check(layout, artifact)

    return pull


def check(layout: ImageLayout, artifact: Artifact) -> None:
    """Verify that the blob is complete and nothing else is left."""
    assert layout.find_path(artifact.blob).read_bytes() == BIG
    assert list((layout.root / ".aimage" / "ingest").iterdir()) == []


def store(aimage: Aimage) -> ImageLayout:
    return ImageLayout(aimage.store)


def ended(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, f"{process.returncode}: {out}\n{err}"
    assert "Traceback" not in err
    return err


# -- interrupted and resumed


def test_capped_connections_are_joined_and_every_byte_is_sent_once(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    """With slow connections, the whole budget ends up at the one blob.

    A connection whose second half is taken over may have a little of it in flight.
    """
    proxy.pace = 20 * MIB
    here = aimage()
    here("pull", f"{proxy.host}/{artifact.path}", "--jobs", 4)
    check(store(here), artifact)
    assert 0 <= proxy.sent(artifact.digest) - SIZE <= BUFFERS
    assert proxy.busiest == 4
    # On a busy machine one that stands still is replaced.
    assert len([count for count in proxy.by_connection().values() if count > MIB]) >= 4


@pytest.mark.integration
def test_a_pull_after_kill_9_refetches_at_most_one_part_per_connection(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    proxy.hold = 56 * MIB
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    process = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(lambda: proxy.held == 2)
    process.kill()
    ended(process, -signal.SIGKILL)
    mark = len(proxy.seen)
    proxy.release()
    here("pull", name, "--jobs", 2)
    check(store(here), artifact)
    assert proxy.sent(artifact.digest) <= SIZE + 2 * NOTED + BUFFERS
    assert "bytes=0-" not in [(span or "")[:8] for span in proxy.asked(artifact.digest, since=mark)]


@pytest.mark.integration
def test_a_pull_after_an_interrupt_refetches_nothing(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    proxy.pace = 40 * MIB
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    process = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(lambda: sum(p.sent for p in proxy.seen) > 40 * MIB)
    process.send_signal(signal.SIGINT)
    assert "complete blobs are kept" in ended(process, 130)
    proxy.pace = None
    here("pull", name, "--jobs", 1)
    check(store(here), artifact)
    assert proxy.sent(artifact.digest) <= SIZE + BUFFERS


@pytest.mark.integration
def test_an_interrupt_ends_a_pull_whose_network_stalls(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    """The connections block in reads and cannot report what they have."""
    proxy.hold = 56 * MIB
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    process = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(lambda: proxy.held == 2)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
    proxy.release()
    here("pull", name)
    check(store(here), artifact)
    assert proxy.sent(artifact.digest) <= SIZE + BUFFERS


def test_a_pull_after_a_failure_refetches_nothing(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    """No connection takes over another's rest, with what the kernel has of that: each byte counts.

    The end of a response comes after all of its bytes.
    """
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    proxy.cut = lambda passed: passed.sent if proxy._blob_bytes > 40 * MIB else None
    err = here("pull", name, "--jobs", 1, code=1).err
    assert "ended after" in err or "connection lost" in err
    assert 40 * MIB < proxy.sent(artifact.digest) < SIZE
    proxy.cut = None
    here("pull", name, "--jobs", 1)
    check(store(here), artifact)
    assert proxy.sent(artifact.digest) == SIZE


def test_a_complete_partial_is_verified_without_requests(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    here = aimage()
    ingest = store(here).ingest(artifact.blob.digest.encoded, artifact.blob)
    ingest.write_at(0, BIG)
    ingest.suspend()
    here("pull", f"{proxy.host}/{artifact.path}")
    check(store(here), artifact)
    assert proxy.asked(artifact.digest) == []


def test_a_damaged_partial_is_discarded(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    """The same pull fetches all of it again."""
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    ingest = store(here).ingest(artifact.blob.digest.encoded, artifact.blob)
    ingest.write_at(0, b"?" * (50 * MIB))
    ingest.suspend()
    here("pull", name)
    check(store(here), artifact)
    assert 0 <= proxy.sent(artifact.digest) - (SIZE - 50 * MIB + SIZE) <= BUFFERS


# -- two processes


def manifests(proxy: Proxy) -> int:
    return len([passed for passed in proxy.seen if "/manifests/" in passed.path])


@pytest.mark.integration
def test_the_second_pull_continues_when_the_first_is_killed(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    proxy.hold = 56 * MIB
    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    first = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(proxy.is_holding)
    second = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(lambda: manifests(proxy) == 2)
    mark = len(proxy.seen)
    first.kill()
    proxy.wait_until(lambda: any(passed.is_blob for passed in proxy.seen[mark:]))
    proxy.release()
    ended(first, -signal.SIGKILL)
    ended(second, 0)
    check(store(here), artifact)
    assert proxy.sent(artifact.digest) <= SIZE + 2 * NOTED + BUFFERS


# -- faulty networks and servers


@pytest.mark.parametrize("ranges", ["ignored", "wrong", 416])
def test_without_ranges_at_most_one_part_is_sent_twice(
    ranges: str | int, artifact: Artifact, proxy: Proxy, pull_here: Callable[..., None]
) -> None:
    """The first connection detects it before others join, and continues from the start."""
    proxy.ranges = ranges
    counts = []
    pull_here(4, lambda event: counts.append(event.count if event.kind == "progress" else 0))
    assert proxy.sent(artifact.digest) <= SIZE + NOTED + BUFFERS
    assert sum(counts) == SIZE + 2  # and the config
    assert min(counts) >= 0


def test_a_resumed_pull_without_ranges_skips_the_received_bytes(
    artifact: Artifact, proxy: Proxy, pull_here: Callable[..., None], tmp_path: Path
) -> None:
    layout = ImageLayout(tmp_path / "store")
    ingest = layout.ingest(artifact.blob.digest.encoded, artifact.blob)
    ingest.write_at(0, BIG[: 20 * MIB])
    ingest.suspend()
    proxy.ranges = "ignored"
    pull_here(4)
    assert proxy.sent(artifact.digest) <= SIZE + 20 * MIB + NOTED + BUFFERS


def test_a_stalled_connection_is_replaced(
    artifact: Artifact,
    proxy: Proxy,
    pull_here: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Long enough that no other connection stands still for it on a busy machine.
    monkeypatch.setattr(repository, "STALL", 6.0)
    stalled: list[Passed] = []

    def cut(passed: Any) -> int | None:
        if passed.is_blob and artifact.digest in passed.path and not stalled:
            stalled.append(passed)
        return 3 * MIB if passed in stalled else None

    proxy.cut, proxy.stall = cut, True
    pull_here(3)
    (victim,) = stalled
    assert victim.sent == 3 * MIB
    first = int((victim.range or "bytes=0-").removeprefix("bytes=").partition("-")[0])
    begun = [span or "" for span in proxy.asked(artifact.digest)[1:]]
    where = f"bytes={first + 3 * MIB}-"
    assert len([span for span in begun if span.startswith(where)]) == 1  # from its offset
    assert proxy.sent(artifact.digest) <= SIZE + BUFFERS


def test_repeated_disconnects_with_progress_do_not_fail_a_pull(
    artifact: Artifact, proxy: Proxy, pull_here: Callable[..., None]
) -> None:
    """The pull continues while each connection delivers bytes, and no byte is sent twice."""
    proxy.cut = lambda passed: 3 * MIB if passed.is_blob else None
    pull_here(3)
    assert proxy.sent(artifact.digest) <= SIZE + BUFFERS


def test_wrong_bytes_of_the_registry_are_not_requested_twice(
    aimage: Callable[..., Aimage], artifact: Artifact, proxy: Proxy
) -> None:
    def change(passed: Passed, reply: Reply) -> None:
        if passed.method == "GET" and artifact.digest in passed.path:
            reply.body = reply.body[:-1] + bytes([reply.body[-1] ^ 1])

    here, name = aimage(), f"{proxy.host}/{artifact.path}"
    proxy.change = change
    assert "digest mismatch" in here("pull", name, code=5).err
    proxy.change = None
    # On a busy machine a slow part may be requested again.
    assert proxy.sent(artifact.digest) <= SIZE * 3 // 2
    assert list((here.store / ".aimage" / "ingest").iterdir()) == []
    here("pull", name)
    check(store(here), artifact)
