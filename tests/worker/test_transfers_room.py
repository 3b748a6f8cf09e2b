"""Pulls from a silent registry do not block other registries or shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.real_registry import RealRegistry

pytest.importorskip("prometheus_client")

from clowder_aimage.create import create
from clowder_aimage.engine.admission import BusyError, StoppedError
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.transfer_queue import MAX_TRANSFERS, TransferQueue
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY
from tests.proxy import Proxy, Reply


def played(root: Path, play: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        store = ImageLayout(root)
        async with asyncio.timeout(60):
            return await play(TransferQueue(store, ClientOptions(), Metrics(), EventLog()), store)

    return asyncio.run(run())


@pytest.fixture
def silent(registry: RealRegistry) -> Iterator[tuple[Proxy, threading.Event]]:
    """Run a proxy that does not respond until its event is set."""
    released = threading.Event()
    with Proxy(registry.host).running() as proxy:
        proxy.instead = lambda passed: Reply(404) if released.wait(30) else None
        yield proxy, released
        released.set()


def test_forty_pulls_from_a_silent_registry_leave_a_slot_for_another(
    tmp_path: Path, silent: tuple[Proxy, threading.Event], repository: str
) -> None:
    proxy, released = silent
    first = ImageLayout(tmp_path / "first")
    reference = Reference.parse(f"{repository}:v1")
    create(first, reference, TINY, form=ModelForm(whole_files=True))  # a few blobs
    push(first, reference, ClientOptions())

    async def play(transfers: Any, store: Any) -> tuple[int, Any]:
        refused = 0
        with ExitStack() as stack:
            for number in range(40):
                name = Reference.parse(f"{proxy.host}/team/x{number}")
                try:
                    stack.enter_context(transfers.pull(name))
                except BusyError:
                    refused += 1
            with transfers.pull(reference) as pull:
                await pull.wait()
            released.set()
        return refused, store.resolve(reference)

    refused, found = played(tmp_path / "store", play)
    assert refused == 40 - MAX_TRANSFERS
    assert found


def test_closing_does_not_wait_for_a_registry(
    tmp_path: Path, silent: tuple[Proxy, threading.Event]
) -> None:
    proxy, released = silent

    async def play(transfers: Any, _: Any) -> None:
        with transfers.pull(Reference.parse(f"{proxy.host}/team/x")) as pull:
            await asyncio.to_thread(proxy.wait_until, lambda: proxy.seen)
            transfers.close()
            with pytest.raises(StoppedError, match="was cancelled"):
                await pull.wait()
        released.set()

    played(tmp_path / "store", play)
