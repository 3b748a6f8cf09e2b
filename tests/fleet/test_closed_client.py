"""A client of NATS that was closed for good, as after an error of the protocol, is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from nats.errors import Error as NatsError

from clowder_aimage.fleet.link import FleetLink
from tests.fleet.fleet_run import FleetRun, ScriptedRole, prompt_as_picture
from tests.wait import until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


async def close(link: FleetLink) -> None:
    """Let the server end the connection: the line of this publication is too long."""
    client = link.client
    with contextlib.suppress(NatsError):
        await client.publish("a" * 5000, b"")
        await client.flush(1)
    await until_async(lambda: client.is_closed)


def test_a_worker_and_a_gateway_go_on_after_their_clients_were_closed(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.fleet.link._REPLACED", 0.02)
    links: list[FleetLink] = []
    original = FleetLink.__init__

    def observed(link: FleetLink, *arguments: object, **options: object) -> None:
        original(link, *arguments, **options)  # type: ignore[arg-type]
        links.append(link)

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        monkeypatch.setattr(FleetLink, "__init__", observed)
        async with fleet.gateway() as url, fleet.worker("w", role) as worker:
            await fleet.know(url, 1)
            worker.takes_jobs = False
            asked = asyncio.create_task(fleet.ask(url, "waiting", seed=1))

            async def is_queued() -> bool:
                return bool((await fleet.status(url))["jobs"])

            await until_async(is_queued)
            for link in links:
                await close(link)
            for link in links:
                await link.wait_until_ready(30)
            worker.takes_jobs = True
            assert await asked == (200, {"data": [{"b64_json": "waiting 1"}]})
            status, _ = await fleet.ask(url, "new", seed=1)
            assert status == 200
            async with fleet.session.get(f"{url}/readyz") as ready:
                assert ready.status == 200

    play(scene)
