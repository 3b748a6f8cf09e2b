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

_CARRY_IPV4 = [  # in their last 32 bits: RFC 6052, RFC 4291 2.5.5.1, RFC 2765
    ipaddress.ip_network(each) for each in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")
]
# not global, although some versions of Python say so: RFC 8215, RFC 3879, RFC 9637, RFC 9602
_LOCAL = [
    ipaddress.ip_network(each) for each in ("64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16")
]
_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback", "localhost.localdomain")


class Reach(enum.IntEnum):
    """From where an address can be reached."""

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
        inside = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inside is None and any(ip in network for network in _CARRY_IPV4):
            inside = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inside or ip
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
        home: The host of the registry, without port; the user chose it, whatever its address is.
        trusted: Other hosts that the user permits.
        most: From where the registry's own address may be reached: by default, any address.
    """

    def __init__(
        self,
        home: str,
        trusted: frozenset[str] = frozenset(),
        *,
        most: Reach = Reach.NOWHERE,
    ) -> None:
        self._home, self._trusted, self._most = home.lower(), trusted, most
        self._own: Reach | None = None
        self._address = ""  # of the registry, once it is connected

    def check(self, host: str, sock: socket.socket) -> None:
        """Check a new connection to ``host``, before anything is sent. Raises OutsideError."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        host, address = host.lower(), _plain(sock.getpeername()[0])
        found, is_home = reach(address), host == self._home or address == self._address
        if host == self._home and found > self._most:
            raise OutsideError(self._home, host)
        if host == self._home and self._own is None:
            self._own, self._address = found, address
        elif host not in self._trusted and not self._permits(found, is_home):
            raise OutsideError(self._home, host)

    def check_name(self, host: str) -> None:
        """Check a host that a proxy connects to, which is known by name. Raises OutsideError."""
        host = host.lower()
        found = reach_of_name(host)
        if host == self._home and found is not None and found > self._most:
            raise OutsideError(self._home, host)
        if host == self._home or host in self._trusted:
            return
        is_here = found is Reach.MACHINE is self._reach()  # its address is compared later
        if found is not None and not is_here and not self._permits(found, False):
            raise OutsideError(self._home, host)

    def check_proxied(self, host: str) -> None:
        """Check a host that a proxy connects to: its address is not seen here.

        Raises OutsideError; UncheckedError if only addresses of the internet may be reached.
        """
        self.check_name(host)
        if host.lower() == self._home and self._most is Reach.INTERNET:
            raise UncheckedError(self._home, host)

    def _reach(self) -> Reach:
        if self._own is None:  # not connected yet
            return reach_of_name(self._home) or Reach.INTERNET
        return self._own

    def _permits(self, found: Reach, is_home: bool) -> bool:
        own = self._reach()
        if own in (Reach.MACHINE, Reach.NOWHERE) and not is_home:
            return found is Reach.INTERNET
        return found <= own


def _plain(address: str) -> str:
    """Return an address, and 127.0.0.1 for ::1: ``localhost`` is both."""
    return "127.0.0.1" if address in ("::1", "::ffff:127.0.0.1") else address


class OutsideError(NetworkError):
    """A registry leads to an address where it must not lead."""

    def __init__(self, home: str, host: str) -> None:
        super().__init__(
            f"{home} leads to {host[:100]}, an internal address",
            hint=f"if that is intended, add {host[:100]} to trustedHosts of the registry in the"
            " configuration",
        )


class UncheckedError(OutsideError):
    """The address of a host cannot be checked."""
