"""Pulls from several registries: a silent registry does not block the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage.oci import Descriptor
from tests.real_registry import RealRegistry

pytest.importorskip("prometheus_client")

from clowder_aimage.create import create
from clowder_aimage.engine.admission import StoppedError
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.engine.transfer_queue import DESIRED, INTERACTIVE, PREFETCH, TransferQueue
from clowder_aimage.errors import NetworkError, NotFoundError, UnauthorizedError
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY
from tests.proxy import Proxy, Reply

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


ROOM = {INTERACTIVE: 8, DESIRED: 4, PREFETCH: 2}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Block every pull until the test ends."""
    released = threading.Event()

    def pull(reference: Reference, *_: object, **__: object) -> None:
        released.wait(60)
        raise NetworkError(f"{reference.registry} does not answer")

    monkeypatch.setattr("clowder_aimage.engine.transfer_queue.pull", pull)
    yield
    released.set()


@pytest.fixture
def silent_host(registry: RealRegistry) -> Iterator[str]:
    """Run a registry that accepts connections and does not respond."""
    released = threading.Event()
    with Proxy(registry.host).running() as proxy:
        proxy.instead = lambda passed: Reply(404) if released.wait(60) else None
        yield proxy.host
        released.set()


class Asked:
    """A transfer queue with an empty store, and the pulls of a test."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.store, self.metrics = ImageLayout(root), Metrics()
        self.all = TransferQueue(self.store, ClientOptions(), self.metrics, EventLog(), settle=0.0)
        self._stack = stack
        self._numbers = iter(range(10**6))

    def ask(self, host: str, urgency: int = DESIRED, priority: int = 0) -> SharedTransfer:
        name = Reference.parse(f"{host}/team/x{next(self._numbers)}")
        return self.want(name, urgency, priority)

    def want(self, name: Reference, urgency: int = DESIRED, priority: int = 0) -> SharedTransfer:
        return self._stack.enter_context(
            self.all.pull(name, urgency=urgency, priority=priority),
        )

    async def turn(self) -> None:
        """Let the queue start pulls."""
        await asyncio.sleep(0.01)

    async def time_out(self, pull: SharedTransfer) -> None:
        """Simulate the timeout of a pull from a silent registry."""
        pull.stop(is_now=True)
        with pytest.raises(StoppedError):
            await pull.wait()
        await self.turn()


def played(tmp_path: Path, play: Callable[[Asked], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        with ExitStack() as stack:
            async with asyncio.timeout(60):
                asked = Asked(tmp_path / "played", stack)
                try:
                    return await play(asked)
                finally:
                    asked.all.close()

    return asyncio.run(run())


def begun(pulls: list[SharedTransfer]) -> int:
    return sum(pull.is_begun for pull in pulls)


def test_a_pull_is_not_blocked_by_pulls_from_a_silent_registry(
    tmp_path: Path, silent_host: str, repository: str
) -> None:
    first = ImageLayout(tmp_path / "first")
    reference = Reference.parse(f"{repository}:v1")
    create(first, reference, TINY, form=ModelForm(whole_files=True))  # a few blobs
    push(first, reference, ClientOptions())

    async def play(it: Asked) -> tuple[Descriptor, Descriptor]:
        pulls = [it.ask(silent_host, priority=1) for _ in range(12)]
        good = it.want(reference)
        await it.turn()
        assert (begun(pulls), good.is_begun) == (3, True)
        return await good.wait(), it.store.resolve(reference)

    root, found = played(tmp_path, play)
    assert root.digest == found.digest


@pytest.mark.parametrize(("urgency", "most"), [(DESIRED, 3), (PREFETCH, 1)])
def test_a_slot_is_left_for_another_registry(
    tmp_path: Path, silent: None, urgency: int, most: int
) -> None:
    async def play(it: Asked) -> None:
        pulls = [it.ask("one.example", urgency, priority=1) for _ in range(12)]
        others = [it.ask("other.example", urgency) for _ in range(2)]
        await it.turn()
        assert (begun(pulls), begun(others)) == (most, 1)

    played(tmp_path, play)


@pytest.mark.parametrize("urgency", ROOM)
def test_a_second_registry_gets_a_slot_beyond_the_limit(
    tmp_path: Path, silent: None, urgency: int
) -> None:
    async def play(it: Asked) -> None:
        pulls = [it.ask("one.example", urgency, priority=1) for _ in range(12)]
        await it.turn()
        assert begun(pulls) == ROOM[urgency]
        others = [it.ask("other.example", urgency) for _ in range(2)]
        await it.turn()
        assert (begun(pulls), [pull.is_begun for pull in others]) == (ROOM[urgency], [True, False])

    played(tmp_path, play)


def test_a_prefetch_gets_no_slot_beyond_urgent_pulls(tmp_path: Path, silent: None) -> None:
    async def play(it: Asked) -> None:
        pulls = [it.ask("one.example") for _ in range(2)]
        late = it.ask("other.example", PREFETCH, priority=9)
        await it.turn()
        assert (begun(pulls), late.is_begun) == (2, False)
        await it.time_out(pulls[0])
        assert late.is_begun

    played(tmp_path, play)


def test_a_pull_starts_despite_many_silent_registries(tmp_path: Path, silent: None) -> None:
    """Nine silent registries have more pulls than slots, retry them, and have a higher priority."""
    hosts = [f"silent{number}.example" for number in range(9)]

    async def play(it: Asked) -> None:
        pulls = [it.ask(host, priority=1) for _ in range(3) for host in hosts]
        late = it.ask("good.example")
        await it.turn()
        assert (begun(pulls), late.is_begun) == (8, False)  # all slots are taken
        ends = 0
        while not late.is_begun:
            oldest = next(pull for pull in pulls if pull.is_begun)
            await it.time_out(oldest)
            pulls.remove(oldest)
            pulls.append(it.ask(f"{oldest.reference.registry}", priority=1))
            await it.turn()
            assert begun(pulls) + late.is_begun == 8
            ends += 1
            assert ends <= 27, "it is not its turn, though all that came before it have ended"

    played(tmp_path, play)


# -- metrics


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("x"), "not_found"),
        (UnauthorizedError("x"), "unauthorized"),
        (NetworkError("x"), "unreachable"),
        (ValueError("x"), "failed"),
    ],
)
def test_a_failed_pull_is_counted_by_its_error_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, code: str
) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr("clowder_aimage.engine.transfer_queue.pull", fails)

    async def play(it: Asked) -> CollectorRegistry:
        with pytest.raises(type(error)):
            await it.ask("registry.example.com").wait()
        return it.metrics.registry

    counted = played(tmp_path, play)
    labels = {"code": code, "registry": "registry.example.com"}
    assert counted.get_sample_value("aimage_pull_failures_total", labels) == 1
    labels = {"outcome": "failed", "registry": "registry.example.com"}
    assert counted.get_sample_value("aimage_pulls_total", labels) == 1


def test_a_cancelled_pull_is_not_counted_as_a_failure(tmp_path: Path, silent: None) -> None:
    async def play(it: Asked) -> str:
        pull = it.ask("one.example")
        await it.turn()
        await it.time_out(pull)
        return it.metrics.format_text().decode()

    text = played(tmp_path, play)
    assert 'aimage_pulls_total{outcome="stopped",registry="one.example"} 1.0' in text
    assert "aimage_pull_failures_total{" not in text


def test_the_first_tag_check_initializes_all_outcomes(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.count_tag_check("a.example", "failed")
    metrics.count_tag_check("a.example", "failed")
    assert {
        outcome: metrics.registry.get_sample_value(
            "aimage_tag_checks_total", {"outcome": outcome, "registry": "a.example"}
        )
        for outcome in ("unchanged", "moved", "refused", "failed")
    } == {"unchanged": 0, "moved": 0, "refused": 0, "failed": 2}
