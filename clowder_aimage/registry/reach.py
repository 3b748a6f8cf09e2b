"""Limit the addresses that a registry may lead this client to.

Redirects, upload locations, token services and links are URLs that a registry chooses. A registry
of the internet must not use them to reach this machine or its networks (server-side request
forgery). The addresses of connections are compared, not the names: a name may resolve to anything,
and to something else the next time.
"""

from __future__ import annotations

import enum
import ipaddress
import re
import socket

from clowder_aimage.errors import NetworkError

# Networks with an IPv4 address in the last 32 bits: RFC 6052, RFC 4291 2.5.5.1, RFC 2765.
_CARRY_IPV4 = [
    ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")
]
# Not global, although some versions of Python say so: RFC 8215, RFC 3879, RFC 9637, RFC 9602.
_LOCAL = [
    ipaddress.ip_network(network)
    for network in ("64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16")
]
_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback", "localhost.localdomain")


class Reach(enum.IntEnum):
    """The hosts that can reach an address, from all to none."""

    INTERNET = 0
    NETWORK = 1
    """Private addresses (RFC 1918, RFC 4193), and all others that are not global."""
    MACHINE = 2
    NOWHERE = 3
    """Link-local addresses, such as those of cloud metadata, and multicast."""


def reach(address: str) -> Reach:
    """Return the reach of an IP address; of IPv6 that carries IPv4, that of the IPv4 address.

    Raises ValueError.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and not (ip.is_loopback or ip.is_unspecified):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if embedded is None and any(ip in network for network in _CARRY_IPV4):
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = embedded or ip
    if ip.is_loopback or ip.is_unspecified:
        return Reach.MACHINE
    if ip.is_link_local or ip.is_multicast:
        return Reach.NOWHERE
    is_local = not ip.is_global or any(ip in network for network in _LOCAL)
    return Reach.NETWORK if is_local else Reach.INTERNET


def reach_of_name(host: str) -> Reach | None:
    """Return the reach of a host that is an address in any spelling, or a name of this machine.

    The system's resolver also accepts ``127.1``, ``0x7f000001`` and ``2130706433``: the last label
    of a real host name is not a number.
    """
    name = host.lower().rstrip(".")
    if name in _LOCAL_NAMES or name.endswith(".localhost"):
        return Reach.MACHINE
    try:
        return reach(name)
    except ValueError:
        is_number = re.fullmatch(r"0x[0-9a-f]*|[0-9]+", name.rpartition(".")[2])
        return Reach.MACHINE if is_number else None


class Boundary:
    """The addresses that a registry may lead to: those at least as public as its own.

    A registry of the internet leads to the internet, one in a private network also to private
    addresses, and one on this machine also to its own address here: other loopback addresses have
    other services. Link-local addresses are reached only if the registry itself has one, by its
    name.

    Args:
        home: The host of the registry, without port. The user chose it, so its address is allowed.
        trusted: Other hosts that the user permits.
        max_reach: The most internal reach of the registry's own address: by default, any.
    """

    def __init__(
        self,
        home: str,
        trusted: frozenset[str] = frozenset(),
        *,
        max_reach: Reach = Reach.NOWHERE,
    ) -> None:
        self._home, self._trusted, self._max_reach = home.lower(), trusted, max_reach
        self._registry_reach: Reach | None = None
        # The registry's address, once it is connected.
        self._address = ""

    def check(self, host: str, sock: socket.socket) -> None:
        """Check a new connection to ``host``, before anything is sent. Raises OutsideError."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        host, address = host.lower(), _normalize_address(sock.getpeername()[0])
        actual, is_home = reach(address), host == self._home or address == self._address
        if host == self._home and actual > self._max_reach:
            raise OutsideError(self._home, host)
        if host == self._home and self._registry_reach is None:
            self._registry_reach, self._address = actual, address
        elif host not in self._trusted and not self._permits(actual, is_home):
            raise OutsideError(self._home, host)

    def check_name(self, host: str) -> None:
        """Check the name of a host that a proxy connects to. Raises OutsideError."""
        host = host.lower()
        named_reach = reach_of_name(host)
        if host == self._home and named_reach is not None and named_reach > self._max_reach:
            raise OutsideError(self._home, host)
        if host == self._home or host in self._trusted:
            return
        # Its address is compared when it is connected.
        is_here = named_reach is Reach.MACHINE is self._reach()
        if named_reach is not None and not is_here and not self._permits(named_reach, False):
            raise OutsideError(self._home, host)

    def check_proxied(self, host: str) -> None:
        """Check a host that a proxy connects to: its address is not seen here.

        Raises OutsideError; UncheckedError if only addresses of the internet may be reached.
        """
        self.check_name(host)
        if host.lower() == self._home and self._max_reach is Reach.INTERNET:
            raise UncheckedError(self._home, host)

    def _reach(self) -> Reach:
        # Before the first connection the name is all that is known.
        if self._registry_reach is None:
            return reach_of_name(self._home) or Reach.INTERNET
        return self._registry_reach

    def _permits(self, target: Reach, is_home: bool) -> bool:
        registry_reach = self._reach()
        if registry_reach in (Reach.MACHINE, Reach.NOWHERE) and not is_home:
            return target is Reach.INTERNET
        return target <= registry_reach


class UploadBoundary(Boundary):
    """The addresses of uploads outside of the registry's own origin: those of the internet.

    An upload carries content, and a path that the registry chooses: it could write to any other
    service of this machine or its networks, also at another port of the registry's own host.

    Args:
        home: The host of the registry, with its port.
        trusted: Other hosts that the user permits, with or without TLS.
    """

    def __init__(self, home: str, trusted: frozenset[str] = frozenset()) -> None:
        super().__init__(home, trusted)
        self.trusted = trusted

    def check(self, host: str, sock: socket.socket) -> None:
        """Check a new connection to ``host``, before anything is sent. Raises OutsideError."""
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            address, port = sock.getpeername()[:2]
            self._require(host, port, reach(address))

    def check_name(self, host: str) -> None:
        """Check the name of a host that a proxy connects to. Raises OutsideError."""
        self.check_origin(host, 0)

    def check_origin(self, host: str, port: int) -> None:
        """Check the name of a host before it is connected. Raises OutsideError."""
        self._require(host, port, reach_of_name(host))

    def _require(self, host: str, port: int, target: Reach | None) -> None:
        if host.lower() not in self._trusted and target not in (None, Reach.INTERNET):
            raise OutsideError(self._home, host, port)


def is_same_host(first: str, second: str) -> bool:
    """Return True if two hosts are the same; ``localhost``, 127.0.0.1 and ::1 are."""
    names = {_normalize_address(name.lower()) for name in (first, second)}
    return len(names) == 1 or names == {"localhost", "127.0.0.1"}


def _normalize_address(address: str) -> str:
    """Return an address, and 127.0.0.1 for ::1: ``localhost`` is both."""
    return "127.0.0.1" if address in ("::1", "::ffff:127.0.0.1") else address


class OutsideError(NetworkError):
    """A registry leads to an address outside of its boundary."""

    def __init__(self, home: str, host: str, port: int = 0) -> None:
        place = host[:100] + (f":{port}" if port else "")
        super().__init__(
            f"{home} leads to {place}, an internal address",
            hint=f"if that is intended, add {host[:100]} to trustedHosts of the registry in the"
            " configuration",
        )


class UncheckedError(OutsideError):
    """The address of a host cannot be checked."""
