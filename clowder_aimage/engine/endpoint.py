"""The address of a worker, a registry or a node."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from clowder_aimage.errors import UsageError

_PORT = 11434
DEFAULT_HOST = f"127.0.0.1:{_PORT}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address. ``scheme`` is http, https, or unix with the ``path`` of the socket."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse ``http://host:port``, ``host:port`` or ``unix:///path``. Raises UsageError."""
        if text.startswith("unix:///"):
            return cls("unix", path=text.removeprefix("unix://"))
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port, host = parts.port, parts.hostname or ""
        except ValueError:
            raise _build_address_error(text) from None
        if parts.username is not None or parts.password is not None:
            message = "a worker's address must not contain credentials"
            raise UsageError(message, remedy="worker_token")
        is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
        is_valid = is_bare and port != 0 and re.fullmatch(r"[\w.:%-]+", host, re.ASCII)
        if not is_valid or not text.isprintable() or parts.scheme not in ("http", "https"):
            raise _build_address_error(text)
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else _PORT))

    @classmethod
    def parse_listen(cls, text: str) -> Endpoint:
        """Parse ``HOST:PORT`` or ``[V6]:PORT`` to listen on; port 0 selects a free port.

        ``localhost`` is resolved to IPv4, so that one port is announced. Raises UsageError.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            hint = "expected HOST:PORT, such as 127.0.0.1:5005"
            raise UsageError(f"invalid address {text!r}", hint=hint)
        return cls("http", "127.0.0.1" if host == "localhost" else host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Return True if only this machine can connect; False for a name to be resolved."""
        try:
            return self.scheme == "unix" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authority(self) -> str:
        """The ``host:port`` of the URL (RFC 3986, 3.2)."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        is_unix = self.scheme == "unix"
        return f"unix://{self.path}" if is_unix else f"{self.scheme}://{self.authority}"


def _build_address_error(text: str) -> UsageError:
    hint = "for example 127.0.0.1:11434, http://host:11434 or unix:///run/aimage/worker.sock"
    return UsageError(f"invalid worker address {text!r}", hint=hint)
