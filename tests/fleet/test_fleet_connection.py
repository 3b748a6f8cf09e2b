"""A worker whose NATS server is missing, and is there later."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from clowder_aimage.api.service import make_service
from clowder_aimage.engine.settings import Settings
from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import WORKER
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.route import Role
from clowder_aimage.layout import LayeredStore
from clowder_aimage.registry import ClientOptions
from tests.fleet.fleet_run import FleetRun, Nats
from tests.wait import until_async

pytestmark = pytest.mark.integration


def test_a_worker_reports_that_nats_is_missing_and_that_it_is_there(
    tmp_path: Path, tiny_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aimage.fleet")
    nats = Nats(tmp_path / "js")
    fleet = FleetRun(nats, tiny_store, "late", url=nats.url.replace("//", "//user:open-sesame@"))
    service = make_service(Settings(), LayeredStore([tiny_store]), ClientOptions())

    def measure() -> str:
        lines = service.metrics.format_text().decode().splitlines()
        return next(line for line in lines if line.startswith("aimage_fleet_connected "))

    def find(message: str) -> logging.LogRecord | None:
        records = (record for record in caplog.records if record.getMessage() == message)
        return next(records, None)

    async def play() -> None:
        link = FleetLink(fleet.access_of(WORKER, "w"), WORKER, "w")
        joined = JoinedWorker(link, service, LocalCalls(Role()), WorkerIdentity("w"))
        async with joined.running():
            await until_async(lambda: find("no connection to NATS; trying again") is not None)
            (reason,) = await service.list_reasons()
            assert reason["reason"] == "no connection to NATS"
            assert "Connection refused" in reason["detail"]
            assert measure() == "aimage_fleet_connected 0.0"
            nats.start()
            await fleet.make()
            # At first the server has no streams of the fleet, which no wait repairs
            await until_async(lambda: link.is_ready)
            await until_async(lambda: find("connected to the fleet") is not None)
            assert await service.list_reasons() == []
            assert measure() == "aimage_fleet_connected 1.0"

    try:
        asyncio.run(play())
    finally:
        nats.kill()
    warning = find("no connection to NATS; trying again")
    assert vars(warning)["url"] == nats.url
    assert "open-sesame" not in "".join(str(vars(record)) for record in caplog.records)
