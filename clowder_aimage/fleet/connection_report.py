"""Reports of a connection to NATS: when it is missing, again while it is, and when it is back."""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable

from clowder_aimage.errors import AImageError, NetworkError

# Seconds until the second report of the same failure; each pause is twice the one before.
FIRST, LONGEST = 10.0, 300.0
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_log = logging.getLogger("aimage.fleet")


class ConnectionReport:
    """Logs a missing connection at once and then ever more rarely, and that it is back.

    ``url`` has no credentials.
    """

    def __init__(self, url: str, fleet: str, clock: Callable[[], float]) -> None:
        self._facts = {"url": url, "fleet": fleet}
        self._clock = clock
        # When the failure began, and its kind
        self._since: float | None = None
        self._kind = ""
        self._due = 0.0
        self._pause = FIRST

    def observe(self, reason: AImageError | None) -> None:
        """Log the state if that is due: ``reason`` says why the fleet cannot be used."""
        if reason is None:
            self._report_return()
            return
        timestamp = self._clock()
        # The words of a network error may change with each attempt.
        kind = "network" if isinstance(reason, NetworkError) else reason.message
        if self._since is None or kind != self._kind:
            self._since = timestamp if self._since is None else self._since
            self._kind, self._pause, self._due = kind, FIRST, timestamp
        if timestamp < self._due:
            return
        self._due, pause = timestamp + self._pause, self._pause
        self._pause = min(2 * self._pause, LONGEST)
        is_network = isinstance(reason, NetworkError)
        text = "no connection to NATS; trying again" if is_network else "cannot use the fleet"
        _log.warning(text, extra={**self._facts, "reason": reason.message, "again_in": pause})

    def _report_return(self) -> None:
        facts = dict[str, object](self._facts)
        if self._since is not None:
            facts["after"] = round(self._clock() - self._since, 1)
        _log.info("connected to the fleet", extra=facts)
        self._since, self._kind = None, ""


def describe_network_error(error: BaseException) -> str:
    """Return the reason of an error of a connection, such as ``connection refused``."""
    text = str(error)
    if isinstance(error, ssl.SSLError):
        # Its number is not one of the system
        return error.strerror or text
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _ERRNO.search(text)):
        # Of several addresses
        number = int(match[1])
    if number is not None and number > 0:
        return os.strerror(number)
    if isinstance(error, OSError) and error.strerror:
        # A name that cannot be resolved
        return error.strerror
    return text or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
