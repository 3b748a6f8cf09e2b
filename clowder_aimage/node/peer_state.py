"""The nodes around this one: who lives, who is left alone for a while, who is banned.

One thread asks each of them for a word every now and then; whoever meets one that does not answer
says so, and it is asked at once. All the rest is memory, and ends with the process.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from clowder_aimage.node.address import Address
from clowder_aimage.registry.peer import PeerClient
from clowder_aimage.registry.peer_response import (
    BYTES,
    CREDENTIALS,
    LATE,
    LiarError,
    PeerAddress,
    SilentError,
)

LIVE, SILENT, BANNED = "live", "silent", "banned"
LIFE = "/v1/neighbour"
_THREADS = 8
_RATE = 10.0  # words asked for in a second: with a thousand neighbours each has its turn less often
_LOOK = 0.5  # seconds between looks at whose turn it is
_FORGIVEN = (CREDENTIALS, LATE)  # what may be otherwise when it was started anew
_FIRST = 2.0  # seconds that a pull waits for the first words

_log = structlog.get_logger("aimage.worker")


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds: how often a neighbour is asked for a word and a name looked up, how long one is
    banned, and how long at first for wrong bytes; how long it is not asked again for a repository
    that it has no part in, and at most let alone."""

    word: float = 3.0
    lookup: float = 30.0
    ban: float = 3600.0
    doubt: float = 300.0
    refusal: float = 0.25
    longest: float = 600.0


@dataclass(eq=False)
class Peer:
    """What is known of one. All fields are guarded by the lock of ``Peers``."""

    place: PeerAddress
    id: str | None = None
    is_alive: bool = False
    reason: str | None = "not asked yet"
    due: float = 0.0  # when it is asked for a word again
    strikes: int = 0  # ranges that broke off, since one came
    alone: float = 0.0  # until when it is left alone
    banned: float = 0.0  # until when
    ban_reason: str = ""
    ban_id: str | None = None  # who it was
    told: str = SILENT  # its state when that was last told
    refused: dict[str, float] = field(default_factory=dict)  # repositories, until when


class Peers:
    """Threads may share it.

    ``addresses`` says which there are, each time anew; ``node`` is our own id: whoever answers
    with that is us. ``on_state(url, state, reason)`` hears when one becomes live, silent or banned;
    ``each_time`` is called whenever the thread has looked who is to be asked.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        client: PeerClient,
        node: str,
        *,
        pace: Pace | None = None,
        on_state: Callable[[str, str, str | None], object] = lambda *_: None,
        each_time: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._each_time = each_time
        self._addresses, self._client, self._node = addresses, client, node
        self._pace = pace or Pace()
        self._on_state, self._clock = on_state, clock
        self._lock = threading.Lock()
        self._known: dict[PeerAddress, Peer] = {}
        self._looked_up: dict[Address, list[PeerAddress]] = {}
        self._next_lookup = 0.0
        self._wake, self._began, self._closed = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._watch, name="aimage-neighbours", daemon=True)

    def start(self) -> None:
        """Begin to ask who lives."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._pace.word)

    @property
    def are_configured(self) -> bool:
        """Whether there may be any."""
        return bool(self._addresses())

    def wait(self) -> None:
        """Wait until all were asked once, or for a moment."""
        if self._thread.is_alive():
            self._began.wait(_FIRST)

    # -- who may be asked

    def live(self) -> set[str]:
        """The ids of those that live and are not banned."""
        now = self._clock()
        with self._lock:
            return {one.id for one in self._known.values() if self._is_live(one, now) and one.id}

    def usable(self, repository: str = "") -> dict[str, Peer]:
        """By id, those that may be asked now, and did not say lately that they have no part in
        ``repository``."""
        now = self._clock()
        with self._lock:
            return {
                one.id: one
                for one in self._known.values()
                if self._is_live(one, now)
                and one.id
                and one.alone <= now
                and one.refused.get(repository, 0.0) <= now
            }

    def _is_live(self, one: Peer, now: float) -> bool:
        return one.is_alive and one.banned <= now and one.id not in (None, self._node)

    def may_ask(self, one: Peer) -> bool:
        """Whether it is still as usable as it was."""
        now = self._clock()
        with self._lock:
            return self._is_live(one, now) and one.alone <= now

    def states(self) -> list[dict[str, Any]]:
        """All of them but ourselves, for people."""
        now = self._clock()
        with self._lock:
            known = [
                {"url": str(one.place), "id": one.id, "state": state, "reason": reason}
                for one in sorted(self._known.values(), key=lambda one: one.place)
                if one.id != self._node
                for state, reason in [self._state(one, now)]
            ]
            lost = [address for address, places in self._looked_up.items() if not places]
        why = "the name cannot be looked up"
        return known + [
            {"url": f"dns:{address.place.host}:{address.place.port}", "id": None, "state": SILENT,
             "reason": why}
            for address in lost
        ]  # fmt: skip

    def _state(self, one: Peer, now: float) -> tuple[str, str | None]:
        if one.banned > now:
            return BANNED, one.ban_reason
        if not one.is_alive:
            return SILENT, one.reason
        return LIVE, one.reason if one.alone > now else None

    # -- what was met with

    def worked(self, one: Peer) -> None:
        """A range came from it."""
        with self._lock:
            one.strikes, one.alone = 0, 0.0

    def failed(self, one: Peer, reason: str, *, cost: int = 1) -> None:
        """It did not answer, or broke off: it is left alone for twice as long each time, and asked
        for a word at once. One that costs much time, time and again, is banned."""
        with self._lock:
            if one.alone > self._clock():
                return  # the same mishap, met with over another connection
            one.strikes += cost
            pause = min(self._pace.longest, 2.0 ** min(one.strikes, 20))
            one.alone = self._clock() + pause
            one.reason, one.due = reason, 0.0
            is_late = one.strikes >= 3 * cost and cost > 1
        if is_late:
            self.ban(one, LATE)
        self._wake.set()

    def refuses(self, one: Peer, repository: str) -> None:
        """It has no part in a repository, or cannot reach it."""
        with self._lock:
            if len(one.refused) > 256:
                one.refused.clear()
            one.refused[repository] = self._clock() + self._pace.refusal

    def takes_part(self, node: str, repository: str) -> None:
        """It has a part in a repository now: it has asked for something there itself."""
        with self._lock:
            for one in self._known.values():
                if one.id == node:
                    one.refused.pop(repository, None)

    def ban(self, one: Peer, reason: str) -> None:
        """Ask it for nothing more, for an hour; the first time that its bytes were wrong, for
        minutes: it may have them from a mirror that is wrong."""
        with self._lock:
            is_first = reason == BYTES and one.ban_reason != BYTES
            one.banned = self._clock() + (self._pace.doubt if is_first else self._pace.ban)
            one.ban_reason, one.ban_id = reason, one.id
        self._tell(one)

    # -- the thread

    def _watch(self) -> None:
        with ThreadPoolExecutor(_THREADS, "aimage-neighbour") as pool:
            while not self._closed.is_set():
                try:
                    self._look_up()
                    list(pool.map(self._ask, self._due()))
                    self._each_time()
                except Exception as error:  # whatever it is, it must not be the last look
                    _log.error("cannot look after the neighbours", reason=str(error))
                self._began.set()
                self._wake.wait(min(_LOOK, self._pace.word))
                self._wake.clear()

    def _look_up(self) -> None:
        """Learn which there are. Of a name that cannot be looked up the last addresses count."""
        wanted = list(map(Address.parse, self._addresses()))
        is_time = self._clock() >= self._next_lookup
        if is_time:
            self._next_lookup = self._clock() + self._pace.lookup
        for address in wanted:
            if is_time or address not in self._looked_up:
                try:
                    self._looked_up[address] = address.places()
                except (OSError, UnicodeError):
                    self._looked_up.setdefault(address, [])
        places = dict.fromkeys(place for each in wanted for place in self._looked_up[each])
        with self._lock:
            for place in places:
                self._known.setdefault(place, Peer(place))
            gone = [place for place in self._known if place not in places]
            for place in gone:
                del self._known[place]
        for place in gone:
            self._client.forget(place)

    def _due(self) -> list[Peer]:
        now = self._clock()
        with self._lock:
            every = max(self._pace.word, len(self._known) / _RATE)
            due = [one for one in self._known.values() if one.due <= now and self._is_asked(one)]
            for one in due:
                one.due = now + every * random.uniform(0.8, 1.2)
        return due

    def _is_asked(self, one: Peer) -> bool:
        """Whether it is asked for a word. Of the banned only those with whom we merely do not
        agree on a token, or that were late: that may end when one of us is started anew."""
        return one.banned <= self._clock() or one.ban_reason in _FORGIVEN

    def _ask(self, one: Peer) -> None:
        """Ask one for a word."""
        if self._closed.is_set():
            return
        try:
            node = self._client.life(one.place, LIFE)
        except LiarError as error:
            if one.banned <= self._clock():
                self.ban(one, error.reason)
            return
        except SilentError as error:
            with self._lock:
                one.is_alive, one.reason = False, error.message
        else:
            with self._lock:
                if one.ban_reason in _FORGIVEN and one.ban_id != node:
                    one.banned = 0.0
                if one.id != node:
                    one.strikes, one.alone = 0, 0.0
                one.is_alive, one.id = True, node
        self._tell(one)

    def _tell(self, one: Peer) -> None:
        with self._lock:
            state, reason = self._state(one, self._clock())
            is_news = state != one.told and one.id != self._node
            one.told = state
        if is_news:
            self._on_state(str(one.place), state, reason)
