"""A fleet on the shipped configuration of NATS, with a hostile worker beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.fleet.name import GATEWAY, OPERATOR, WORKER, FleetNames
from clowder_aimage.fleet.permission import ANY_WORKER
from tests.fleet.fleet_run import FleetRun, Nats
from tests.fleet.hostile_worker import HostileWorker
from tests.fleet.nats_config import shipped, worker_account

PASSWORD = "password"
HOSTILE = "hostile"
# All workers of the fleet are of one account, with this user.
GOOD = "worker"
FLEET = FleetNames().fleet
ACCESS: dict[str, Any] = {
    "name": FLEET,
    "passwords": dict.fromkeys((OPERATOR, GATEWAY, WORKER), PASSWORD),
    "worker_user": GOOD,
}


@contextlib.contextmanager
def attacked_server(place: Path) -> Iterator[Nats]:
    """Run a server with an account of workers that trust each other, and a hostile one."""
    accounts = map(worker_account, (ANY_WORKER, HOSTILE))
    (place / "nats.conf").write_text(shipped(place / "js", *accounts))
    with pytest.MonkeyPatch.context() as patch:
        for kind in (OPERATOR, GATEWAY, WORKER):
            patch.setenv(f"NATS_{kind.upper()}_PASSWORD", PASSWORD)
        server = Nats(place / "server", arguments=("-c", str(place / "nats.conf"))).start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.asynccontextmanager
async def attacked(fleet: FleetRun, *victims: str, **options: Any) -> AsyncIterator[HostileWorker]:
    """Let a hostile worker attack a fleet; it must not give up before the end."""
    url = fleet.nats.url.replace("nats://", f"nats://{HOSTILE}:{PASSWORD}@")
    hostile = HostileWorker(url, FleetNames(fleet.name), HOSTILE, victims)
    async with hostile.connected():
        attacking = asyncio.create_task(hostile.run(**options))
        try:
            yield hostile
        finally:
            assert not attacking.done(), attacking
            attacking.cancel()
