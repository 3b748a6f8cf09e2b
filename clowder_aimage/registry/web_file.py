"""Files from URLs, fetched within limits of size, time and addresses.

URLs are untrusted, and their hosts choose the targets of redirects. Each redirect is followed here,
so that its host and address are checked like the first ones.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urljoin, urlsplit

import urllib3

from clowder_aimage.errors import (
    ForbiddenError,
    NetworkError,
    NotFoundError,
    RegistryError,
    TooLargeError,
    UnauthorizedError,
    UsageError,
)
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions, open_pools
from clowder_aimage.registry.reach import Boundary, OutsideError, Reach, UncheckedError
from clowder_aimage.registry.response import OversizeError, RegistryResponse
from clowder_aimage.registry.session import CONNECT_TIMEOUT
from clowder_aimage.registry.transport import Transport

MAX_URL = 8192  # characters
_MAX_REDIRECTS = 5
# Seconds for the headers, and for the first byte of the body.
_READ_TIMEOUT = 15.0
# The least bytes per second of a body.
_RATE = 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"https": 443, "http": 80}
_NAME = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*"
_ENTRY = re.compile(rf"(http://)?(\*|(?:\*\.)?{_NAME}|\[[0-9a-f:.]+\])(?::([0-9]{{1,5}}))?")
_HOST = re.compile(rf"{_NAME}|[0-9a-f:.]*:[0-9a-f:.]*")


@dataclass(frozen=True, slots=True)
class InputHosts:
    """The hosts of pictures that an operator allows.

    An entry is ``HOST``, ``HOST:PORT``, ``*.DOMAIN`` or ``*``, with ``http://`` before it to allow
    HTTP. Without a port it is the default one. A named host may have a private address. A pattern
    allows addresses of the internet only, and no host behind a proxy, since that hides addresses.
    """

    entries: tuple[str, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> InputHosts:
        """Return the hosts of entries. Raises ValueError."""
        entries = tuple(text.lower() for text in texts)
        for entry in entries:
            if _ENTRY.fullmatch(entry) is None:
                raise ValueError(f"invalid host {entry!r}; expected HOST, HOST:PORT or *.DOMAIN")
        return cls(entries)

    def reach(self, scheme: str, host: str, port: int) -> Reach | None:
        """Return the most internal allowed reach of a host; None if the host is not allowed."""
        reaches = (self._reach(entry, scheme, host, port) for entry in self.entries)
        return max((reached for reached in reaches if reached is not None), default=None)

    def _reach(self, entry: str, scheme: str, host: str, port: int) -> Reach | None:
        parts = _ENTRY.fullmatch(entry)
        if parts is None or port != int(parts[3] or _PORTS[scheme]):
            return None
        if scheme == "http" and not (parts[1] or _is_loopback(host)):
            return None
        name = parts[2].strip("[]")
        if name == host:
            return Reach.NOWHERE if _is_address(host) else Reach.MACHINE
        is_pattern = name == "*" or (name.startswith("*.") and host.endswith(name[1:]))
        return Reach.INTERNET if is_pattern else None


def fetch(
    url: str, connection: ClientOptions, *, limit: int, hosts: InputHosts | None = None
) -> bytes:
    """Return the file at an https URL, of up to ``limit`` bytes.

    http is for hosts of this machine, and for those allowed in ``hosts``. With ``hosts`` the host
    of the URL and of each redirect must be among them, at an address that they permit; without,
    a redirect may lead to addresses as public as that of the URL. Only the User-Agent is sent:
    no credentials and no certificate for a registry.

    Raises:
        UsageError: It is not such a URL.
        ForbiddenError: It is, or leads to, a host or an address that is not permitted.
        TooLargeError: It has more bytes.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be fetched.
    """
    boundary: Boundary | None = None
    shown_start = shown = redact(url)
    for count in range(_MAX_REDIRECTS + 1):
        parts = _split(url, shown)
        host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        max_reach = _check_reach(hosts, parts.scheme, host, port, shown, is_redirect=count > 0)
        if hosts is not None:
            boundary = Boundary(host, max_reach=max_reach)
        boundary = boundary or connection.build_boundary(host)
        options = replace(connection.to_mirror(parts.netloc), cert_dirs=())
        with open_pools(options, parts.netloc, boundary) as pools:
            transport = Transport(pools, parts.netloc)
            try:
                # An address in the URL is refused without a connection.
                boundary.check_name(host)
                with closing(_get(transport, url)) as response:
                    location = response.headers.get("Location")
                    if response.status_code not in _REDIRECTS or not location:
                        return _read_body(response, shown, limit)
                url, shown = _resolve_target(url, location, shown_start)
            except OutsideError as error:
                raise build_forbidden_error(error, shown, host) from None
            except NetworkError as error:
                error.hint, error.remedy = "check the URL and the network", ""
                raise
    raise NetworkError(f"{shown_start} leads to more than {_MAX_REDIRECTS} redirects")


def build_forbidden_error(error: OutsideError, shown: str, host: str) -> ForbiddenError:
    """Return the error of a URL or an artifact whose address is not permitted."""
    if isinstance(error, UncheckedError):
        return ForbiddenError(
            f"{shown} is read through a proxy, so that its address cannot be checked: a pattern "
            "does not allow it",
            remedy="allow_input",
            host=host,
        )
    return ForbiddenError(f"{shown} is at an internal address")


def redact(url: str) -> str:
    """Return a URL for messages, without user, query and fragment: these may be secret."""
    text = re.sub(r"(?<=//)[^/?#]*@", "", re.split(r"[?#]", url, maxsplit=1)[0])
    return "".join(filter(str.isprintable, text))[:200]


def _get(transport: Transport, url: str) -> RegistryResponse:
    timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT, read=_READ_TIMEOUT)
    sent = {"Accept": "image/png, image/jpeg, image/webp", "Accept-Encoding": "identity"}
    return transport.send("GET", url, sent, timeout=timeout, max_redirects=0)


def _resolve_target(url: str, location: str, shown_start: str) -> tuple[str, str]:
    """Return the URL of a redirect, and its text. Raises NetworkError, ForbiddenError."""
    try:
        target = urljoin(url, location)
    except ValueError:
        raise NetworkError(f"{shown_start} leads to an invalid URL") from None
    shown, schemes = (
        redact(target),
        ("https:",) if url.startswith("https:") else ("https:", "http:"),
    )
    if not target.lower().startswith(schemes):
        raise ForbiddenError(f"{shown_start} leads to {shown}, which is not read")
    return target, shown


def _split(url: str, shown: str) -> SplitResult:
    """Return the parts of a URL. Raises UsageError."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        raise UsageError(f"{shown} is not a valid URL") from None
    host = parts.hostname or ""
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    has_host = _HOST.fullmatch(host) is not None and port_is_valid
    if parts.scheme not in _PORTS or not has_host or not is_plain:
        raise UsageError(f"{shown} is not a valid URL", hint="expected https://HOST/PATH")
    if "@" in parts.netloc:
        raise UsageError(f"the URL of {shown} has a user name or a password, which is not sent")
    return parts


def _check_reach(
    hosts: InputHosts | None, scheme: str, host: str, port: int, shown: str, *, is_redirect: bool
) -> Reach:
    """Return the most internal allowed reach of a host. Raises ForbiddenError, UsageError."""
    if hosts is not None:
        max_reach = hosts.reach(scheme, host, port)
        if max_reach is None:
            verb = "leads to" if is_redirect else "is of"
            raise ForbiddenError(
                f"the URL {verb} the host {scheme}://{host[:200]}:{port}, from which pictures are "
                "not allowed",
                remedy="allow_input",
                host=host[:200],
            )
        return max_reach
    if scheme == "http" and not _is_loopback(host):
        raise (ForbiddenError if is_redirect else UsageError)(
            f"{shown} is not encrypted", hint="use https://, or download the file"
        )
    return Reach.NOWHERE


def _read_body(response: RegistryResponse, shown: str, limit: int) -> bytes:
    status = response.status_code
    if status in (401, 403):
        raise UnauthorizedError(
            f"{response.host} denies access to {shown} ({status})",
            hint="URLs are fetched without credentials: download the file",
        )
    if status in (404, 410):
        raise NotFoundError(f"{shown} not found ({status})", hint="check the URL")
    if status != 200:
        raise RegistryError(f"{response.host} answered {status} for {shown}", status=status)
    length = response.headers.get("Content-Length", "")
    try:
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise OversizeError(length)
        return response.read(limit, _RATE)
    except OversizeError:
        raise TooLargeError(f"{shown} has more than {limit} bytes") from None


def _is_loopback(host: str) -> bool:
    return Reference(f"[{host}]" if ":" in host else host, "x").is_loopback


def _is_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host) is not None
    except ValueError:
        return False
