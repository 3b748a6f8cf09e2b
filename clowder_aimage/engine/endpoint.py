"""Where a worker listens, as a client names it, and a connection to it."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from clowder_aimage.errors import NetworkError, UsageError

_PORT = 11434
DEFAULT_HOST = f"127.0.0.1:{_PORT}"
_CONNECT = 10.0  # seconds
# A machine that vanished is noticed after a minute, however long a picture takes.
_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens: ``scheme`` is http, https or unix (then ``path`` is the socket)."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """``http://host:port``, ``host:port``, or ``unix:///path``. Raises UsageError."""
        if text.startswith("unix:///"):
            return cls("unix", path=text.removeprefix("unix://"))
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port, host = parts.port, parts.hostname or ""
        except ValueError:
            raise _odd(text) from None
        if parts.username is not None or parts.password is not None:
            raise UsageError(
                "the address of a worker holds no credentials", hint="put the token in AIMAGE_TOKEN"
            )
        is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
        if not text.isprintable() or parts.scheme not in ("http", "https"):
            raise _odd(text)
        if not is_bare or port == 0 or not re.fullmatch(r"[\w.:%-]+", host, re.ASCII):
            raise _odd(text)
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else _PORT))

    @classmethod
    def parse_listen(cls, text: str) -> Endpoint:
        """Return the endpoint of ``HOST:PORT`` or ``[V6]:PORT`` to listen on; port 0: a free one.

        ``localhost`` is its IPv4 address, as one port is announced. Raises UsageError.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(
                f"{text!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:5000"
            )
        return cls("http", "127.0.0.1" if host == "localhost" else host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Only this machine reaches it. False for a name that must be looked up."""
        try:
            return self.scheme == "unix" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authority(self) -> str:
        """The ``host:port`` of its URL (RFC 3986, 3.2)."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        is_unix = self.scheme == "unix"
        return f"unix://{self.path}" if is_unix else f"{self.scheme}://{self.authority}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection to it. Raises NetworkError."""
        connection = self._connection()
        try:
            connection.connect()
            if self.scheme != "unix":
                _keep_alive(connection.sock)
        except (OSError, UnicodeError) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise NetworkError(
                f"no worker answers at {self}: {reason}",
                hint="start one with 'aimage serve', or name another one in AIMAGE_HOST",
            ) from None
        return connection

    def _connection(self) -> http.client.HTTPConnection:
        if self.scheme == "unix":
            return _SocketConnection(self.path)
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=_CONNECT)


def _odd(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no address of a worker",
        hint="such as 127.0.0.1:11434, http://host:11434 or unix:///run/aimage/worker.sock",
    )


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CONNECT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
