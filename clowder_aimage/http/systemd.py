"""systemd's protocols for services: sd_notify(3) and sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from clowder_aimage.errors import UsageError

# SD_LISTEN_FDS_START
FIRST = 3


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send ``state`` (READY=1, STOPPING=1, WATCHDOG=1) to systemd if it started the process."""
    address = environment.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(address)
        to.sendall(state.encode())


def read_watchdog_interval(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between two WATCHDOG=1; None without a watchdog."""
    try:
        period = int(environment["WATCHDOG_USEC"]) / 1_000_000
        is_ours = int(environment.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except (KeyError, ValueError):
        return None
    return period / 2 if is_ours and period > 0 else None


def open_passed_sockets(environment: Mapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the listening sockets that systemd passed to the process. Raises UsageError."""
    try:
        if int(environment["LISTEN_PID"]) != os.getpid():
            return []
        count = int(environment["LISTEN_FDS"])
    except (KeyError, ValueError):
        return []
    sockets: list[socket.socket] = []
    for number in range(FIRST, FIRST + count):
        try:
            sockets.append(socket.socket(fileno=number))
            if not sockets[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it is not listening")
        except OSError as error:
            for passed in sockets:
                passed.close()
            raise UsageError(
                f"LISTEN_FDS is {count}, but descriptor {number} is not a listening socket: "
                f"{error.strerror or error}",
                hint="check the socket unit, or unset LISTEN_FDS and LISTEN_PID",
            ) from None
    return sockets
