"""Ranges from the nodes that are at home to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Event
from urllib.parse import urlencode

from clowder_aimage.errors import NetworkError, VerificationError
from clowder_aimage.node.flight import verified
from clowder_aimage.node.peer_state import LIFE, Peer, Peers
from clowder_aimage.node.rendezvous import BlobRange, ranked
from clowder_aimage.oci import Reference
from clowder_aimage.registry.peer import PeerClient
from clowder_aimage.registry.peer_response import (
    BYTES,
    NO_PART,
    NOT_HERE,
    UNKNOWN,
    Busy,
    Elsewhere,
    Got,
    LateError,
    LiarError,
    SilentError,
    Without,
)

HOMES = 2  # nodes that are asked for a range before the registry is
OTHERS = 8  # nodes that are then asked whether they have it: who was at home to it before we came
HERE, LOOK = "here", "look"  # what counts is what is there; not even that is wanted, but a word
_ASKED = 8  # nodes that may say before that they have no part in it
_HOLDERS = 12  # nodes that have a range from others, how many are asked for it in a row
_LATE = 6  # strikes: a minute alone


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds: how long a home may say that it is busy; that something comes, though nothing
    does; that it is busy, and nothing comes at all; and the longest pause between two questions."""

    busy: float = 120.0
    coming: float = 40.0
    idle: float = 20.0
    pause: float = 1.0


@dataclass(frozen=True, slots=True)
class Given:
    """A range in memory, its SHA-256, and the neighbour by whose word it is that range."""

    data: bytearray
    digest: bytes
    giver: Peer


class Homes:
    """Threads may share it. ``closed`` is set when this node is to end."""

    def __init__(
        self,
        node: str,
        neighbours: Peers,
        client: PeerClient,
        closed: Event,
        *,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._neighbours, self._client = node, neighbours, client
        self._closed, self._clock = closed, clock
        self._patience = patience or Patience()

    def ask(self, reference: Reference, part: BlobRange) -> Given | None:
        """A range from the nodes that are at home to it; None where the registry is to be asked:
        because none of them gives it, or we are at home to it ourselves.

        Even then another node may have it: because it came before, or because it was at home to
        it as long as those before it had no part in the repository. The next ones are asked for
        that, and ask nobody themselves.
        """
        homes = 0
        usable = self._neighbours.usable(reference.name)
        order = ranked([*usable, self._node], part)
        for place, node in enumerate(order):
            if node == self._node or homes == HOMES or place == _ASKED:
                return self._of_others(set(order[:place]), reference, part)
            found = self._of(usable[node], reference, part)
            if isinstance(found, Given):
                return found
            homes += found
        return None

    def who_has(self, reference: Reference, part: BlobRange, asker: str | None) -> list[str]:
        """The ids of nodes, other than ``asker``, that have a range which we are at home to, or
        soon will: one of those who would be at home to it without us."""
        usable = self._neighbours.usable()  # who had no part a moment ago may have begun since
        asked = 0
        for node in ranked(usable, part)[:_ASKED]:
            if node == asker:
                continue
            found = self._has(usable[node], reference, part)
            if isinstance(found, list):
                return [one for one in found if one != asker]
            asked += found
            if asked == OTHERS:
                break
        return []

    def _has(self, one: Peer, reference: Reference, part: BlobRange) -> list[str] | bool:
        """Who has the range, as it says; else whether it was worth a try."""
        target = f"{LIFE}/blobs/{part.digest}?{_query(reference, part, None, LOOK)}"
        try:
            answer = self._client.has(one.place, target)
        except LiarError as error:
            self._neighbours.ban(one, error.reason)
        except SilentError as error:
            self._neighbours.failed(one, error.message)
        else:
            if isinstance(answer, Without):
                return self._is_worth(one, reference, answer.code)
            holders = () if answer is None else answer.holders
            return [holder for holder in holders if holder != self._node] or [one.id or ""]
        return False

    def _of(
        self,
        home: Peer,
        reference: Reference,
        part: BlobRange,
        *,
        how: str | None = None,
        is_last: bool = False,
    ) -> Given | bool:
        """A range from a node that is at home to it, or that has it; else whether that was worth
        a try."""
        began = moved = self._clock()
        come, pause = 0, 0.05
        while self._neighbours.may_ask(home):
            answer = self._get(home, reference, part, how=how)
            if isinstance(answer, Elsewhere):
                return is_last or self._elsewhere(answer, home, reference, part)
            if not isinstance(answer, Busy):
                return answer
            if (held := self._of_holders(home, reference, part, answer)) is not None:
                return held
            now = self._clock()
            if answer.come > come:
                come, moved = answer.come, now
            if not come and not answer.holders and now - began > self._patience.idle:
                return True  # it sends to others, and slowly
            is_idle = come and now - moved > self._patience.coming
            if is_idle or now - began > self._patience.busy:
                self._neighbours.failed(home, "always busy", cost=_LATE)
                return True
            if self._closed.wait(random.uniform(0.5, 1.0) * pause):
                raise NetworkError("this node is about to end", hint="try again")
            pause = min(2 * pause, self._patience.pause)
        return False  # it has gone meanwhile

    def _elsewhere(
        self, answer: Elsewhere, home: Peer, reference: Reference, part: BlobRange
    ) -> Given | bool:
        """A range from nodes that have it, as its home says; they answer for it themselves."""
        usable = self._neighbours.usable()
        for node in answer.holders[:HOMES]:
            if node in usable and node != home.id:
                found = self._of(usable[node], reference, part, how=HERE, is_last=True)
                if isinstance(found, Given):
                    return found
        return True

    def _of_holders(
        self, home: Peer, reference: Reference, part: BlobRange, busy: Busy
    ) -> Given | None:
        """A range from nodes that a busy home names, by their ids, or that those name which are
        busy themselves: where they are we know ourselves. The range is what the home says, not
        they."""
        if busy.digest is None:
            return None
        usable = self._neighbours.usable(reference.name)
        asked, named = {self._node, home.id}, random.sample(busy.holders, len(busy.holders))
        while named and len(asked) < _HOLDERS + 2:
            holder = named.pop()
            if holder in asked or holder not in usable:
                continue
            asked.add(holder)
            answer = self._get(usable[holder], reference, part, busy.digest, giver=home)
            if isinstance(answer, Given):
                return answer
            if isinstance(answer, Busy):  # it has sent it to others meanwhile: they come next
                named += answer.holders
        return None

    def _of_others(
        self, asked_before: Collection[str], reference: Reference, part: BlobRange
    ) -> Given | None:
        usable, asked = self._neighbours.usable(), 0
        others = [usable[one] for one in ranked(usable, part) if one not in asked_before]
        for other in others[:_ASKED]:
            answer = self._of(other, reference, part, how=HERE)
            if isinstance(answer, Given):
                return answer
            asked += answer
            if asked == OTHERS:
                break
        return None

    def _get(
        self,
        one: Peer,
        reference: Reference,
        part: BlobRange,
        word: bytes | None = None,
        *,
        giver: Peer | None = None,
        how: str | None = None,
    ) -> Given | Busy | Elsewhere | bool:
        """One question, and what follows for who was asked. Where it has no range to give:
        whether it was worth a try."""
        target = f"{LIFE}/blobs/{part.digest}?{_query(reference, part, word, how)}"
        try:
            answer = self._client.range(one.place, target, part.length, word)
        except LiarError as error:
            self._neighbours.ban(one, error.reason)
            return True
        except SilentError as error:
            late = isinstance(error, LateError)
            self._neighbours.failed(one, error.message, cost=_LATE if late else 1)
            return late  # who is gone is at home to nothing: the others ask the next one, too
        if isinstance(answer, Got):
            self._neighbours.worked(one)
            return self._taken(giver or one, part, answer)
        if isinstance(answer, Busy | Elsewhere):
            return answer
        return self._is_worth(one, reference, answer.code)

    def _is_worth(self, one: Peer, reference: Reference, code: str) -> bool:
        """What follows for one that has no range to give; whether it was worth a try."""
        if code not in (NOT_HERE, UNKNOWN):
            self._neighbours.refuses(one, reference.name)
        return code != NO_PART

    def _taken(self, giver: Peer, part: BlobRange, got: Got) -> Given | bool:
        """A range that is what ``giver`` says; of a small blob it is seen at once if it is
        right."""
        try:
            verified(part, got.data)
        except VerificationError:
            self._neighbours.ban(giver, BYTES)
            return True
        return Given(got.data, got.digest, giver)


def _query(reference: Reference, part: BlobRange, word: bytes | None, how: str | None) -> str:
    query = {
        "registry": reference.registry or "",
        "repository": reference.repository,
        "size": str(part.size),
        "range": str(part.number),
    }
    if word is not None:
        query["held"] = word.hex()
    if how is not None:
        query[how] = "1"
    return urlencode(query)
