"""One request to a server that is not a registry, to learn its answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import urllib3

from clowder_aimage.registry.client_options import ClientOptions, open_pools
from clowder_aimage.registry.session import CONNECT_TIMEOUT, FIRST_READ_TIMEOUT
from clowder_aimage.registry.transport import Transport


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """The head of a response."""

    status: int
    headers: Mapping[str, str] = field(repr=False)


def probe(url: str, connection: ClientOptions, headers: Mapping[str, str]) -> ProbeResponse:
    """Return the head of the response to a GET of a URL; no redirect is followed.

    Nothing but ``headers`` is sent: no credentials and no certificate for a registry. Raises
    NetworkError.
    """
    host = urlsplit(url).netloc
    with open_pools(connection.to_mirror(host), host) as pools:
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT, read=FIRST_READ_TIMEOUT)
        transport = Transport(pools, host, on_exchange=connection.on_exchange)
        sent = {"Accept-Encoding": "identity", **headers}
        with closing(
            transport.send("GET", url, sent, timeout=timeout, max_redirects=0)
        ) as response:
            return ProbeResponse(response.status_code, dict(response.headers.items()))
