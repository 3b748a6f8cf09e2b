"""The NATS server of the fleet of this machine, if one is configured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.fleet_access import ACCESS_OPTIONS, run_with_link
from clowder_aimage.cli.console.output import format_count
from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.cli.doctor.server_time import ServerTimes
from clowder_aimage.config.user_directory import find_config_file
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.errors import NetworkError

if TYPE_CHECKING:
    from clowder_aimage.fleet.link import FleetLink

_PATIENCE = 2.5  # seconds
_NAMES = ("fleet", "fleet_key")
_ADVICE = "check its address and the network, or prepare it: aimage fleet init"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The servers of a fleet, and the options of the connection by name."""

    servers: str
    options: Mapping[str, Any]

    @classmethod
    def read(cls) -> FleetSettings | None:
        """Return the servers of the environment, or of the worker or gateway; None without."""
        sections = read_configuration(
            find_config_file(),
            lambda document: [document.get(name, {}) for name in ("worker", "gateway")],
        )
        configured = filter(None, (section.get("nats") for section in sections))
        servers = os.environ.get("AIMAGE_NATS") or next(configured, None)
        if not servers:
            return None
        options: dict[str, Any] = {}
        for name in ACCESS_OPTIONS:
            if value := os.environ.get(f"AIMAGE_{name.upper()}"):
                options[name] = value if name in _NAMES else Path(value)
        return cls(servers, options)


def look_at_fleet(settings: FleetSettings) -> tuple[int, float]:
    """Return the number of workers, and the seconds by which the server's clock is ahead.

    Raises AImageError.
    """

    async def look(link: FleetLink) -> tuple[int, float]:
        from clowder_aimage.fleet.worker_registry import read_workers

        await link.wait_until_ready(_PATIENCE)
        workers = await read_workers(link)
        return len(workers.list_statuses()), link.clock_offset

    return run_with_link(settings.servers, settings.options, look, is_ready=False)


@dataclass(frozen=True, slots=True)
class FleetCheck:
    """``look`` connects to the server."""

    settings: FleetSettings
    times: ServerTimes
    look: Callable[[FleetSettings], tuple[int, float]] = look_at_fleet
    name = "fleet"
    stage = Stage.NETWORK

    @property
    def late(self) -> Finding:
        message = f"NATS at {self._servers} did not answer in time"
        return Finding(Level.ERROR, message, _ADVICE, {"servers": self._servers})

    @property
    def _servers(self) -> str:
        servers = self.settings.servers.split(",")
        return ", ".join(server.strip().rpartition("@")[2] for server in servers)

    def run(self) -> Iterator[Finding]:
        try:
            workers, offset = self.look(self.settings)
        except NetworkError as error:
            yield Finding.of_error(error, _ADVICE)
            return
        self.times.record("NATS", offset)
        name = self.settings.options.get("fleet", "aimage")
        message = f"{name}, on NATS at {self._servers}: ready, {format_count(workers, 'worker')}"
        facts = {"fleet": name, "servers": self._servers, "workers": workers}
        yield Finding(Level.OK, message, facts=facts)
