"""Listening sockets: TCP, unix, and sockets passed by systemd."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from clowder_aimage.engine.endpoint import DEFAULT_HOST, Endpoint
from clowder_aimage.engine.worker_client import detect_program
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.http import PRODUCT, systemd
from clowder_aimage.http.access import ANY_ADDRESS, LOOPBACK_HOSTS

_SOCKET_MODE, _DIRECTORY_MODE = 0o660, 0o750
BACKLOG = 128


@dataclass(slots=True)
class Listeners:
    """Open sockets, their URLs, and the names allowed in a ``Host`` header (None: any)."""

    sockets: list[socket.socket] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    hosts: set[str] | None = field(default_factory=lambda: set(LOOPBACK_HOSTS))
    path: Path | None = None

    def close(self) -> None:
        """Close the sockets and remove the unix socket's file."""
        for listening in self.sockets:
            listening.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def add(self, listening: socket.socket) -> None:
        """Add a listening socket."""
        self.sockets.append(listening)
        if listening.family == socket.AF_UNIX:
            self.urls.append(f"unix://{listening.getsockname()}")
            return
        endpoint = Endpoint("http", *listening.getsockname()[:2])
        self.urls.append(str(endpoint))
        if not endpoint.is_loopback:
            self.hosts = None
        elif self.hosts is not None:
            self.hosts.add(endpoint.host)


def listen(
    address: str | None,
    path: Path | None = None,
    *,
    is_default: bool = False,
    has_tokens: bool,
    allow_remote: bool = False,
    allow_hosts: tuple[str, ...] = (),
) -> Listeners:
    """Listen on systemd's sockets, else on the unix socket ``path``, and on the TCP ``address``.

    A default address is not used if there is another socket. Raises AccessError; UsageError if an
    address is malformed, or if it is reachable from other machines, and there are no tokens and
    ``allow_remote`` is False. Without tokens, clients may use addresses and the machine's name as
    the host, so that the page of another site cannot (DNS rebinding).
    """
    listeners = Listeners()
    try:
        for listening in systemd.open_passed_sockets():
            listeners.add(listening)
        if not listeners.sockets and path:
            listeners.sockets.append(listen_unix(path))
            listeners.urls.append(f"unix://{path}")
            listeners.path = path
        if address and not (listeners.sockets and is_default):
            endpoint = Endpoint.parse_listen(address)
            check_access(endpoint, is_allowed=has_tokens or allow_remote)
            listeners.add(listen_tcp(endpoint, remedy="listen_elsewhere"))
        # systemd's sockets are checked too: a unit may make the server public by mistake
        for listening in listeners.sockets:
            if listening.family != socket.AF_UNIX:
                endpoint = Endpoint("http", *listening.getsockname()[:2])
                check_access(endpoint, is_allowed=has_tokens or allow_remote)
    except BaseException:
        listeners.close()
        raise
    if listeners.hosts is None and not has_tokens:
        name = socket.gethostname().lower()
        listeners.hosts = {*LOOPBACK_HOSTS, ANY_ADDRESS, name, f"{name}.local"}
    if allow_hosts:
        listeners.hosts = (listeners.hosts or set(LOOPBACK_HOSTS)) | set(allow_hosts)
    return listeners


def listen_tcp_only(address: str) -> Listeners:
    """Listen on one TCP address, without systemd's sockets. Raises AccessError, UsageError."""
    listeners = Listeners()
    listeners.add(listen_tcp(Endpoint.parse_listen(address)))
    return listeners


def check_access(endpoint: Endpoint, *, is_allowed: bool) -> None:
    """Raise UsageError if other machines can reach the endpoint, unless that is allowed."""
    if not endpoint.is_loopback and not is_allowed:
        raise UsageError(
            f"refusing to listen on {endpoint.authority} without tokens: any client on the network "
            "could generate pictures, and pull and delete models",
            hint="listen on 127.0.0.1, or require tokens",
            remedy="listen_without_tokens",
        )


def listen_tcp(endpoint: Endpoint, remedy: str = "") -> socket.socket:
    """Return a listening TCP socket. Raises AccessError with the program that has the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        # Python's text of this error repeats the address
        is_taken = error.errno == errno.EADDRINUSE
        reason = os.strerror(errno.EADDRINUSE) if is_taken else error.strerror or error
        message = f"cannot listen on {endpoint.authority}: {reason}"
        if is_taken and (program := _find_program(endpoint)):
            message += f"; {program} answers there"
            if program == PRODUCT and endpoint.port == Endpoint.parse(DEFAULT_HOST).port:
                message += ": workers and gateways have the same default port"
        hint = "choose another address"
        raise AccessError(message, hint=hint, remedy=remedy) from None


def _find_program(endpoint: Endpoint) -> str:
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return detect_program(replace(endpoint, host=loopback.get(endpoint.host, endpoint.host)))


def listen_unix(path: Path) -> socket.socket:
    """Return a listening unix socket for its owner and its group.

    Its directory is created with the same access; a world-writable one is refused. Raises
    UsageError if the path is invalid for a socket; AccessError, also if the socket is in use.
    """
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        mode = path.parent.stat().st_mode
        if mode & stat.S_IWOTH:
            raise UsageError(
                f"{path.parent} is world-writable",
                hint="use a separate directory for the socket: it is created with mode 0750",
            )
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # By umask, not by chmod: the socket is never accessible to others, not even briefly
            old_umask = os.umask(0o777 & ~_SOCKET_MODE)
            try:
                listening.bind(str(path))
            finally:
                os.umask(old_umask)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise AccessError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listening


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        # A socket that refuses connections was left by a killed process
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise
        else:
            raise AccessError(f"another process is listening on {path}")
    path.unlink(missing_ok=True)
