"""Pruning with several nodes on one store, and with unreadable records."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node import eviction
from clowder_aimage.node.eviction import relieve
from tests.node.nodes import MIB
from tests.node.publisher import Publisher
from tests.node.test_node_clock import Bench, want
from tests.node.test_node_disk import names, put

LONG = 3600.0  # seconds; longer than any delay before removal


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for unwanted names at every turn."""
    monkeypatch.setattr(eviction, "OFTEN", 0.0)
    monkeypatch.setattr(eviction, "EVERY", 0.0)


def files(home: Path, name: str, *refs: str) -> Path:
    """Write a desired state with these models and return its directory."""
    directory = home / name
    directory.mkdir(exist_ok=True)
    beside = directory / ".new"
    beside.write_text(json.dumps([{"ref": ref} for ref in refs]))
    beside.replace(directory / "models.json")
    return directory


async def turns(*benches: Bench, count: int = 4) -> None:
    """Run several turns of each bench with long pauses."""
    for _ in range(count):
        for bench in benches:
            await bench.turn(LONG)


async def evicted(bench: Bench) -> list[Any]:
    # Threads that have ended added their events as calls of the loop
    await asyncio.sleep(0)
    return [item.facts["model"] for item in bench.events._retained if item.kind == "evict"]


def test_a_name_removed_from_the_list_is_pruned(tmp_path: Path, publisher: Publisher) -> None:
    one, other = publisher.publish("a", tag="v1"), publisher.publish("b", tag="v2")

    async def play() -> None:
        bench = Bench(tmp_path, desired=files(tmp_path, "list", one, other), prune=True)
        await turns(bench)
        assert names(bench.store) == {one, other}
        files(tmp_path, "list", one)
        await turns(bench)
        assert names(bench.store) == {one} and await evicted(bench) == [other]

    asyncio.run(play())


def test_two_pruning_nodes_keep_each_others_tags_of_one_model(
    tmp_path: Path, publisher: Publisher
) -> None:
    one, other = publisher.publish("a", tag="v1"), publisher.publish("a", tag="v2")

    async def play() -> None:
        benches = [
            Bench(tmp_path, desired=files(tmp_path, name, ref), prune=True)
            for name, ref in (("one", one), ("other", other))
        ]
        await turns(*benches)
        assert names(benches[0].store) == {one, other}
        assert [await evicted(bench) for bench in benches] == [[], []]
        files(tmp_path, "one")
        await turns(*benches)
        assert names(benches[0].store) == {other} and await evicted(benches[1]) == []

    asyncio.run(play())


def test_models_of_a_stopped_node_are_not_pruned(tmp_path: Path, publisher: Publisher) -> None:
    ours, theirs = publisher.publish("a", tag="v1"), publisher.publish("b", tag="v2")

    async def play() -> None:
        other = Bench(tmp_path, desired=files(tmp_path, "theirs", theirs))
        await other.turn()
        for one in other.node._models.values():
            one.close()  # release its leases, as if it was killed
        bench = Bench(tmp_path, desired=files(tmp_path, "ours", ours), prune=True)
        await turns(bench)
        assert names(bench.store) == {ours, theirs} and await evicted(bench) == []

    asyncio.run(play())


def test_a_shared_name_is_pruned_after_its_last_owner_removed_it(
    tmp_path: Path, publisher: Publisher
) -> None:
    ref = publisher.publish("a")

    async def play() -> None:
        one, other = (
            Bench(tmp_path, desired=files(tmp_path, name, ref), prune=True) for name in "ab"
        )
        await turns(one, other)
        files(tmp_path, "a")
        await turns(one, other)
        assert names(one.store) == {ref}
        files(tmp_path, "b")
        await turns(one, other)
        assert names(one.store) == set()

    asyncio.run(play())


@pytest.mark.parametrize("when", ["running", "at the start"])
def test_unreadable_records_prune_nothing(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Unreadable records do not count as empty, also after they are readable again."""
    ref = publisher.publish("a")
    listdir, is_lost = os.listdir, [False]

    def failing(path: str = ".") -> list[str]:
        if is_lost[0] and str(path).endswith("wanted"):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", failing)

    async def play() -> None:
        bench = Bench(tmp_path, want(ref), prune=True)
        await turns(bench)
        is_lost[0] = True
        os.utime(bench.store.root / ".aimage" / "wanted")  # forces it to be read again
        if when == "at the start":
            bench.start(prune=True)
        await turns(bench)
        assert names(bench.store) == {ref}
        is_lost[0] = False
        await turns(bench)
        assert names(bench.store) == {ref} and not bench.node.list_warnings()
        assert bench.model()["state"] == "present" and await evicted(bench) == []

    asyncio.run(play())


def test_no_model_is_evicted_if_that_frees_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.node.eviction.GRACE", 0.0)
    store = ImageLayout(tmp_path / "store")
    old, new = (put(store, name, 2 * MIB, at) for at, name in enumerate(("old", "new")))
    relieve(store, 5 * MIB, (), age=0.0, is_all=True)
    assert len(names(store)) == 2
    done = relieve(store, 1 * MIB, (), age=0.0, is_all=True)
    assert [one.name for one in done.forgotten] == [index_name(old)]
    assert names(store) == {index_name(new)}
    relieve(store, 5 * MIB, (), age=0.0)  # above the upper watermark, evict as much as allowed
    assert names(store) == set()
