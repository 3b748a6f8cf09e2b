"""The Hugging Face hub, or a mirror of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from clowder_aimage.cli.console.installation import EXTRAS, is_installed
from clowder_aimage.cli.doctor.finding import Finding, Level, Stage
from clowder_aimage.cli.doctor.server_time import ServerTimes
from clowder_aimage.errors import NetworkError
from clowder_aimage.importer.hub_environment import HUB, find_token, is_offline, read_endpoint
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.probe import probe

# Without a token; and with one, which is checked (the hub's API).
_PUBLIC, _OWN = "/api/models?limit=1", "/api/whoami-v2"
_ADVICE = "set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 if this machine has no access"


def _is_used() -> bool:
    return is_installed(EXTRAS["hf"].package) and not is_offline()


@dataclass(frozen=True, slots=True)
class HubCheck:
    """``is_used`` is true if models may be fetched; ``find_token`` returns it with its place."""

    connection: ClientOptions
    times: ServerTimes
    is_used: Callable[[], bool] = _is_used
    find_token: Callable[[], tuple[str, str] | None] = find_token
    endpoint: str = ""
    name = "hub"
    stage = Stage.NETWORK

    @property
    def late(self) -> Finding:
        return Finding(Level.WARNING, f"{self._url} did not answer in time", _ADVICE)

    @property
    def _url(self) -> str:
        return self.endpoint or read_endpoint() or HUB

    def run(self) -> Iterator[Finding]:
        if not self.is_used():
            message = "not used: without [hf], or with HF_HUB_OFFLINE, nothing is fetched"
            yield Finding(Level.OK, message, facts={"used": False})
            return
        url, found = self._url, self.find_token()
        headers = {"Authorization": f"Bearer {found[0]}"} if found else {}
        place = found[1] if found else None
        facts = {"used": True, "endpoint": url, "token": place}
        try:
            response = probe(f"{url}{_OWN if found else _PUBLIC}", self.connection, headers)
        except NetworkError as error:
            yield Finding(Level.WARNING, error.message, _ADVICE, facts)
            return
        self.times.observe(urlsplit(url).netloc, response.headers)
        yield _judge(url, response.status, place, facts)


def _judge(url: str, status: int, place: str | None, facts: dict[str, object]) -> Finding:
    facts = facts | {"status": status}
    if place and status in (401, 403):
        # The hub refuses such a token for public models too.
        message = f"{url} refuses the token in {place} ({status})"
        return Finding(Level.ERROR, message, f"put a valid token into {place}, or remove it", facts)
    if status >= 300:
        return Finding(Level.WARNING, f"{url} answers {status}", _ADVICE, facts)
    credential = f"accepts the token in {place}" if place else "answers; no token is set"
    return Finding(Level.OK, f"{url} {credential}", facts=facts)
