"""Executors: what stands still keeps neither probes nor generations waiting."""

from __future__ import annotations

import ast
import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import clowder_aimage
from clowder_aimage.engine import executor
from clowder_aimage.engine.executor import (
    run_decoding,
    run_generation,
    run_io,
    run_locking,
    run_probe,
)
from clowder_aimage.errors import StoreBusyError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import hold_lock
from tests.content.artifact import put_artifact
from tests.worker.test_health import ready, service, spoken

__all__ = ["service"]
PACKAGE = Path(clowder_aimage.__file__).parent


@pytest.fixture
def block() -> Iterator[threading.Event]:
    """Return an event that calls wait for; it is set at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_standing_calls_do_not_delay_other_kinds(block: threading.Event) -> None:
    async def main() -> tuple[int, int, int]:
        standing = [asyncio.create_task(run_locking(block.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        found = await run_io(int, "1"), await run_generation(int, "2"), await run_probe(int, "3")
        await run_decoding(int, "4")
        assert not any(each.done() for each in standing)
        block.set()
        await asyncio.gather(*standing)
        return found

    assert asyncio.run(main()) == (1, 2, 3)


def test_a_queued_call_of_a_cancelled_task_is_not_begun(
    block: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executor._THREADS, "locking", 1)
    begun: list[int] = []

    async def main() -> None:
        first = asyncio.create_task(run_locking(block.wait))
        second = asyncio.create_task(run_locking(begun.append, 2))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        block.set()
        await first
        await run_locking(begun.append, 3)

    asyncio.run(main())
    assert begun == [3]


def test_a_lock_is_waited_for_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LOCK_TIMEOUT", 0.02)

    def take() -> None:
        with hold_lock(tmp_path, "lock"):
            pass

    with hold_lock(tmp_path, "lock"), pytest.raises(StoreBusyError, match="in use by process"):
        asyncio.run(run_locking(take))
    asyncio.run(run_locking(take))


def test_readiness_has_a_time_limit(
    service: Any,
    block: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "PROBE_TIMEOUT", 0.05)
    service.readiness = SimpleNamespace(list_reasons=lambda *_: block.wait())

    status, body, after = ready(service)
    assert (status, body["reasons"]) == (503, [{"reason": "store not readable"}])
    assert after


def test_a_locked_store_is_answered_with_503(
    service: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight changes wait for the lock; readiness and lists are answered meanwhile."""
    monkeypatch.setattr(executor, "LOCK_TIMEOUT", 0.3)
    store = service.store
    assert isinstance(store, ImageLayout)
    put_artifact(store, "a", b"model")

    async def talk(client: Any, _: Any) -> tuple[list[Any], int, int]:
        copy = {"source": "a", "destination": "b"}
        with hold_lock(store.root, "lock"):
            copies = [asyncio.create_task(client.post("/api/copy", json=copy)) for _ in range(8)]
            await asyncio.sleep(0)
            probe, tags = await client.get("/readyz"), await client.get("/api/tags")
            answers = await asyncio.gather(*copies)
        return answers, probe.status, tags.status

    answers, probe, tags = spoken(service, talk)
    assert [each.status for each in answers] == [503] * 8
    assert all(each.headers["Retry-After"] for each in answers)
    assert (probe, tags) == (200, 200)


def test_the_package_uses_no_default_executor() -> None:
    """Its few threads would be shared by all calls, also by those that stand still."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        if not re.search(r"to_thread|run_in_executor", text):
            continue
        for node in ast.walk(ast.parse(text)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            name = node.name if isinstance(node, ast.alias) else name
            if name in ("to_thread", "run_in_executor"):
                found.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert found == ["engine/executor.py: run_in_executor"]
