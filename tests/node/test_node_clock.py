"""Timing of a node: clock jumps, retries, changes during a pull, reloading and priorities."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.api.service import make_service
from clowder_aimage.api.store.storage import encode
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.node import Node
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.node.spec_files import SpecFiles
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.node.node_run import LiveNode, LocalNode
from tests.node.publisher import Publisher, events
from tests.node.test_node_live import asked, push_tiny
from tests.process import Aimage
from tests.proxy import Proxy
from tests.wait import until

FOLLOWED = {"refresh": 1, "pullPolicy": "Always"}
HOUR, DECADE = 3600.0, 10 * 365 * 86400.0


class Bench:
    """A node without a server, driven manually with a fake clock."""

    def __init__(self, home: Path, *wants: ModelSpec, **options: Any) -> None:
        self.now = 1000.0
        self.home, self.store, self.wants = home, ImageLayout(home / "bench"), wants
        self.start(**options)

    def start(self, marks: Any = None, **settings: Any) -> None:
        """Create a new node on the same store, as after a restart."""
        service = make_service(NodeSettings(), self.store, ClientOptions(docker_config=self.home))
        self.events = service.events
        self.node = Node(
            service,
            NodeSettings(**settings),
            clock=lambda: self.now,
            chance=lambda: 0.999,
        )
        if marks is not None:
            self.node.evictor.marks = marks
        self.want(*self.wants)

    def want(self, *wants: ModelSpec) -> None:
        """Replace the desired state, without files."""
        self.wants = wants
        self.node.files = SpecFiles(wants)

    async def turn(self, seconds: float = 0.0) -> None:
        """Advance the clock, run one turn, and wait for its tasks."""
        self.now += seconds
        await self.node.turn()
        while self.node._tasks:
            await asyncio.wait(list(self.node._tasks.values()))
            await asyncio.sleep(0)
        if self.node._eviction is not None:
            await self.node._eviction

    def model(self) -> dict[str, Any]:
        (found,) = self.node.describe_models()
        return found


def want(ref: str, **facts: Any) -> ModelSpec:
    return ModelSpec(Reference.parse(ref), **facts)


# -- clocks


def test_wall_clock_jumps_do_not_affect_tag_checks(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publisher.publish("a")
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])

    async def play() -> None:
        bench = Bench(tmp_path, want(ref, refresh=300.0))
        await bench.turn()
        assert bench.model()["state"] == "present"
        for at, jumped in enumerate((DECADE, -DECADE, HOUR, -HOUR, 0.0)):
            before = len(publisher.proxy.seen)
            jump[0] = jumped
            await bench.turn(299.0 if at else 150.0)
            assert len(publisher.proxy.seen) == before, f"asked early after a jump of {jumped} s"
            await bench.turn(1.5 if at else 151.0)
            seen = publisher.proxy.seen[before:]
            assert [(each.method, each.status) for each in seen] == [("GET", 304)]
            assert bench.model()["state"] == "present" and not bench.node.list_missing()
        assert ImageLayout(tmp_path / "bench").resolve(Reference.parse(ref))

    asyncio.run(play())


def test_wall_clock_jumps_do_not_remove_desired_models(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publisher.publish("a")
    real = time.time

    async def play() -> None:
        bench = Bench(tmp_path, want(ref, refresh=300.0), collect=600.0, prune=True)
        await bench.turn()
        monkeypatch.setattr(time, "time", lambda: real() + DECADE)
        await bench.turn(601.0)
        await bench.turn(10.0)
        assert bench.model()["state"] == "present"
        reference = Reference.parse(ref)
        assert bench.store.resolve(reference)
        assert publisher.blobs() == 2  # the config and the layer: no blob was fetched again

    asyncio.run(play())


# -- permanent failures


def rounds(publisher: Publisher, tag: str = "v1", count: int = 3) -> None:
    """Wait for ``count`` more checks of a tag."""
    since = len(publisher.proxy.seen)
    until(lambda: publisher.manifests(tag, since) >= count, f"{count} looks at the tag")


@pytest.mark.integration
def test_wrong_content_is_not_fetched_again_until_the_tag_moves(
    node: LocalNode, publisher: Publisher
) -> None:
    publisher.spoil("b")
    ref = publisher.publish("a", "b")
    node.want({"ref": ref, "refresh": 1, "pullPolicy": "Always"})
    node.start()
    failed = node.reaches(ref, "failed")
    assert failed["code"] == "verification_failed"
    assert node.metric("aimage_digest_mismatch_total") == 1
    blobs = publisher.blobs()
    rounds(publisher)
    publisher.refuse(lambda passed: True, 501)  # registry failures do not trigger a fetch either
    until(lambda: node.model(ref)["code"] == "registry_failed", "the failure to be told")
    publisher.proxy.instead = None
    until(lambda: node.model(ref)["code"] == "verification_failed", "the old reason")
    assert failed["reason"] == node.model(ref)["reason"]
    rounds(publisher)
    assert publisher.blobs() == blobs
    assert node.names() == set()
    moved = len(publisher.proxy.seen)
    publisher.publish("a", "c")
    node.reaches(ref, "present")
    since = [each.path for each in publisher.proxy.seen[moved:] if "/blobs/" in each.path]
    assert len(since) == len(set(since)) <= 3  # intact blobs may be in the store already
    node.aimage("verify")


# -- changes in the middle of a pull


def test_a_spec_that_is_removed_during_its_pull_stops_the_pull(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a", "b", size=20_000_000)
    other = publisher.publish("c", tag="other")
    publisher.proxy.hold = 25_000_000
    node.want({"ref": ref})
    node.start()
    until(lambda: publisher.proxy.held, "half of it to be there")
    node.want({"ref": other})
    until(lambda: node.model(ref)["state"] == "not wanted", "it to be forgotten")
    publisher.proxy.release()
    node.reaches(other, "present")
    until(lambda: not node.metric("aimage_pull_inflight"), "the pull to end")
    assert node.names() == {other}
    stopped = [each["outcome"] for each in node.events("pull") if each["reference"] == ref]
    assert stopped == ["stopped"]
    sent = publisher.proxy.sent()
    node.want({"ref": other}, {"ref": ref})
    node.reaches(ref, "present")
    assert publisher.proxy.sent() - sent < 40_000_000  # the first part was kept
    node.aimage("verify")


def test_a_pull_goes_on_between_a_change_and_the_next_turn(
    tmp_path: Path, publisher: Publisher
) -> None:
    ref = publisher.publish("a", "b", size=400_000)
    publisher.proxy.hold = 500_000

    async def play() -> None:
        bench = Bench(tmp_path, want(ref, priority=1))
        first = asyncio.create_task(bench.turn())
        await asyncio.to_thread(publisher.proxy.wait_until, publisher.proxy.is_holding)
        (pull,) = bench.node._service.transfers.list_pulls()
        for priority in (5, 9):
            bench.want(want(ref, priority=priority))
            await bench.node.begin()
            await first  # its task is cancelled
        publisher.proxy.release()
        await pull.wait()
        await bench.turn()
        assert bench.model()["state"] == "present" and not pull.users
        assert publisher.blobs() == 3  # the config and two layers

    asyncio.run(play())


def test_a_change_of_priority_during_a_pull_fetches_nothing_twice(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a", "b", size=400_000)
    publisher.proxy.hold = 500_000
    node.want({"ref": ref, "priority": 1})
    node.start()
    until(lambda: publisher.proxy.held, "half of it to be there")
    node.want({"ref": ref, "priority": 9, "pin": True})
    until(lambda: node.model(ref)["priority"] == 9, "the change to be seen")
    publisher.proxy.release()
    node.reaches(ref, "present")
    assert publisher.proxy.sent() < 1_000_000
    until(lambda: node.aimage("pin", "--json").value == {"pinned": [ref]}, "the pin to be set")
    node.aimage("verify")


def test_components_changed_during_a_pull_are_fetched(
    node: LocalNode, author: Aimage, local_repository: str, proxy: Proxy
) -> None:
    ref = push_tiny(author, local_repository, proxy)
    proxy.hold = 100_000
    node.want({"ref": ref, "components": ["transformer"]})
    node.start()
    until(lambda: proxy.held, "the pull to begin")
    read_at = "aimage_config_last_reload_success_timestamp_seconds"
    before = node.metric(read_at)
    node.want({"ref": ref, "components": ["vae"]})
    until(lambda: node.metric(read_at) > before, "the change to be read")
    proxy.release()
    part = node.reaches(ref, "present")
    assert part["total"] == 0 and node.readiness()[0] == 200
    until(lambda: not node.metric("aimage_pull_inflight"), "the other pull to end")
    assert node.names() == {ref}
    node.want({"ref": ref})
    until(lambda: node.model(ref)["sources"]["cache"], "the rest to come")
    node.reaches(ref, "present")
    node.aimage("verify")


# -- reloading


def swap(directory: Path, number: int, text: str) -> None:
    """Replace the content as kubelet does, by swapping the ``..data`` link."""
    fresh = directory / f"..2026_{number}"
    fresh.mkdir()
    (fresh / "models.yaml").write_text(text)
    beside = directory / "..data_tmp"
    beside.symlink_to(fresh.name)
    beside.replace(directory / "..data")
    link = directory / "models.yaml"
    if not link.is_symlink():
        link.symlink_to("..data/models.yaml")


@pytest.mark.integration
def test_a_swapped_config_map_is_read_at_once_and_on_sighup(
    live_node: LiveNode, publisher: Publisher
) -> None:
    one, other = publisher.publish("a", tag="one"), publisher.publish("b", tag="other")
    swap(live_node.desired, 1, f"- ref: {one}\n")
    live_node.start()
    live_node.reaches(one, "present")
    swap(live_node.desired, 2, f"- ref: {one}\n- ref: {other}\n  pin: true\n")
    live_node.reaches(other, "present")
    swap(live_node.desired, 3, "- ref: [\n")
    until(lambda: not live_node.status()["desired"]["valid"], "the mistake to be said")
    assert live_node.metric("aimage_desired_images") == 2
    swap(live_node.desired, 4, f"- ref: {other}\n")
    until(lambda: live_node.model(one)["state"] == "not wanted", "the repaired one to count")
    assert live_node.names() == {one, other}
    loads = [each for each in events(live_node.url, {"desired"}) if each["valid"]]
    before = live_node.status()["desired"]["loaded"]
    live_node.worker.process.send_signal(signal.SIGHUP)
    said = "reloading the desired state"
    until(lambda: any(said in line for line in live_node.worker.lines), "the signal to be heard")
    again_loaded = until(
        lambda: len([e for e in events(live_node.url, {"desired"}) if e["valid"]]) > len(loads),
        "the files to be read again",
    )
    assert again_loaded and live_node.status()["desired"]["loaded"] >= before
    assert live_node.model(other)["state"] == "present"


# -- priorities


def test_a_requested_pull_precedes_queued_ones_and_joins_its_own(
    node: LocalNode, publisher: Publisher
) -> None:
    refs = [publisher.publish(f"layer {n}", tag=f"v{n}") for n in range(7)]
    extra = publisher.publish("extra", tag="extra")
    publisher.proxy.hold = 1
    wants = [{"ref": ref, "priority": 10 - n} for n, ref in enumerate(refs)]
    node.want(*wants[:4])
    node.start()
    until(lambda: node.metric("aimage_pull_inflight") == 4, "four to begin")
    node.want(*wants)
    waiting = 'aimage_pull_queue_depth{class="desired"}'
    until(lambda: node.metric(waiting) == 3, "three to wait")
    assert node.reaches(refs[-1], "waiting")["reason"] == "queued behind other pulls"
    assert not publisher.manifests("v6") and not publisher.manifests("v5")

    def post(ref: Any) -> Any:
        return asked(node, "POST", "/content/", {"url": f"oci://{ref}"})[0]

    with ThreadPoolExecutor(2) as pool:
        passing = pool.submit(post, extra)
        until(lambda: publisher.manifests("extra"), "the one that is asked for to begin")
        assert not publisher.manifests("v5") and not publisher.manifests("v4")
        joining = pool.submit(post, refs[-1])
        until(lambda: publisher.manifests("v6"), "the one that was joined to begin")
        assert not publisher.manifests("v5") and node.metric(waiting) == 2
        assert node.model(refs[-1])["state"] == "pulling"
        publisher.proxy.release()
        assert (passing.result(60), joining.result(60)) == (201, 201)
    for ref in refs:
        node.reaches(ref, "present")
    assert publisher.manifests("v6") == 1  # fetched once
    assert node.names() == {*refs, extra}
    assert asked(node, "GET", f"/content/{encode(f'oci://{extra}')}")[0] == 200
