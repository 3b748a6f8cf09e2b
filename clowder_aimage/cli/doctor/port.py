"""A default port: free, or used by a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.worker_client import WorkerClient, detect_program
from clowder_aimage.errors import AImageError, NetworkError

_PATIENCE = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class PortCheck:
    """``address`` is the default of the verb ``verb``, and ``other`` a similar one."""

    address: str
    verb: str
    other: str
    name = "port"
    stage = Stage.NETWORK

    @property
    def late(self) -> Finding:
        return self._build_used("a program that does not answer HTTP")

    def run(self) -> Iterator[Finding]:
        facts = {"address": self.address, "program": None}
        try:
            is_worker = WorkerClient(self.address).is_worker(_PATIENCE)
        except NetworkError as error:
            # Only a failure to connect has this remedy.
            if error.remedy == "no_worker":
                yield Finding(Level.OK, f"{self.address} is free ({self.verb})", facts=facts)
                return
            is_worker = False
        except AImageError:
            is_worker = False
        program = "aimage" if is_worker else detect_program(Endpoint.parse(self.address))
        if program == "aimage":
            kind = "a worker" if is_worker else "a registry or a node"
            message = f"{self.address} is used by aimage, as {kind}"
            yield Finding(Level.OK, message, facts=facts | {"program": "aimage"})
        else:
            yield self._build_used(program)

    def _build_used(self, program: str) -> Finding:
        message = f"{self.address} is used by {program or 'another program'}"
        facts = {"address": self.address, "program": program or "unknown"}
        return Finding(Level.WARNING, message, f"{self.verb} --addr {self.other}", facts)
