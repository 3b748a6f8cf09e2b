"""Parts of a node: abandoned downloads, spellings of names, and its event loop."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.http.app import build_app
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.eviction import DiskReading, Watermarks, relieve
from clowder_aimage.node.model_spec import parse_specs
from clowder_aimage.node.node import Node, is_of
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import MIB
from tests.node.publisher import Publisher
from tests.node.test_node_clock import Bench
from tests.node.test_node_disk import names, old_blobs, put, told
from tests.node.test_node_live import asked

if TYPE_CHECKING:
    from clowder_aimage.layout.ingest import FileIngest


__all__ = ["old_blobs"]  # a fixture
PARTIAL = 20 * MIB  # large enough for an ingest record
DIGEST, OTHER = (f"sha256:{each * 32}" for each in ("ab", "cd"))
READS = (
    "open", "stat", "lstat", "listdir", "scandir", "statvfs", "readlink", "fsync", "mkdir",
    "unlink", "replace", "rename", "utime", "link",
)  # fmt: skip


# -- lack of space


def begun(store: ImageLayout, age: float) -> tuple[FileIngest, Callable[[], None]]:
    """Start an ingest; return it with a function that makes it ``age`` seconds old."""
    content = Descriptor("application/octet-stream", Digest.of(b"partial"), PARTIAL)
    ingest = store.ingest(content.digest.encoded, content)
    ingest.write_at(0, bytes(PARTIAL))
    at = time.time() - age

    def let_age() -> None:
        for path in (store.root / ".aimage" / "ingest").iterdir():
            os.utime(path, (at, at))

    return ingest, let_age


def abandoned(store: ImageLayout, age: float) -> None:
    """Leave an ingest of ``age`` seconds without a process."""
    ingest, let_age = begun(store, age)
    ingest.suspend()
    let_age()


def partials(store: ImageLayout) -> int:
    return len(list((store.root / ".aimage" / "ingest").iterdir()))


@pytest.fixture
def store_with_old_model(tmp_path: Path) -> ImageLayout:
    """Return a store with an old unwanted model."""
    store = ImageLayout(tmp_path / "store")
    put(store, "old", 5 * MIB, 0)
    return store


@pytest.mark.usefixtures("old_blobs")
def test_relieve_removes_abandoned_downloads_before_models(
    store_with_old_model: ImageLayout,
) -> None:
    abandoned(store_with_old_model, 660.0)
    done = relieve(store_with_old_model, PARTIAL - MIB, keep=())
    assert (done.partials, done.forgotten) == (1, [])
    assert done.partial_size >= PARTIAL and not partials(store_with_old_model)
    assert len(names(store_with_old_model)) == 1


@pytest.mark.usefixtures("old_blobs")
def test_relieve_keeps_recent_downloads_and_evicts_a_model(
    store_with_old_model: ImageLayout,
) -> None:
    abandoned(store_with_old_model, 300.0)
    done = relieve(store_with_old_model, MIB, keep=())
    assert done.partials == 0 and partials(store_with_old_model)
    assert len(done.forgotten) == 1 and not names(store_with_old_model)


@pytest.mark.usefixtures("old_blobs")
def test_relieve_keeps_a_slow_running_download(store_with_old_model: ImageLayout) -> None:
    ingest, let_age = begun(store_with_old_model, 86400.0)
    let_age()
    try:
        assert relieve(store_with_old_model, 2 * PARTIAL, keep=()).partials == 0
        assert partials(store_with_old_model) and not names(store_with_old_model)
    finally:
        ingest.suspend()


@pytest.mark.usefixtures("old_blobs")
def test_relieve_evicts_models_if_abandoned_downloads_are_too_small(
    store_with_old_model: ImageLayout,
) -> None:
    abandoned(store_with_old_model, 660.0)
    done = relieve(store_with_old_model, PARTIAL + MIB, keep=())
    assert not partials(store_with_old_model) and not names(store_with_old_model)
    assert len(done.forgotten) == 1


@pytest.mark.usefixtures("old_blobs")
def test_a_node_above_its_mark_removes_abandoned_downloads(tmp_path: Path) -> None:
    total, excess = 1000 * MIB, PARTIAL - MIB

    async def play() -> None:
        full = DiskReading(total, int(0.8 * total) + excess, int(0.2 * total) - excess)
        marks = Watermarks(0.8, 0.8, age=0.0, measure=lambda _: full)
        bench = Bench(tmp_path, marks=marks)
        bench.events.attach()
        unwanted = put(bench.store, "old", 5 * MIB, 0)
        abandoned(bench.store, 660.0)
        await bench.turn()
        assert names(bench.store) == {index_name(unwanted)} and not partials(bench.store)
        assert bench.node.metrics.collections.labels("high")._value.get() == 1
        assert bench.node.metrics.reclaimed._value.get() >= PARTIAL
        assert await told(bench, "evict") == [] and len(await told(bench, "gc")) == 1

    asyncio.run(play())


# -- names of models


@pytest.mark.parametrize(
    ("ref", "name", "is_meant"),
    [
        ("h.io/a:latest", "oci://h.io/a", True),
        ("h.io/a", f"h.io/a:latest@{DIGEST}", True),
        ("h.io/a", "h.io/a:v1", False),
        (f"h.io/a:v1@{DIGEST}", "h.io/a:v1", True),
        (f"h.io/a@{DIGEST}", f"h.io/a@{OTHER}", False),
        (f"h.io/a@{DIGEST}", "h.io/a", False),
        ("h.io/a", "oci://", False),
    ],
)
def test_is_of_accepts_each_spelling_of_a_name(ref: str, name: str, is_meant: bool) -> None:
    (found,) = parse_specs([{"ref": ref}])
    assert is_of(name, found) is is_meant


# -- its event loop


class Watched:
    """Record file system calls below ``home`` on the loop's thread, and count those elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.home = str(home)
        self.loop = threading.get_ident()
        self.on_loop: list[Any] = []
        self.elsewhere: Counter[Any] = Counter()
        self.is_on = False
        for name in READS:
            self._watch(monkeypatch, os, name)
        for module in (builtins, io):
            self._watch(monkeypatch, module, "open")

    def _watch(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if not self.is_on or self._is_foreign(*arguments[:1]):
                pass
            elif threading.get_ident() == self.loop:
                self.on_loop.append((name, *arguments[:1]))
            else:
                self.elsewhere[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    def _is_foreign(self, place: str = ".") -> bool:
        text = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ""
        return text.startswith("/") and not text.startswith(self.home)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@contextlib.asynccontextmanager
async def served(home: Path) -> AsyncIterator[tuple[SimpleNamespace, Node]]:
    """Run a node on the current event loop; yield its URL and the node."""
    settings = NodeSettings(desired=home / "desired")
    service = make_service(settings, ImageLayout(home / "store"), ClientOptions(docker_config=home))
    daemon = Daemon(service, settings, {})
    app = build_app(WorkerRole(service, makes_pictures=False), daemon)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with daemon.running():
            here = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield SimpleNamespace(url=here), daemon.node
    finally:
        await runner.cleanup()


def test_the_event_loop_makes_no_file_system_calls(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publisher.publish("a")
    (tmp_path / "desired").mkdir()
    (tmp_path / "desired" / "models.json").write_text(json.dumps([{"ref": ref, "pin": True}]))
    questions = [
        ("GET", "/v1/node", None, 200),
        ("GET", "/readyz", None, 200),
        ("POST", "/v1/node/retry", {"ref": ref}, 202),
        ("GET", "/v2/", None, 200),
        ("GET", "/healthz", None, 200),
    ]

    async def play() -> None:
        watched = Watched(monkeypatch, tmp_path)
        async with served(tmp_path) as (here, node):
            async with asyncio.timeout(60):
                while node.list_missing():
                    await asyncio.sleep(0.05)
            with watched.on():
                for method, path, body, status in questions:
                    answer = await asyncio.to_thread(asked, here, method, path, body)
                    assert answer[0] == status, path
                    assert watched.on_loop == [], path
            assert watched.elsewhere["open"] and watched.elsewhere["stat"]
            with watched.on():
                shutil.disk_usage(tmp_path)
                (tmp_path / "desired" / "models.json").read_bytes()
            assert {name for name, *_ in watched.on_loop} >= {
                "statvfs",
                "open",
            }  # the recorder works

    asyncio.run(play())
