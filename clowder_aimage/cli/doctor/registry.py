"""A registry: it answers, and accepts the credentials of this user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.remedy import REMEDIES, format_advice
from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.cli.doctor.server_time import ServerTimes
from clowder_aimage.errors import AccessError, NotFoundError, UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.session import Session

if TYPE_CHECKING:
    from clowder_aimage.registry.credential_trace import CredentialTrace
    from clowder_aimage.registry.trace import RequestTrace

# A repository that need not exist: its endpoint is asked only.
_REPOSITORY = "aimage-doctor"


@dataclass(frozen=True, slots=True)
class RegistryCheck:
    """``level`` is that of a registry that does not answer: configured ones should."""

    host: str
    connection: ClientOptions
    times: ServerTimes
    level: Level = Level.ERROR
    stage = Stage.NETWORK

    @property
    def name(self) -> str:
        return "registry"

    @property
    def late(self) -> Finding:
        facts = {"registry": self.host}
        return Finding(self.level, f"{self.host} did not answer in time", _ADVICE, facts)

    def run(self) -> Iterator[Finding]:
        def observe(exchange: RequestTrace) -> None:
            self.times.observe(self.host, exchange.response_headers)

        options = replace(
            self.connection,
            on_exchange=observe,
            on_credential=lambda _: None,
            registries={
                host: replace(settings, mirrors=())
                for host, settings in self.connection.registries.items()
            },
        )
        reference = Reference.parse(f"{self.host}/{_REPOSITORY}")
        with Session(reference, options) as session:
            way = "HTTP" if session.base.startswith("http:") else "HTTPS"
            error = _ping(session)
            yield self._judge(error, session.credentials, way)

    def _judge(self, error: AccessError | None, trace: CredentialTrace, way: str) -> Finding:
        credentials = trace.describe()
        facts = {"registry": self.host, "protocol": way, "credentials": credentials}
        if trace.is_refused or trace.is_withheld:
            message = f"{self.host} answers by {way}; {credentials}"
            advice = trace.build_advice(remedy="login")
            text = advice["hint"] if not advice.get("remedy") else ""
            text = text or REMEDIES[advice["remedy"]].format_map(advice)
            return Finding(Level.ERROR, message, text, facts)
        if isinstance(error, UnauthorizedError):
            message = f"{self.host} answers by {way}, and requires credentials; {credentials}"
            return Finding(Level.WARNING, message, f"aimage login {self.host}", facts)
        if isinstance(error, NotFoundError):
            message = f"{self.host} answers by {way}, but not as a registry"
            return Finding(
                self.level, message, "check the name and the port of the registry", facts
            )
        if error is not None:
            return Finding(self.level, error.message, format_advice(error) or _ADVICE, facts)
        message = f"{self.host} answers by {way}"
        if trace.is_sent:
            message += f"; {credentials}"
        return Finding(Level.OK, message, facts=facts)


_ADVICE = "check the name, the network and the proxy: aimage config show"


def _ping(session: Session) -> AccessError | None:
    try:
        session.ping()
    except AccessError as error:
        return error
    return None
