"""Models in an unchanged store are not checked again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.errors import StoreError
from clowder_aimage.layout import fingerprint
from clowder_aimage.layout.completeness import MAX_AGE, Completeness
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.node import eviction, pinner, reconciler
from clowder_aimage.node.reconciler import Reconciler
from clowder_aimage.oci import Reference
from tests.node.publisher import Publisher
from tests.node.test_node_clock import Bench, want
from tests.store import pass_tick

if TYPE_CHECKING:
    from clowder_aimage.node.model_spec import ModelSpec
    from clowder_aimage.node.model_state import ModelStatus


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the names of checked models."""
    seen, check_model = [], pinner.check_model

    def counted(store: StoreSnapshot, wanted: ModelSpec, reference: Reference) -> Completeness:
        seen.append(wanted.name)
        return check_model(store, wanted, reference)

    monkeypatch.setattr(reconciler, "check_model", counted)
    return seen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all earlier changes of the store appear old."""
    monkeypatch.setattr(fingerprint, "_SETTLED", -(10**11))


async def idle(home: Path, publisher: Publisher, count: int = 2) -> tuple[Bench, list[str]]:
    """Return a bench with ``count`` models, and their names."""
    names = [publisher.publish(f"layer {n}", tag=f"v{n}") for n in range(count)]
    bench = Bench(home, *(want(name, refresh=3600.0) for name in names))
    for _ in range(3):
        await bench.turn(11.0)
    assert {(one["state"], one["reason"]) for one in bench.node.describe_models()} == {
        ("present", None)
    }
    return bench, names


def fail(error: OSError | StoreError) -> NoReturn:
    raise error


def largest(bench: Bench) -> Path:
    """Return the path of the largest blob, an unshared layer."""
    return max(bench.store.root.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)


def test_models_of_an_unchanged_store_are_not_checked_again(
    tmp_path: Path, publisher: Publisher, looks: list[str], settled: None
) -> None:
    async def play() -> list[str]:
        bench, _ = await idle(tmp_path, publisher)
        looks.clear()
        for _ in range(10):
            await bench.turn(11.0)
        return bench.node.list_missing()

    assert asyncio.run(play()) == []
    assert looks == []


def test_blobs_of_an_unchanged_store_are_not_measured_again(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    measured, measure_blobs = list[int](), eviction.measure_blobs

    def record(root: Path) -> int:
        measured.append(measure_blobs(root))
        return measured[-1]

    monkeypatch.setattr(eviction, "measure_blobs", record)

    async def play() -> None:
        bench, _ = await idle(tmp_path, publisher)

        def measure() -> None:
            bench.node.evictor._measured_at = -1e9
            bench.node.evictor.check_disk(lambda: ())

        measure()
        measured.clear()
        measure()
        assert measured == []
        pass_tick(tmp_path)
        largest(bench).unlink()
        measure()
        assert len(measured) == 1

    asyncio.run(play())


def test_a_failed_measurement_is_made_again(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    def fail() -> NoReturn:
        raise StoreError("Input/output error")

    async def play() -> None:
        bench, _ = await idle(tmp_path, publisher)
        evictor, counts = bench.node.evictor, list[float]()
        evictor._measured = None
        monkeypatch.setattr(evictor._metrics.images, "set", counts.append)
        with monkeypatch.context() as patch:
            patch.setattr(evictor._store, "list_tags", fail)
            with pytest.raises(StoreError):
                evictor._measure()
        evictor._measure()
        assert len(counts) == 1

    asyncio.run(play())


def test_a_deleted_blob_is_noticed_at_the_next_turn(
    tmp_path: Path, publisher: Publisher, looks: list[str], settled: None
) -> None:
    async def play() -> tuple[int, int]:
        bench, names = await idle(tmp_path, publisher)
        publisher.refuse(lambda passed: True, 501)
        pass_tick(tmp_path)
        largest(bench).unlink()
        looks.clear()
        await bench.turn(11.0)
        return len(bench.node.list_missing()), len(names)

    missing, all_ = asyncio.run(play())
    assert missing == 1
    assert len(looks) == all_


def test_a_restored_tag_is_noticed_at_the_next_turn(
    tmp_path: Path, publisher: Publisher, looks: list[str], settled: None
) -> None:
    async def play() -> tuple[list[str], list[str], list[str]]:
        bench, names = await idle(tmp_path, publisher)
        first = Reference.parse(names[0])
        descriptor = bench.store.resolve(first)
        publisher.refuse(lambda passed: True, 501)
        bench.store.untag(first)
        await bench.turn(11.0)
        missing = bench.node.list_missing()
        pass_tick(tmp_path)
        bench.store.tag(descriptor, first)
        await bench.turn(11.0)
        return missing, names[:1], bench.node.list_missing()

    missing, gone, at_last = asyncio.run(play())
    assert missing == gone and at_last == []


def test_a_truncated_blob_is_noticed_after_max_age(
    tmp_path: Path, publisher: Publisher, looks: list[str], settled: None
) -> None:
    async def play() -> list[str]:
        bench, _ = await idle(tmp_path, publisher)
        publisher.refuse(lambda passed: True, 501)
        path = largest(bench)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.truncate(10)
        await bench.turn(MAX_AGE)
        await bench.turn(11.0)
        return bench.node.list_missing()

    assert len(asyncio.run(play())) == 1


def test_a_model_is_not_missing_during_its_check(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    async def play() -> tuple[list[str], int]:
        bench, _ = await idle(tmp_path, publisher)
        missing, looked, check_model = [], [], pinner.check_model

        def watched(*asked: Any) -> Completeness:
            looked.append(asked)
            missing.extend(bench.node.list_missing())
            return check_model(*asked)

        monkeypatch.setattr(reconciler, "check_model", watched)
        bench.node.look_again()
        await bench.turn(11.0)
        return missing, len(looked)

    assert asyncio.run(play()) == ([], 2)


def test_a_model_whose_check_crashes_is_missing(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    async def play() -> bool:
        bench, names = await idle(tmp_path, publisher, count=1)
        monkeypatch.setattr(
            reconciler, "check_model", lambda *_: fail(OSError(5, "Input/output error"))
        )
        bench.node.look_again()
        await bench.turn(11.0)
        return bench.node.list_missing() == names

    assert asyncio.run(play())


def test_look_again_during_a_check_causes_another_check(
    tmp_path: Path,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    looks: list[str],
    settled: None,
) -> None:
    async def play() -> None:
        bench, _ = await idle(tmp_path, publisher, count=1)
        check_model = vars(reconciler)["check_model"]  # counted

        def interrupted(*asked: Any) -> Any:
            found = check_model(*asked)
            if len(looks) == 1:
                bench.node.look_again()
            return found

        looks.clear()
        monkeypatch.setattr(reconciler, "check_model", interrupted)
        bench.node.look_again()
        for _ in range(3):
            await bench.turn(11.0)

    asyncio.run(play())
    assert len(looks) == 2


def test_an_unreadable_store_is_checked_again(
    tmp_path: Path, publisher: Publisher, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> tuple[bool, list[str]]:
        bench, names = await idle(tmp_path, publisher)
        publisher.refuse(lambda passed: True, 501)
        bench.node.look_again()
        with monkeypatch.context() as broken:
            error = StoreError("cannot read /srv/store: too many open files")
            broken.setattr(bench.store, "read", lambda _: fail(error))
            await bench.turn(11.0)
            missing = bench.node.list_missing()
            assert "/srv" not in str(bench.node.describe_models())
        await bench.turn(11.0)
        return missing == names, bench.node.list_missing()

    assert asyncio.run(play()) == (True, [])


def test_retry_and_look_again_check_the_store(
    tmp_path: Path, publisher: Publisher, looks: list[str], settled: None
) -> None:
    async def play() -> list[str]:
        bench, names = await idle(tmp_path, publisher)
        looks.clear()
        bench.node.retry(names[0])
        await bench.turn()
        assert looks == names[:1]
        bench.node.look_again()
        await bench.turn()
        return names

    assert sorted(asyncio.run(play())) == sorted(looks[1:])


def test_a_recently_changed_store_is_checked_again(
    tmp_path: Path, publisher: Publisher, looks: list[str]
) -> None:
    async def play() -> None:
        bench, _ = await idle(tmp_path, publisher, count=1)
        looks.clear()
        await bench.turn(11.0)

    asyncio.run(play())
    assert len(looks) == 1


def test_present_models_are_looked_at_together(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    """A model that needs more than a look is reconciled by itself."""
    reconciled = list[str]()
    reconcile = Reconciler.reconcile

    async def record(self: Reconciler, model: ModelStatus) -> None:
        reconciled.append(model.spec.name)
        await reconcile(self, model)

    async def play() -> None:
        monkeypatch.setattr(pinner, "_SETTLED", -(10**11))
        monkeypatch.setattr(pinner, "_STAMP_AGE", -1.0)
        bench, names = await idle(tmp_path, publisher, count=3)
        await bench.turn(11.0)
        monkeypatch.setattr(Reconciler, "reconcile", record)
        await bench.turn(11.0)
        assert reconciled == []
        assert {one["state"] for one in bench.node.describe_models()} == {"present"}
        bench.store.untag(Reference.parse(names[1]))
        publisher.refuse(lambda passed: True, 501)
        await bench.turn(11.0)
        assert names[1] in reconciled
        assert bench.node.list_missing() == [names[1]]

    asyncio.run(play())
