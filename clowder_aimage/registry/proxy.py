"""The proxy of a request, as the variables of the environment name it for tools written in Go.

``NO_PROXY`` has host names (with their subdomains), ``.suffix`` and ``*.suffix`` (subdomains only),
addresses, networks, each with or without a port, and ``*``. This machine is never asked by a proxy.

Sources: golang.org/x/net/http/httpproxy; curl(1), "Environment" (ALL_PROXY, socks5h).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from clowder_aimage.errors import NetworkError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.retry import BrokenOffError

_PORTS = {"http": "80", "https": "443"}
_SCHEMES = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")
# Entries of NO_PROXY are separated by commas, or by spaces as in curl.
_SEPARATOR = re.compile(r"[,\s]+")
_PORT = re.compile(r":([0-9]+)$")
# http.client's message for a proxy that refuses to connect to a host.
_REFUSAL = re.compile(r"Tunnel connection failed: ([0-9]{3}) ?(.*)", re.DOTALL)
# PySocks' message for a reply of the proxy (RFC 1928, 6).
_SOCKS_REPLY = re.compile(r"0x[0-9A-Fa-f]{2}: ")
_EXCEPTION_HINT = (
    "check the variables of the proxy; NO_PROXY lists the hosts to connect to directly"
)


def find_proxy(url: str, environment: Mapping[str, str]) -> str:
    """Return the URL of the proxy for a request to ``url``, or "" for a direct connection.

    Raises UsageError: the variable for the scheme does not name a proxy.
    """
    parts = urlsplit(url)
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        if value := _get_variable(environment, name):
            host, port = parts.hostname or "", str(parts.port or _PORTS.get(parts.scheme, ""))
            exceptions = _get_variable(environment, "no_proxy")
            return "" if is_excepted(host, port, exceptions) else _parse_proxy(name, value)
    return ""


def _get_variable(environment: Mapping[str, str], name: str) -> str:
    # A CGI script's HTTP_PROXY is a header of its client.
    is_forged = name == "http_proxy" and "REQUEST_METHOD" in environment
    upper = "" if is_forged else environment.get(name.upper(), "")
    return (environment.get(name, "") or upper).strip()


def _parse_proxy(name: str, value: str) -> str:
    """Return the URL of a proxy; that of a host and a port is http. Raises UsageError."""
    url = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        # The value may contain a password.
        raise UsageError(
            f"{name.upper()} is not the URL of a proxy",
            hint="expected http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT; in a "
            "password, special characters are escaped as %XX",
        )
    # Tools in Go let a SOCKS proxy resolve names in both cases.
    return re.sub("^socks5:", "socks5h:", url, flags=re.IGNORECASE)


def is_excepted(host: str, port: str, exceptions: str) -> bool:
    """Return True if ``host`` is connected to directly: this machine, or one in NO_PROXY."""
    host = host.lower().rstrip(".")
    if Reference(f"[{host}]" if ":" in host else host, "x").is_loopback:
        return True
    address = _parse_address(host)
    if address is not None and address.is_loopback:
        return True
    entries = filter(None, _SEPARATOR.split(exceptions.lower()))
    return any(_matches(entry, host, address, port) for entry in entries)


def _matches(
    entry: str,
    host: str,
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None,
    port: str,
) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        return address is not None and _is_in_network(address, entry)
    if _parse_address(entry) is None and (stated := _PORT.search(entry)):
        if stated[1] != port:
            return False
        entry = entry[: stated.start()]
    if (own := _parse_address(entry)) is not None:
        return own == address
    suffix = (entry[1:] if entry.startswith("*.") else entry).rstrip(".")
    return bool(suffix.strip(".")) and (host == suffix or host.endswith(f".{suffix.lstrip('.')}"))


def _is_in_network(address: ipaddress.IPv4Address | ipaddress.IPv6Address, text: str) -> bool:
    try:
        return address in ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, in brackets or not; an IPv4 address for one that IPv6 maps."""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def describe_proxy(url: str) -> str:
    """Return host and port of a proxy, for messages: without its name and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def describe_way(proxy: str) -> str:
    """Return the words by which a message names the proxy ``proxy``, if there is one."""
    return f" through the proxy {proxy}" if proxy else ""


def build_connection_error(proxy: str, host: str, reason: str) -> NetworkError:
    """Return the error for a connection through the proxy ``proxy`` that was not established."""
    if refusal := _REFUSAL.match(reason):
        return build_refusal(proxy, host, int(refusal[1]), refusal[2].strip())
    if _SOCKS_REPLY.match(reason):
        return NetworkError(f"the proxy {proxy} cannot reach {host}: {reason}")
    return NetworkError(f"cannot reach the proxy {proxy}: {reason}", hint=_EXCEPTION_HINT)


def build_refusal(proxy: str, host: str, status: int, reason: str) -> NetworkError:
    """Return the error for a status by which a proxy refuses to connect to ``host``."""
    if status == 407:
        return NetworkError(
            f"the proxy {proxy} requires a name and a password, or other ones (407)",
            hint="put them into its URL: http://NAME:PASSWORD@HOST:PORT, with special characters "
            "as %XX",
        )
    answer = f"{status} {reason}".strip()
    if status in (500, 502, 503, 504):
        return BrokenOffError(f"the proxy {proxy} cannot reach {host}: {answer}")
    return NetworkError(
        f"the proxy {proxy} refuses to connect to {host}: {answer}", hint=_EXCEPTION_HINT
    )


def is_refusal(reason: str) -> bool:
    """Return True for http.client's message that a proxy refused to connect to a host."""
    return _REFUSAL.match(reason) is not None
