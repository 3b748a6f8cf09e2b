"""Addresses of neighbours, as they are configured: ``HOST:PORT``, ``http://HOST:PORT``,
``https://HOST:PORT``, or ``dns:NAME:PORT`` for all addresses that a name has at the moment."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.errors import UsageError
from clowder_aimage.registry.peer_response import PeerAddress

MOST = 4096  # addresses of one name
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


@dataclass(frozen=True, slots=True)
class Address:
    """``place`` is where a node listens; with ``is_name`` all addresses of its host are meant."""

    place: PeerAddress
    is_name: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises UsageError."""
        is_name, is_secure, rest = False, False, text.strip()
        if rest.startswith("dns:"):
            is_name, rest = True, rest.removeprefix("dns:")
        elif rest.startswith(("http://", "https://")):
            is_secure = rest.startswith("https://")
            rest = rest.partition("://")[2].removesuffix("/")
        try:
            endpoint = Endpoint.parse_listen(rest)
        except UsageError:
            raise _odd(text) from None
        if not endpoint.port or not _HOST.fullmatch(endpoint.host):
            raise _odd(text)
        return cls(PeerAddress(endpoint.host, endpoint.port, is_secure), is_name)

    def places(self) -> list[PeerAddress]:
        """Where to ask now. Of a name, link-local addresses are left out: no node is reached by
        them from another, but the credentials of a cloud's machine are (169.254.169.254).

        Raises:
            OSError, UnicodeError: the name cannot be looked up.
        """
        if not self.is_name:
            return [self.place]
        found = socket.getaddrinfo(self.place.host, self.place.port, type=socket.SOCK_STREAM)
        hosts = {str(each[4][0]) for each in found}
        return [
            PeerAddress(host, self.place.port) for host in sorted(hosts)[:MOST] if _may_be(host)
        ]


def _may_be(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(found, "ipv4_mapped", None) or found
    return not (address.is_link_local or address.is_multicast or address.is_unspecified)


def _odd(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no address of a neighbour",
        hint="write HOST:PORT, https://HOST:PORT, or dns:NAME:PORT for all addresses of a name",
    )
