"""Requests to other nodes. Nothing that a registry is told is told to them.

No docker config, no netrc, no proxy, no redirect and no cookie has a part in this: a request
carries the nodes' own token, and goes to the place it is meant for. An answer is bounded in bytes
and in time before it is looked at; one that no honest node gives is told apart from none at all.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clowder_aimage.errors import AImageError
from clowder_aimage.registry.peer_response import (
    ID,
    NONSENSE,
    NOT_HERE,
    Busy,
    Elsewhere,
    Got,
    LateError,
    LiarError,
    PeerAddress,
    SilentError,
    Without,
    body,
    document,
    refusal,
)

ASKER = "Aimage-Asker"
_IDLE = 4  # connections to one place that are kept
_CONNECT = 2.0  # seconds
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds: for word that a node lives, for a range and until its first byte."""

    life: float = 3.0
    range: float = 90.0
    stall: float = 15.0


class PeerClient:
    """Asks other nodes. Threads may share it.

    ``node`` is our own id, ``token`` what the nodes know each other by, ``ca_file`` the
    authorities of those that speak TLS, where the usual ones are not meant.
    """

    def __init__(
        self,
        node: str,
        token: str | None,
        *,
        ca_file: Path | None = None,
        times: Times | None = None,
    ) -> None:
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "aimage", ASKER: node}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._ca_file = ca_file
        self._times = times or Times()
        self._lock = threading.Lock()
        self._idle: defaultdict[PeerAddress, list[http.client.HTTPConnection]] = defaultdict(list)
        self._busy: set[socket.socket] = set()
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        with self._lock:
            self._is_closed = True
            idle = [one for each in self._idle.values() for one in each]
            self._idle.clear()
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for sock in busy:
            _cut(sock)

    def forget(self, place: PeerAddress) -> None:
        """Close the idle connections with a node that is no more."""
        with self._lock:
            idle = self._idle.pop(place, [])
        for connection in idle:
            connection.close()

    def life(self, place: PeerAddress, target: str) -> str:
        """The id of the node at ``place``.

        Raises:
            SilentError: there is no answer, or not that of a node that is well.
            LiarError: it redirects, or wants other credentials.
        """

        def read(response: http.client.HTTPResponse) -> str:
            value = document(place, response)
            if response.status != 200:
                raise SilentError(f"the neighbour {place} answers {response.status}")
            if not isinstance(node := value.get("id"), str) or not ID.fullmatch(node):
                raise LiarError(place, NONSENSE, "does not say who it is")
            return node

        return self._ask(place, target, self._times.life, read)

    def range(
        self, place: PeerAddress, target: str, length: int, word: bytes | None = None
    ) -> Got | Busy | Elsewhere | Without:
        """The range of ``length`` bytes at ``target``. With a ``word`` its SHA-256 must be that.

        Raises:
            SilentError, LateError: no answer, or one that broke off; one that did not end.
            LiarError: what came is not what it was said to be, or no answer at all.
        """

        def read(response: http.client.HTTPResponse) -> Got | Busy | Elsewhere | Without:
            if response.status != 200:
                return refusal(response.status, document(place, response))
            return body(place, response, length, word)

        return self._ask(place, target, self._times.range, read)

    def has(self, place: PeerAddress, target: str) -> Elsewhere | Without | None:
        """Whether the node has what is at ``target``, or soon will: who has, or why not, if it has
        not.

        Raises:
            SilentError, LiarError: as ``life`` does.
        """

        def read(response: http.client.HTTPResponse) -> Elsewhere | Without | None:
            said = document(place, response)
            if response.status == 200:
                return None
            answer = refusal(response.status, said)
            return Without(NOT_HERE) if isinstance(answer, Busy) else answer

        return self._ask(place, target, self._times.life, read)

    def _ask(self, place: PeerAddress, target: str, limit: float, read: Callable[[Any], _T]) -> _T:
        """What ``read`` makes of the answer; all of it within ``limit`` seconds."""
        connection = self._kept(place)
        if connection is not None:
            with contextlib.suppress(_StaleError):
                return self._exchange(place, connection, target, limit, read)
        try:
            return self._exchange(place, self._connected(place), target, limit, read)
        except _StaleError as error:
            raise SilentError(f"the neighbour {place} hung up") from error

    def _exchange(
        self,
        place: PeerAddress,
        connection: http.client.HTTPConnection,
        target: str,
        limit: float,
        read: Callable[[Any], _T],
    ) -> _T:
        is_over = threading.Event()
        sock = connection.sock  # which http.client forgets when it is the last answer over it

        def end() -> None:
            is_over.set()
            _cut(sock)

        timer = threading.Timer(limit, end)  # a byte now and then would outlast any timeout
        timer.daemon = True
        timer.start()
        try:
            with self._at_work(sock), _in_our_words(place, is_over):
                try:
                    connection.request("GET", target, headers=self._headers)
                    response = connection.getresponse()
                except (BrokenPipeError, ConnectionResetError) as error:
                    if is_over.is_set():
                        raise
                    raise _StaleError from error
                value = read(response)
            timer.cancel()  # or it might cut the connection for whoever has it next
            if response.isclosed() and not response.will_close and not is_over.is_set():
                self._keep(place, connection)
            else:
                connection.close()
            return value
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _at_work(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise SilentError("this node is about to end")
            self._busy.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(sock)

    def _kept(self, place: PeerAddress) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(place)
            return idle.pop() if idle else None

    def _keep(self, place: PeerAddress, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle[place]
            if not self._is_closed and len(idle) < _IDLE:
                idle.append(connection)
                return
        connection.close()

    def _connected(self, place: PeerAddress) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        try:
            if place.is_secure:
                context = ssl.create_default_context(cafile=self._ca_file)
                connection = http.client.HTTPSConnection(
                    place.host, place.port, timeout=_CONNECT, context=context
                )
            else:
                connection = http.client.HTTPConnection(place.host, place.port, timeout=_CONNECT)
            connection.connect()
            connection.sock.settimeout(self._times.stall)
            connection.auto_open = 0  # a new one is made here, or not at all
            return connection
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SilentError(f"cannot reach the neighbour {place}: {reason}") from None


class _StaleError(Exception):
    """The connection ended before there was an answer: it may have been kept for too long."""


def _cut(sock: socket.socket) -> None:
    """End a connection that another thread waits for."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS has no say in this


@contextlib.contextmanager
def _in_our_words(place: PeerAddress, is_over: threading.Event) -> Iterator[None]:
    """What goes wrong with an answer, as a SilentError or LiarError."""
    try:
        yield
    except _StaleError:
        raise
    except (OSError, ValueError, EOFError, http.client.HTTPException, AImageError) as error:
        if is_over.is_set():
            raise LateError(f"the neighbour {place} did not answer in time") from None
        if isinstance(error, AImageError):
            raise
        if isinstance(error, TimeoutError):
            raise LateError(f"the neighbour {place} stands still") from None
        is_broken = isinstance(error, OSError | EOFError | http.client.IncompleteRead)
        if is_broken or isinstance(error, http.client.NotConnected):
            raise SilentError(f"the answer of the neighbour {place} broke off: {error}") from None
        raise LiarError(place, NONSENSE, "does not speak HTTP") from None
