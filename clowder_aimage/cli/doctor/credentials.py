"""The places of credentials for registries: which can be read, and for which registries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.registry import docker_config
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.credential_trace import VARIABLE, CredentialEvent, CredentialTrace

_ADVICE = "fix or remove it; 'aimage login HOST' stores new credentials"


@dataclass(frozen=True, slots=True)
class CredentialsCheck(MachineCheck):
    """It shows the hosts of entries only: names of users may be tokens."""

    connection: ClientOptions
    name = "login"

    def run(self) -> Iterator[Finding]:
        events = list[CredentialEvent]()
        trace = CredentialTrace("", events.append)
        sources = [docker_config.read_source(path, trace) for path in self.connection.auth_files]
        if text := self.connection.docker_auth_config:
            sources.append(docker_config.parse_source(VARIABLE, text, trace))
        for event in events:
            if event.is_warning:
                message = f"{event.place}: {event.result}"
                yield Finding(Level.WARNING, message, _ADVICE, {"place": event.place})
        places = {source.place: _list_hosts(source) for source in sources if source.config}
        for place, hosts in places.items():
            message = f"{place}: {', '.join(hosts) or 'no registry'}"
            yield Finding(Level.OK, message, facts={"place": place, "registries": hosts})
        if not places:
            searched = [source.place for source in sources]
            yield Finding(Level.OK, "no credentials are stored", facts={"places": searched})


def _list_hosts(source: docker_config.AuthSource) -> list[str]:
    """Return the registries of a source, with those of its helpers."""
    config = source.config
    scopes = [docker_config.parse_scope(key) for key in config.get("auths") or {}]
    hosts = [scope for scope in scopes if scope]
    for key, name in (config.get("credHelpers") or {}).items():
        hosts.append(f"{key} (docker-credential-{name})")
    if store := config.get("credsStore"):
        hosts.append(f"all others (docker-credential-{store})")
    return sorted(set(hosts))
