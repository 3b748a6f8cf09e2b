"""A node between failures: store checks, eviction, request limits, and the next attempt."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.api.service import BY_NODE
from clowder_aimage.engine.admission import FOR_EVER
from clowder_aimage.engine.backoff import DAY, HOUR, compute_full_backoff
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.node import pinner as pinner_module
from clowder_aimage.node.model_state import ModelStatus
from clowder_aimage.node.model_transition import apply_spec, apply_store_read
from clowder_aimage.node.pinner import Pinner, SpecStore, check_model
from clowder_aimage.node.reconciler import CrowdedError, RegistryLimiter
from clowder_aimage.oci import Reference
from clowder_aimage.pull import pull
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import MIB
from tests.node.publisher import Publisher
from tests.node.test_node_clock import Bench, want
from tests.node.test_node_disk import FULL, disk, names, old_blobs, put
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.store import pass_tick

if TYPE_CHECKING:
    from tests.node.small_disk import Disk


__all__ = ["disk", "old_blobs"]  # fixtures


def seconds(model: Any) -> float:
    """Return the seconds until the next attempt according to the status."""
    return (datetime.fromisoformat(model["next"]) - datetime.now(UTC)).total_seconds()


def played(test: Any) -> Any:
    """Run a coroutine as a test."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def here(bench: Bench) -> tuple[Any, Any, Any]:
    now = bench.model()
    return now["state"], now["code"], now["next"]


# -- the store


@played
async def test_a_failed_model_that_is_pulled_manually_is_noticed(
    tmp_path: Path, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    publisher.refuse(lambda passed: True, 404)
    bench = Bench(tmp_path, want(ref))
    await bench.turn()
    assert bench.model()["code"] == "not_found"
    asked = len(publisher.proxy.seen)
    for _ in range(3):
        await bench.turn(11.0)
    assert len(publisher.proxy.seen) == asked  # a check of the store sends no request
    publisher.mend()
    pull(Reference.parse(ref), bench.store, ClientOptions(docker_config=tmp_path))
    asked = len(publisher.proxy.seen)
    await bench.turn(11.0)
    assert here(bench) == ("present", None, None) and not bench.node.list_missing()
    assert len(publisher.proxy.seen) == asked


@played
async def test_an_invalid_index_is_a_store_failure(tmp_path: Path, publisher: Publisher) -> None:
    ref = publisher.publish("a")
    bench = Bench(tmp_path, want(ref, refresh=FOR_EVER))
    await bench.turn()
    index = bench.store.root / "index.json"
    good, asked = index.read_bytes(), len(publisher.proxy.seen)
    index.write_bytes(b"{")
    for _ in range(3):
        await bench.turn(11.0)
        state, code, after = here(bench)
        assert (state, code) == ("waiting", "store_failed") and after
        assert bench.model()["reason"] == "cannot access the store; see the node's log"
        assert seconds(bench.model()) <= 10.0 and bench.node.list_missing() == [ref]
    index.write_bytes(good)
    await bench.turn(11.0)
    assert here(bench) == ("present", None, None)
    assert len(publisher.proxy.seen) == asked


@played
async def test_a_store_that_is_not_writable_is_logged_once_and_served(
    tmp_path: Path, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    refs = [publisher.publish("a", tag=tag) for tag in ("one", "other")]
    desired = tmp_path / "desired"
    desired.mkdir()
    entries = [{"ref": ref, "pin": True} for ref in refs]
    (desired / "models.json").write_text(json.dumps(entries))
    store = ImageLayout(tmp_path / "bench")
    for ref in refs:
        pull(Reference.parse(ref), store, ClientOptions(docker_config=tmp_path))
    bench = Bench(tmp_path, desired=desired)
    for kind in ("wanted", "pins"):  # so that the directory cannot be created
        shutil.rmtree(store.root / ".aimage" / kind, ignore_errors=True)
        (store.root / ".aimage" / kind).write_text("")
    caplog.clear()
    for _ in range(5):
        await bench.turn(11.0)
        found = {each["state"]: each["reason"] for each in bench.node.describe_models()}
        assert found == {"present": None} and not bench.node.list_missing()
    events = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "pull failed" not in events
    assert events.count("cannot write to the store") == 1
    (store.root / ".aimage" / "pins").unlink()
    await bench.turn(11.0)
    assert {key for key, _ in store.pins.iter_items()} == set(refs)


# -- space


@played
async def test_eviction_is_retried_until_it_frees_space(
    disk: Disk, publisher: Publisher, old_blobs: None
) -> None:
    ref = publisher.publish("a", size=20 * MIB)
    bench = Bench(disk.root, want(ref), marks=FULL)
    old = put(bench.store, "old", 30 * MIB, 1)
    bench.store.pins.put(index_name(old), {}, durable=True)
    made = bench.node.metrics.collections.labels("space")._value.get
    await bench.turn()
    assert (bench.model()["code"], bench.model()["next"], made()) == ("no_space", None, 1)
    times = []
    for at in range(1, 26):
        count = made()
        await bench.turn(10.0)
        times += [at * 10] * int(made() - count)
    assert times == [10, 30, 70, 130, 190, 250]
    bench.store.pins.remove(index_name(old))
    asked = len(publisher.proxy.seen)
    for _ in range(5):
        await bench.turn(10.0)
    assert len(publisher.proxy.seen) == asked and names(bench.store) == {index_name(old)}
    await bench.turn(11.0)
    assert bench.model()["state"] == "present" and names(bench.store) == {ref}


# -- wrong content


def test_the_pause_after_wrong_content_doubles_up_to_a_day() -> None:
    assert [compute_full_backoff(times, 0.0) / HOUR for times in (1, 2, 3, 4, 5, 6, 99)] == [
        1,
        2,
        4,
        8,
        16,
        24,
        24,
    ]
    assert compute_full_backoff(1, 0.999) < 0.8 * HOUR and compute_full_backoff(99, 0.5) < DAY


def test_two_nodes_keep_each_others_pins(tmp_path: Path) -> None:
    store = ImageLayout(tmp_path / "store")
    name = index_name(put(store, "model", 1000, 1))
    nodes = [
        (Pinner(store, SpecStore(store.root, tmp_path / owner)), ModelStatus(want(name, pin=pin)))
        for owner, pin in (("a", True), ("b", False))
    ]
    owner = SpecStore(store.root, tmp_path / "a").owner

    def keep() -> Any:
        for pinner, model in nodes:
            found = check_model(StoreSnapshot(store), model.spec, model.state.name)
            model.apply(
                functools.partial(apply_store_read, name=model.state.name, completeness=found), 0.0
            )
            pinner.keep(model)
        pin: Any = store.pins.get(name)
        return pin

    assert {keep()["owner"] for _ in range(3)} == {owner}
    nodes.reverse()
    assert keep()["owner"] == owner
    nodes[1][1].apply(functools.partial(apply_spec, spec=want(name)), 0.0)
    assert keep() is None
    store.pins.put(name, {"by": "hand"}, durable=True)
    assert keep()["by"] == "hand"
    for _, model in nodes:
        model.close()


def test_a_kept_model_is_kept_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads, read = [0.0], list[str](), MetadataFiles.read
    monkeypatch.setattr(
        pinner_module, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: 2**70)
    )

    def record(self: MetadataFiles, name: str) -> Any:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(MetadataFiles, "read", record)
    store = ImageLayout(tmp_path / "store")
    name = index_name(put(store, "model", 1000, 1))
    pinner, model = Pinner(store, SpecStore(store.root, tmp_path)), ModelStatus(want(name))
    found = check_model(StoreSnapshot(store), model.spec, model.state.name)
    event = functools.partial(apply_store_read, name=model.state.name, completeness=found)
    model.apply(event, 0.0)

    def keep() -> bool:
        """Return whether the records were read."""
        now[0] += 1
        reads.clear()
        pinner.read_stamp()
        if not pinner.is_kept(model):
            pinner.keep(model)
        return bool(reads)

    # The first writes a record
    assert [keep() for _ in range(4)] == [True, True, False, False]
    pass_tick(tmp_path)
    store.pins.put("another", {}, durable=True)
    assert [keep() for _ in range(2)] == [True, False]
    store.pins.put(
        name, {"by": BY_NODE, "owner": SpecStore(store.root, tmp_path).owner}, durable=True
    )
    assert [keep() for _ in range(3)] == [True, True, False]
    assert store.pins.get(name) is None
    model.apply(functools.partial(apply_spec, spec=want(name, pin=True)), 0.0)
    assert keep() and store.pins.get(name) is not None
    used = store.root / ".aimage" / "used" / found.root.digest.encoded if found.root else store.root
    before = used.stat().st_mtime - 100
    os.utime(used, (before, before))
    now[0] += 40
    keep()
    assert used.stat().st_mtime > before
    model.close()


def test_close_leaves_no_lease_while_other_threads_hold(tmp_path: Path) -> None:
    store = ImageLayout(tmp_path / "store")
    reference = put(store, "model", 1000, 1)
    digest = store.resolve(reference).digest
    for _ in range(30):
        one = ModelStatus(want(str(reference)))
        work = [threading.Thread(target=one.hold, args=(store, digest)) for _ in range(2)]
        work.insert(1, threading.Thread(target=one.close))
        for thread in work:
            thread.start()
        for thread in work:
            thread.join(60)
        one.hold(store, digest)
        assert not list((store.root / ".aimage" / "lease").iterdir())


def asking() -> int:
    return sum(each.name == "aimage-upstream" for each in threading.enumerate())


def test_a_hung_registry_blocks_few_threads_and_no_other_registry(
    tmp_path: Path, publisher: Publisher
) -> None:
    other, answered = Reference.parse(publisher.publish("a")), threading.Event()

    async def play(host: str) -> None:
        questions, before = RegistryLimiter(ClientOptions(docker_config=tmp_path)), asking()
        refs = [Reference.parse(f"{host}/team/model:v{n}") for n in range(20)]
        tasks = [asyncio.create_task(questions.ask(ref, None)) for ref in refs]
        assert await asyncio.wait_for(questions.ask(other, None), 60) is not None
        assert asking() <= before + 9 and not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()  # the threads are still blocked
        with pytest.raises(CrowdedError):
            await questions.ask(refs[0], None, timeout=0.05)
        answered.set()
        with pytest.raises(NotFoundError):
            await questions.ask(refs[0], None, timeout=60)

    def silent(seen: Seen) -> Answer:
        answered.wait(60)
        return Answer(404)

    with ScriptedRegistry(silent).running() as registry:
        asyncio.run(play(registry.host))


@played
async def test_a_model_with_a_queued_tag_check_is_still_checked_in_the_store(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publisher.publish("a")
    monkeypatch.setattr("clowder_aimage.node.reconciler.MAX_ALL", 1)
    monkeypatch.setattr("clowder_aimage.node.reconciler.LOOK", 0.05)
    bench = Bench(tmp_path, want(ref, refresh=5.0))
    await bench.turn()
    await (
        bench.node._reconciler._registries._total.acquire()
    )  # simulate a request without a response
    asked = len(publisher.proxy.seen)
    await bench.turn(6.0)
    assert here(bench)[0] == "present" and len(publisher.proxy.seen) == asked
    shutil.rmtree(bench.store.root / "blobs")
    publisher.refuse(lambda passed: True, 501)
    await bench.turn()
    assert bench.node.list_missing() == [ref]
