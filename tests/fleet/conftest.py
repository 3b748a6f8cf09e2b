"""A NATS server, and fleets on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import TINY
from tests.fleet.attack import ACCESS, attacked, attacked_server
from tests.fleet.fleet_run import FleetRun, Nats
from tests.process import Aimage
from tests.store import copy_store
from tests.wait import PATIENCE

Scene = Callable[[FleetRun], Awaitable[None]]
Play = Callable[..., None]
VICTIMS = ("w1", "w2")
_numbers = itertools.count()


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the embedded model as ``tiny``. Copy it before writing."""
    home = tmp_path_factory.mktemp("fleet-store")
    Aimage(home, home / "store")("create", "-q", "tiny", TINY)
    return home / "store"


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    server = Nats(tmp_path_factory.mktemp("nats") / "js").start()
    yield server
    server.kill()


@pytest.fixture
def play_quietly(nats: Nats, tiny_store: Path, tmp_path: Path) -> Play:
    """Return a function that plays a scene in a fleet of its own, without a hostile worker.

    A scene uses it if others must not write to its streams, or if its access to NATS is not the
    shipped one.
    """

    def run(
        scene: Scene,
        own: Nats | None = None,
        name: str = "",
        patience: float = 3 * PATIENCE,
        **options: Any,
    ) -> None:
        copy_store(tiny_store, tmp_path / "store")
        name = name or f"test{next(_numbers)}"
        fleet = FleetRun(own or nats, tmp_path / "store", name, **options)

        async def played() -> None:
            async with asyncio.timeout(patience), aiohttp.ClientSession() as fleet.session:
                await fleet.make()
                await scene(fleet)

        asyncio.run(played())

    return run


@pytest.fixture
def play_attacked(play_quietly: Play, tmp_path: Path) -> Play:
    """Return a function that plays a scene while a hostile worker attacks, but delays no jobs."""

    def run(scene: Scene, **options: Any) -> None:
        async def attack(fleet: FleetRun) -> None:
            async with attacked(fleet, *VICTIMS, delays=False, reports=False):
                await scene(fleet)

        with attacked_server(tmp_path) as own:
            play_quietly(attack, own, **ACCESS, **options)

    return run


@pytest.fixture
def play(request: pytest.FixtureRequest, play_quietly: Play, play_attacked: Play) -> Play:
    """Return a function that plays a scene, with ``--hostile`` beside a hostile worker.

    A scene with a server or an access of its own has none.
    """
    is_hostile = request.config.getoption("--hostile")

    def run(scene: Scene, own: Nats | None = None, **options: Any) -> None:
        is_usual = own is None and not options.keys() & {*ACCESS}
        if is_hostile and is_usual:
            play_attacked(scene, **options)
        else:
            play_quietly(scene, own, **options)

    return run
