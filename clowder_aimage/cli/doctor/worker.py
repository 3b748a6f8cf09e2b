"""The worker that the command line uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clowder_aimage import __version__
from clowder_aimage.cli.console.output import clean_line, format_count
from clowder_aimage.cli.console.remedy import REMEDIES, format_advice
from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.errors import AImageError, NetworkError

_PATIENCE = 3.0  # seconds


@dataclass(frozen=True, slots=True)
class WorkerCheck:
    """``connect`` returns the client; a worker that ``is_expected`` should answer."""

    connect: Callable[[], WorkerClient]
    is_expected: bool
    name = "worker"
    stage = Stage.NETWORK

    @property
    def late(self) -> Finding:
        message, advice = "the worker did not answer in time", REMEDIES["no_worker"]
        return Finding(self._level, message, advice)

    @property
    def _level(self) -> Level:
        return Level.ERROR if self.is_expected else Level.OK

    def run(self) -> Iterator[Finding]:
        client = self.connect()
        facts: dict[str, object] = {"address": str(client.endpoint)}
        try:
            is_worker = client.is_worker(_PATIENCE)
        except NetworkError as error:
            message = error.message
            if not self.is_expected:
                message = f"none at {client.endpoint}: 'aimage run' loads models itself"
            advice = format_advice(error) if self.is_expected else None
            yield Finding(self._level, message, advice or "", facts)
            return
        if not is_worker:
            message = f"the server at {client.endpoint} is not an aimage worker"
            level = Level.ERROR if self.is_expected else Level.OK
            advice = REMEDIES["worker_address"] if self.is_expected else ""
            yield Finding(level, message, advice, facts)
            return
        try:
            yield _judge(client, facts)
        except AImageError as error:
            yield Finding.of_error(error)


def _judge(client: WorkerClient, facts: dict[str, object]) -> Finding:
    version = str(client.ask("GET", "/v1/worker").get("version"))
    models = len(client.ask("GET", "/v1/models")["data"])
    reasons = client.read_readiness()
    facts = facts | {"version": version, "models": models, "reasons": reasons}
    message = f"{client.endpoint}: version {version}, {format_count(models, 'model')}"
    if reasons:
        text = clean_line("; ".join(reasons))
        return Finding(
            Level.WARNING,
            f"{message}, not ready: {text}",
            "see 'The worker is not ready' in docs/operations.md",
            facts,
        )
    if version != __version__:
        message += f", while this is {__version__}"
        return Finding(Level.WARNING, message, "restart the worker with this version", facts)
    return Finding(Level.OK, f"{message}, ready", facts=facts)
