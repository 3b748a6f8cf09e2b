"""The transfer queue: shared pulls, cancellation, priorities and limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.content import Rate
from clowder_aimage.create import create
from clowder_aimage.engine.admission import BusyError, StoppedError
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.transfer_queue import (
    DESIRED,
    INTERACTIVE,
    MAX_TRANSFERS,
    PREFETCH,
    TransferQueue,
)
from clowder_aimage.errors import (
    FormatError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    RegistryError,
    StoreError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)
from clowder_aimage.http.api_error import convert_error, convert_registry_error
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY
from tests.proxy import Proxy, Reply
from tests.real_registry import RealRegistry
from tests.wait import until_async

PATH = "tests/transfers:v1"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, registry: RealRegistry) -> None:
    store = ImageLayout(tmp_path_factory.mktemp("transfers") / "store")
    name = Reference.parse(f"{registry.host}/{PATH}")
    create(store, name, TINY, form=ModelForm(whole_files=True))  # a few blobs
    push(store, name, ClientOptions())


@pytest.fixture
def proxy(registry: RealRegistry, pushed: None) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


class Played:
    """Transfers into an empty store."""

    def __init__(self, root: Any) -> None:
        self.store, self.metrics, self.events = ImageLayout(root), Metrics(), EventLog()
        self.all = TransferQueue(self.store, ClientOptions(), self.metrics, self.events, settle=0.0)

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def played(tmp_path: Path, play: Callable[[Played], Any]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60):
            return await play(Played(tmp_path / "played"))

    return asyncio.run(run())


def test_a_pull_without_waiting_clients_is_cancelled(tmp_path: Path, proxy: Proxy) -> None:
    reference = Reference.parse(f"{proxy.host}/{PATH}")
    proxy.hold = 1

    async def play(it: Played) -> None:
        with it.all.pull(reference) as pull:
            await asyncio.to_thread(proxy.wait_until, lambda: proxy.held > 0)
            assert it.all.find_pull(reference) is pull
        proxy.release()
        with pytest.raises(StoppedError, match="was cancelled"):
            await pull.wait()
        assert it.all.find_pull(reference) is None
        with pytest.raises(NotFoundError):
            it.store.resolve(reference)
        assert it.counted("aimage_pulls_total", outcome="stopped", registry=proxy.host) == 1
        with it.all.pull(reference) as again:  # it can be started again
            await again.wait()
        assert it.store.resolve(reference)

    played(tmp_path, play)


def test_a_kept_pull_continues_without_waiting_clients(tmp_path: Path, proxy: Proxy) -> None:
    reference = Reference.parse(f"{proxy.host}/{PATH}")
    proxy.hold = 1

    async def play(it: Played) -> None:
        with it.all.pull(reference) as pull:
            pull.is_kept = True
            await asyncio.to_thread(proxy.wait_until, lambda: proxy.held > 0)
        proxy.release()
        await pull.wait()
        assert it.store.resolve(reference)
        assert pull.completed == pull.total
        assert it.counted("aimage_pulls_total", outcome="done", registry=proxy.host) == 1
        assert it.counted("aimage_pull_bytes_total", source="registry") == pull.total
        assert it.counted("aimage_pull_inflight") == 0
        async with aclosing(it.events.listen()) as events:
            item = await anext(events)
        assert (item.kind, item.facts["outcome"]) == ("pull", "done")
        assert item.facts["reference"] == str(reference)

    played(tmp_path, play)


def test_closing_stops_transfers_and_refuses_new_ones(tmp_path: Path, proxy: Proxy) -> None:
    reference = Reference.parse(f"{proxy.host}/{PATH}")
    proxy.hold = 1

    async def play(it: Played) -> None:
        with it.all.pull(reference) as pull:
            await asyncio.to_thread(proxy.wait_until, lambda: proxy.held > 0)
            it.all.close()
            proxy.release()
            with pytest.raises(StoppedError):
                await pull.wait()
        with pytest.raises(StoppedError), it.all.pull(reference):
            pass

    played(tmp_path, play)


def test_transfers_beyond_the_limit_are_refused(tmp_path: Path, proxy: Proxy) -> None:
    released = threading.Event()
    proxy.instead = lambda passed: Reply(404) if released.wait(30) else None

    async def play(it: Played) -> None:
        with ExitStack() as stack:
            pulls = [
                stack.enter_context(it.all.pull(Reference.parse(f"{proxy.host}/tests/x{number}")))
                for number in range(MAX_TRANSFERS)
            ]
            with (
                pytest.raises(BusyError),
                it.all.pull(Reference.parse(f"{proxy.host}/tests/more")),
            ):
                pass
            released.set()
            results = await asyncio.gather(*(each.wait() for each in pulls), return_exceptions=True)
        assert all(isinstance(each, NotFoundError) for each in results), results

    played(tmp_path, play)


def test_a_name_without_a_registry_is_refused(tmp_path: Path) -> None:
    async def play(it: Played) -> None:
        local = Reference.parse("tiny")
        with pytest.raises(UsageError, match="has no registry"), it.all.pull(local):
            pass

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NetworkError("x"), 502),
        (RegistryError("x", status=500), 502),
        (UnauthorizedError("x"), 502),
        (VerificationError("x"), 502),
        (FormatError("x"), 502),
        (NotFoundError("x"), 404),
        (UsageError("x"), 400),
        (NoSpaceError("x"), 507),
        (StoreError("x"), 503),
        (StoppedError("x"), 503),
        (BusyError(1, 5), 503),
    ],
)
def test_registry_errors_map_to_http_statuses(error: Any, status: int) -> None:
    assert convert_error(convert_registry_error(error)).status == status


def test_urgent_pulls_start_first_and_joining_raises_urgency(tmp_path: Path, proxy: Proxy) -> None:
    released = threading.Event()
    proxy.instead = lambda passed: Reply(404) if released.wait(30) else None

    def name(number: int) -> Reference:
        return Reference.parse(f"{proxy.host}/tests/y{number}")

    async def play(it: Played) -> None:
        wanted = [(urgency, priority) for urgency in (PREFETCH, DESIRED) for priority in (0, 5, 9)]
        with ExitStack() as stack:
            pulls = [
                stack.enter_context(it.all.pull(name(number), urgency=urgency, priority=priority))
                for number, (urgency, priority) in enumerate(wanted)
            ]
            assert not any(pull.is_begun for pull in pulls)  # the queue waits for further pulls
            await until_async(lambda: sum(pull.is_begun for pull in pulls) >= 3)
            # all desired pulls, and no prefetch while two or more pulls run
            assert [pull.is_begun for pull in pulls] == 3 * [False] + 3 * [True]
            assert it.counted("aimage_pull_queue_depth", **{"class": "prefetch"}) == 3
            assert it.counted("aimage_pull_inflight") == 3
            with it.all.pull(name(1)) as joined:  # an interactive request joins a prefetch
                assert joined is pulls[1] and joined.is_begun and joined.urgency == INTERACTIVE
            released.set()
            await asyncio.gather(*(each.wait() for each in pulls), return_exceptions=True)
        assert it.counted("aimage_pull_queue_depth", **{"class": "prefetch"}) == 0
        begun = [pull.started for pull in pulls]
        assert max(begun[1], *begun[3:]) < begun[2] < begun[0]  # the order of completion is random

    played(tmp_path, play)


def test_simultaneous_pulls_start_by_priority(tmp_path: Path, proxy: Proxy) -> None:
    released = threading.Event()
    proxy.instead = lambda passed: Reply(404) if released.wait(30) else None

    async def play(it: Played) -> None:
        with ExitStack() as stack:
            pulls = [
                stack.enter_context(
                    it.all.pull(
                        Reference.parse(f"{proxy.host}/tests/w{priority}"),
                        urgency=DESIRED,
                        priority=priority,
                    )
                )
                for priority in range(7)
            ]
            await until_async(lambda: sum(pull.is_begun for pull in pulls) >= 4)
            assert [pull.is_begun for pull in pulls] == 3 * [False] + 4 * [True]
            released.set()
            await asyncio.gather(*(each.wait() for each in pulls), return_exceptions=True)

    played(tmp_path, play)


def test_the_rate_limit_applies_to_registry_traffic(
    tmp_path: Path, pushed: None, registry: RealRegistry
) -> None:
    reference = Reference.parse(f"{registry.host}/{PATH}")
    passed: list[int] = []

    class Said(Rate):
        def consume(self, count: int) -> None:
            passed.append(count)

    async def play(it: Played) -> None:
        with it.all.pull(reference) as pull:
            await pull.wait()
        assert sum(passed) >= pull.total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clowder_aimage.engine.transfer_queue.Rate", Said)
        patch.setattr(ClientOptions, "limit", lambda *_: 10**9)
        played(tmp_path, play)


def test_a_queued_pull_without_waiting_clients_is_removed(tmp_path: Path, proxy: Proxy) -> None:
    released = threading.Event()
    proxy.instead = lambda passed: Reply(404) if released.wait(30) else None

    async def play(it: Played) -> None:
        with ExitStack() as stack:
            for number in range(4):
                name = Reference.parse(f"{proxy.host}/tests/z{number}")
                stack.enter_context(it.all.pull(name, urgency=DESIRED))
            await asyncio.sleep(0.01)
            with it.all.pull(Reference.parse(f"{proxy.host}/{PATH}"), urgency=DESIRED) as waits:
                await asyncio.sleep(0.01)
                assert not waits.is_begun
            with pytest.raises(StoppedError, match="was cancelled"):
                await waits.wait()
            await asyncio.sleep(0)
            assert it.counted("aimage_pull_queue_depth", **{"class": "desired"}) == 0
            released.set()

    played(tmp_path, play)


def test_a_pull_of_components_fetches_only_their_blobs(tmp_path: Path, proxy: Proxy) -> None:
    reference = Reference.parse(f"{proxy.host}/{PATH}")

    async def play(it: Played) -> None:
        with it.all.pull(reference, components=("vae",)) as part:
            await part.wait()
        with it.all.pull(reference) as whole:
            await whole.wait()
        assert 0 < part.total < whole.total
        assert whole.sources["cache"] >= part.total - 1000  # allows for the config
        assert whole.sources["registry"] + whole.sources["cache"] == whole.total

    played(tmp_path, play)
