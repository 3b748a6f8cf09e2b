"""Nodes on a full disk: retries, eviction, and serving of present models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.eviction import Watermarks
from clowder_aimage.oci import Reference
from tests.content.artifact import put_artifact
from tests.node.node_run import LocalNode
from tests.node.nodes import MIB, noise
from tests.node.publisher import Publisher
from tests.node.small_disk import Disk, small_disk
from tests.node.test_node_clock import Bench, want
from tests.wait import until

pytestmark = pytest.mark.integration  # root mounts a small disk

FULL = Watermarks(1.0, 1.0, age=0.0)  # watermarks that are never passed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount a disk of 64 MiB, of which a pull leaves 16 free."""
    with small_disk(tmp_path / "disk", 64 * MIB) as found:
        yield found


@pytest.fixture
def old_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the grace period, so that new blobs can be collected."""
    monkeypatch.setattr("clowder_aimage.node.eviction.GRACE", 0.0)


def put(store: ImageLayout, name: str, size: int, used: int) -> Reference:
    """Store a model of a size with an old time of last use."""
    reference = Reference.parse(f"registry.example.com/{name}")
    put_artifact(store, str(reference), noise(size, name))
    path = store.root / ".aimage" / "used" / store.resolve(reference).digest.encoded
    os.utime(path, (1e9 + 3600 * used, 1e9 + 3600 * used))
    return reference


def names(store: ImageLayout) -> set[Any]:
    return {name for name, _ in store.list_tags()}


async def told(bench: Bench, kind: str) -> list[Any]:
    """Return the facts of all events of a kind so far."""
    # Threads that have ended added their events as calls of the loop
    await asyncio.sleep(0)
    return [item.facts for item in bench.events._retained if item.kind == kind]


def test_a_pull_without_space_fetches_no_blob_and_is_not_repeated(
    disk: Disk, publisher: Publisher
) -> None:
    ref = publisher.publish("a", size=20 * MIB)
    disk.fill(leave=30 * MIB)

    async def play() -> None:
        bench = Bench(disk.root, want(ref), marks=FULL)
        await bench.turn()
        failed = bench.model()
        assert (failed["state"], failed["code"]) == ("failed", "no_space")
        assert "the download requires" in failed["reason"]
        asked = len(publisher.proxy.seen)
        assert publisher.blobs() == 0 and asked <= 2
        for _ in range(100):
            await bench.turn(11.0)
        assert len(publisher.proxy.seen) == asked
        assert bench.model()["reason"] == failed["reason"]
        disk.drop()
        await bench.turn(11.0)
        assert bench.model()["state"] == "present"
        assert 20 * MIB < publisher.proxy.sent() < 20.1 * MIB

    asyncio.run(play())


def test_a_pull_on_a_full_disk_fails_until_space_is_free(disk: Disk, publisher: Publisher) -> None:
    ref = publisher.publish("a", "b", size=12 * MIB)
    publisher.proxy.hold = 15 * MIB

    async def play() -> None:
        bench = Bench(disk.root, want(ref), marks=FULL)
        turn = asyncio.create_task(bench.turn())
        await asyncio.to_thread(until, lambda: publisher.proxy.held, "half of it to be there")
        disk.fill()
        publisher.proxy.release()
        await turn
        failed = bench.model()
        assert (failed["state"], failed["code"]) == ("failed", "no_space")
        sent, asked = publisher.proxy.sent(), len(publisher.proxy.seen)
        for _ in range(100):
            await bench.turn(11.0)
        assert len(publisher.proxy.seen) == asked
        assert names(bench.store) == set()
        disk.drop()
        await bench.turn(11.0)
        assert bench.model()["state"] == "present"
        assert publisher.proxy.sent() - sent < 24.1 * MIB  # at most all of it again

    asyncio.run(play())


def test_a_new_version_without_space_keeps_the_old_one(disk: Disk, publisher: Publisher) -> None:
    ref = publisher.publish("a", size=2 * MIB)

    async def play() -> None:
        bench = Bench(disk.root, want(ref, policy="always", refresh=60.0), marks=FULL)
        await bench.turn()
        disk.fill(leave=10 * MIB)
        publisher.publish("a", "b", size=2 * MIB)
        await bench.turn(61.0)
        now = bench.model()
        assert (
            now["state"] == "present" and now["drift"] and "the download requires" in now["reason"]
        )
        blobs, asked = publisher.blobs(), len(publisher.proxy.seen)
        for _ in range(20):
            await bench.turn(61.0)
        seen = publisher.proxy.seen[asked:]
        assert {(each.method, each.status) for each in seen} == {("GET", 304)}
        assert len(seen) <= 20 and publisher.blobs() == blobs
        assert bench.model()["reason"] == now["reason"] and not bench.node.list_missing()
        disk.drop()
        await bench.turn(61.0)
        assert bench.model()["drift"] is None and bench.model()["reason"] is None

    asyncio.run(play())


def test_least_recently_used_models_are_evicted_for_desired_ones(
    disk: Disk, publisher: Publisher, old_blobs: None
) -> None:
    ref = publisher.publish("a", size=20 * MIB)

    async def play() -> None:
        bench = Bench(disk.root, want(ref), marks=FULL)
        old, new = (put(bench.store, name, 15 * MIB, at) for at, name in enumerate(("old", "new")))
        await bench.turn()
        assert names(bench.store) == {index_name(new)}
        assert bench.model()["code"] == "no_space" and not publisher.blobs()
        await bench.turn(11.0)
        assert bench.model()["state"] == "present"
        assert [each["model"] for each in await told(bench, "evict")] == [index_name(old)]
        assert bench.node.metrics.collections.labels("space")._value.get() == 1
        assert bench.node.metrics.reclaimed._value.get() >= 15 * MIB

    asyncio.run(play())


def test_a_model_waits_for_blobs_that_are_too_young_to_be_removed(
    disk: Disk, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publisher.publish("a", size=20 * MIB)

    async def play() -> None:
        bench = Bench(disk.root, want(ref), marks=FULL)
        for at, name in enumerate(("old", "new")):
            put(bench.store, name, 15 * MIB, at)
        kept = names(bench.store)
        for _ in range(20):
            await bench.turn(11.0)
            waiting = bench.model()
            assert (waiting["state"], waiting["code"]) == ("waiting", "no_space")
        assert "stay free" in waiting["reason"]
        assert "15.7 MB of blobs" in waiting["reason"]
        assert "60 seconds old" in waiting["reason"]
        assert names(bench.store) == kept
        assert not publisher.blobs()
        assert not await told(bench, "failed") and not await told(bench, "evict")
        monkeypatch.setattr("clowder_aimage.node.eviction.GRACE", 0.0)
        await bench.turn(11.0)
        assert bench.model()["state"] == "present"
        assert len(await told(bench, "evict")) == 1

    asyncio.run(play())


def test_a_full_disk_names_the_blobs_that_are_too_young(
    tmp_path: Path, publisher: Publisher
) -> None:
    ref = publisher.publish("wanted", size=MIB)
    with small_disk(tmp_path / "disk", 64 * MIB) as disk:

        async def play() -> None:
            bench = Bench(disk.root, want(ref), marks=Watermarks(0.50, 0.30, age=0.0))
            await bench.turn()
            put(bench.store, "young", 40 * MIB, 0)
            kept = names(bench.store)
            bench.node.evictor._measured_at = -1e9
            await bench.turn(1.0)
            assert names(bench.store) == kept
            (full,) = await told(bench, "full")
            assert full["young"] >= 40 * MIB
            assert not await told(bench, "evict")

        asyncio.run(play())


def test_above_the_upper_mark_only_unwanted_models_are_evicted(
    tmp_path: Path, publisher: Publisher, old_blobs: None
) -> None:
    ref = publisher.publish("wanted", size=20 * MIB)
    with small_disk(tmp_path / "disk", 128 * MIB) as disk:

        async def play() -> None:
            bench = Bench(disk.root, want(ref), marks=Watermarks(0.80, 0.70, age=0.0))
            await bench.turn()
            store = bench.store
            pinned, held = put(store, "pinned", 20 * MIB, 0), put(store, "held", 20 * MIB, 1)
            first, second, third = (put(store, f"n{at}", 15 * MIB, at) for at in (2, 3, 4))
            store.pins.put(index_name(pinned), {}, durable=True)
            with ImageLayout(store.root).lease(store.resolve(held).digest):
                bench.node.evictor._measured_at = -1e9
                await bench.turn(1.0)
            left = {index_name(each) for each in (pinned, held, third)} | {ref}
            assert names(store) == left
            assert bench.node.describe_disk()["used"] <= 0.70
            gone = [each["model"] for each in await told(bench, "evict")]
            assert gone == [index_name(first), index_name(second)]
            assert bench.node.metrics.collections.labels("high")._value.get() == 1
            assert (await told(bench, "gc"))[0]["bytes"] >= 30 * MIB
            assert bench.model()["state"] == "present" and not bench.node.list_missing()

        asyncio.run(play())


def test_a_node_with_a_full_disk_serves_models_and_reports_the_reason(
    disk: Disk, publisher: Publisher, tmp_path: Path, quick: None
) -> None:
    here, more = publisher.publish("a", size=MIB), publisher.publish("b", tag="more", size=20 * MIB)
    node = LocalNode(tmp_path / "node", store=disk.root / "store")
    node.want({"ref": here, "refresh": 1, "pullPolicy": "Always", "pin": True})
    try:
        node.start("--high", "100", "--low", "100")
        node.reaches(here, "present")
        assert node.readiness() == (200, {"status": "ok", "reasons": [], "warnings": []})
        disk.fill()
        node.want({"ref": here, "refresh": 1, "pullPolicy": "Always", "pin": True}, {"ref": more})
        assert node.reaches(more, "failed")["code"] == "no_space"
        line = 'aimage_desired_failed{code="no_space"}'
        until(lambda: node.metric(line) == 1, "the failure to be counted")
        status, body = node.readiness()
        assert status == 503 and {"reason": "model missing", "model": more} in body["reasons"]
        assert node.model(here)["state"] == "present"
        host, _, rest = here.partition("/")
        found = node.get(f"/v2/{rest.rpartition(':')[0]}/manifests/v1?ns={host}")
        assert len(found["layers"]) == 1
        assert [each["model"] for each in node.events("failed")] == [more]
        node.aimage("verify")
        disk.drop()
        node.reaches(more, "present")
        until(lambda: node.readiness()[0] == 200, "the node to be ready")
        until(lambda: not node.metric(line), "the failure to be forgotten")
        node.aimage("verify")
    finally:
        node.end()


def test_a_node_is_not_ready_only_when_its_disk_is_full(
    disk: Disk, publisher: Publisher, tmp_path: Path, quick: None
) -> None:
    here = publisher.publish("a", size=MIB)
    node = LocalNode(tmp_path / "node", store=disk.root / "store")
    node.want({"ref": here})
    try:
        node.start()
        node.reaches(here, "present")
        disk.fill(leave=MIB)
        until(lambda: node.metric("aimage_store_free_bytes") <= MIB, "the disk to be looked at")
        assert node.status()["disk"]["used"] > 0.95
        assert node.readiness() == (200, {"status": "ok", "reasons": [], "warnings": []})
        assert node.names() == {here}  # desired models are not evicted
        disk.fill()
        status, body = node.readiness()
        assert (status, body["reasons"]) == (503, [{"reason": "store not writable"}])
        until(lambda: not node.metric("aimage_ready"), "the metric to say so")
        assert node.model(here)["state"] == "present"
        disk.drop()
        assert node.readiness()[0] == 200
        until(lambda: node.metric("aimage_ready"), "the metric to say so")
        node.aimage("verify")
    finally:
        node.end()
