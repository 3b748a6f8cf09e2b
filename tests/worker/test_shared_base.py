"""AImages that share a base are one loaded model: loads, memory, names, errors, and pictures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.adapt import combine
from clowder_aimage.create import create
from clowder_aimage.engine import scheduler
from clowder_aimage.engine.admission import StoppedError
from clowder_aimage.engine.event import ImageEvent, LoadingEvent, StartedEvent
from clowder_aimage.engine.queued_request import QueuedRequest
from clowder_aimage.errors import FormatError
from clowder_aimage.generation.request import LoraUse
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.adapter_source import AdapterFinder
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.lora_file import write_lora
from tests.store import copy_store
from tests.wait import until_async
from tests.worker.engine_runs import NAME, Client, FakeRunner, job, played, sample, served

_MIB = 1 << 20
_LOADS = "aimage_model_load_duration_seconds_count"


def refuse(reference: Reference) -> Any:
    raise AssertionError(reference)


def add_variant(store: LayeredStore, name: str, path: Path, strength: float) -> None:
    """Name ``name`` the model ``tiny`` with an adapter for all requests."""
    entry = AdapterFinder(store, refuse, has_files=True).find(LoraUse(str(path), None))
    combine(store, NAME, Reference.parse(name), [(entry, strength)])


@pytest.fixture(scope="module")
def stored_variants(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    """Return a store with ``tiny``, its variants ``soft`` and ``strong``, and ``other``."""
    folder = tmp_path_factory.mktemp("shared")
    store = LayeredStore([folder / "store"])
    # Adapters are packed with a model whose tensors have blobs
    create(store, NAME, TINY)
    create(store, Reference.parse("other"), TINY, form=ModelForm(whole_files=True))
    path = write_lora(folder / "ink.safetensors")
    for name, strength in {"soft": 0.5, "strong": 1.5}.items():
        add_variant(store, name, path, strength)
    return store


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Runner", FakeRunner)


def find_digest(store: LayeredStore, name: str) -> str:
    return str(store.resolve(Reference.parse(name)).digest)


def get_picture(events: list[Any]) -> ImageEvent:
    (picture,) = [event for event in events if isinstance(event, ImageEvent)]
    return picture


@pytest.mark.usefixtures("no_processes")
def test_requests_for_variants_of_one_base_need_one_load(stored_variants: LayeredStore) -> None:
    names = ("tiny", "soft", "strong", "tiny")

    async def play(engine: Any) -> tuple[list[list[Any]], list[str], float | None]:
        events = [await served(engine, job(name)) for name in names]
        (model,) = engine.list_loaded()
        return events, model.list_names(), sample(engine, "aimage_model_loaded", model="soft")

    events, listed, gauge = played(stored_variants, play, models=1)
    loads = [sum(isinstance(each, LoadingEvent) for each in one) for one in events]
    assert loads == [1, 0, 0, 0]
    digests = [find_digest(stored_variants, name) for name in names]
    assert [get_picture(one).digest for one in events] == digests
    assert listed == ["tiny:latest", "soft:latest", "strong:latest"]
    # The metric counts the model, not its names
    assert gauge is None


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("limits", "loaded", "evictions"),
    [
        ({"models": 2}, ["other", "tiny"], None),
        ({"models": 1}, ["other"], 1.0),
        ({"memory": 12 * _MIB}, ["other", "tiny"], None),
    ],
)
def test_the_base_of_several_variants_counts_once(
    stored_variants: LayeredStore,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    loaded: list[str],
    evictions: float | None,
) -> None:
    monkeypatch.setattr(scheduler, "estimate_need", lambda *_: 6 * _MIB)

    async def play(engine: Any) -> tuple[list[str], float | None]:
        for name in ("tiny", "soft", "strong", "other"):
            await served(engine, job(name))
        names = [model.reference.repository for model in engine.list_loaded()]
        return names, sample(engine, "aimage_model_evictions_total", reason="room")

    found = played(stored_variants, play, free=lambda: None, **limits)
    assert found == (loaded, evictions)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("change", ["removed", "replaced", "of another backend"])
def test_a_variant_without_its_base_is_a_model_of_its_own(
    stored_variants: LayeredStore, tmp_path: Path, change: str
) -> None:
    store = LayeredStore([copy_store(stored_variants.roots[0], tmp_path / "store")])
    names, limits = ["tiny", "soft"], dict[str, Any]()
    if change == "removed":
        names = ["other", "soft"]
        store.untag(NAME)
        Collector(store).run()
    elif change == "replaced":
        store.tag(store.resolve(Reference.parse("other")), NAME)
    else:
        limits = {"backends": {"soft:latest": "torch"}}

    async def play(engine: Any) -> float | None:
        events = [await served(engine, job(name)) for name in (*names, "soft")]
        assert get_picture(events[-1]).digest == find_digest(store, "soft")
        return sample(engine, _LOADS)

    assert played(store, play, models=2, **limits) == 2


@pytest.mark.usefixtures("no_processes")
def test_a_variant_is_stopped_alone_while_others_of_its_base_are_served(
    stored_variants: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners: list[FakeRunner] = []
    start = FakeRunner.start

    async def record(*_: object) -> FakeRunner:
        runners.append(runner := await start())
        runner.is_running.clear()
        return runner

    monkeypatch.setattr(FakeRunner, "start", record)

    async def play(engine: Any) -> list[bool]:
        first, second = Client(engine, job("tiny")), Client(engine, job("soft"))
        await first.hears(StartedEvent)
        stopped = [await engine.stop(Reference.parse("soft"))]
        with pytest.raises(StoppedError):
            await second.result()
        runners[0].is_running.set()
        assert get_picture(await first.result())
        await served(engine, job("soft"))
        stopped += [await engine.stop(Reference.parse(name)) for name in ("soft", "tiny")]
        return stopped

    assert played(stored_variants, play) == [True, True, False]
    assert len(runners) == 1


@pytest.mark.usefixtures("no_processes")
def test_a_variant_that_is_removed_leaves_the_model_to_others(
    stored_variants: LayeredStore,
) -> None:
    async def play(engine: Any) -> list[int]:
        counts = []
        for name in ("tiny", "soft"):
            await served(engine, job(name))
        for name in ("tiny", "soft"):
            await engine.forget(stored_variants.resolve(Reference.parse(name)).digest)
            counts.append(len(engine.list_loaded()))
        return counts

    assert played(stored_variants, play) == [1, 0]


@pytest.mark.usefixtures("no_processes")
def test_a_variant_that_cannot_be_loaded_fails_alone(
    stored_variants: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, are_waiting = FakeRunner.start, asyncio.Event()

    async def refuse_soft(_: object, name: str, *__: object) -> FakeRunner:
        if name.startswith("soft"):
            await are_waiting.wait()
            raise FormatError("the adapter is damaged")
        return await start()

    monkeypatch.setattr(FakeRunner, "start", refuse_soft)

    async def play(engine: Any) -> list[Any]:
        clients = []
        for name in ("soft", "tiny", "strong"):
            clients.append(client := Client(engine, job(name)))
            await client.hears(LoadingEvent)
        are_waiting.set()
        results = (client.result() for client in clients)
        return await asyncio.gather(*results, return_exceptions=True)

    soft, *others = played(stored_variants, play)
    assert isinstance(soft, FormatError)
    digests = [find_digest(stored_variants, name) for name in ("tiny", "strong")]
    assert [get_picture(events).digest for events in others] == digests


@pytest.mark.usefixtures("no_processes")
def test_a_complete_variant_does_not_wait_for_blobs_of_another_one(
    stored_variants: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals: list[tuple[str, bool]] = []
    start = FakeRunner.start

    async def record(_: object, name: str, *rest: Any) -> FakeRunner:
        arrivals.append((name.partition(":")[0], bool(rest[2])))
        if rest[2]:
            # Its blobs never arrive
            await asyncio.Event().wait()
        return await start()

    monkeypatch.setattr(FakeRunner, "start", record)

    async def play(engine: Any) -> Any:
        soft = Reference.parse("soft")
        arriving = QueuedRequest(soft)
        stored = read_aimage(stored_variants, soft)
        engine._scheduler.prepare(arriving, stored, None)
        await until_async(lambda: arrivals)
        events = await served(engine, job("tiny"))
        engine._scheduler.leave(arriving)
        return get_picture(events).digest

    assert played(stored_variants, play) == find_digest(stored_variants, "tiny")
    assert arrivals == [("soft", True), ("tiny", False)]


def test_a_base_digest_ignores_what_a_variant_adds(stored_variants: LayeredStore) -> None:
    names = ("tiny", "soft", "strong", "other")
    digests = [read_aimage(stored_variants, Reference.parse(name)).aimage for name in names]
    tiny, soft, strong, other = (aimage.base_digest for aimage in digests)
    assert tiny == soft == strong != other


@pytest.mark.integration
def test_pictures_of_variants_are_those_of_a_worker_for_each(
    stored_variants: LayeredStore, tmp_path: Path
) -> None:
    pytest.importorskip("mlx")
    names = ("tiny", "soft", "strong", "soft", "tiny")

    async def play_all(engine: Any) -> tuple[list[bytes], float | None]:
        pictures = [get_picture(await served(engine, job(name))).data for name in names]
        return pictures, sample(engine, _LOADS)

    def draw_alone(name: str) -> bytes:
        async def play(engine: Any) -> bytes:
            return get_picture(await served(engine, job(name))).data

        picture: bytes = played(stored_variants, play)
        return picture

    together, loads = played(stored_variants, play_all)
    alone = {name: draw_alone(name) for name in set(names)}
    assert len(set(alone.values())) == 3
    assert together == [alone[name] for name in names]
    assert loads == 1
