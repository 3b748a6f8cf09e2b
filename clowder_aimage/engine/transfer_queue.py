"""The transfers of a worker: each begun once, the urgent ones first."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from clowder_aimage.content import Rate, Source
from clowder_aimage.content.copy_event import OnEvent
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.engine.backoff import again
from clowder_aimage.engine.counted_source import CountedSource
from clowder_aimage.engine.engine_error import BusyError, ending
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.shared_transfer import PULL, PUSH, SharedTransfer, TransferGate, Work
from clowder_aimage.errors import (
    AImageError,
    UsageError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions

MOST = 32  # transfers with one registry that people ask for at once: each has threads of its own
_ALL = 2 * MOST  # and with all of them: one that is silent leaves places for the others
INTERACTIVE, DESIRED, PREFETCH = range(3)  # how urgent
URGENCIES = ("interactive", "desired", "prefetch")
_ROOM = (8, 4, 2)  # of each urgency one begins while fewer than this are at work
_BEYOND = 4  # and so many more, each of a registry that has none at work
STALL = 15.0  # seconds without a byte that are worth a word
OnBytes = Callable[[str, int], object]
Near = Callable[[Reference, OnBytes], Callable[[Source], Source]]
_Key = tuple[str, str, object]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller gave for one pull: an entry of docker's config file ("Configuration files",
    ``auth`` or ``registrytoken``). It is in memory as long as the pull, and in no log."""

    entry: tuple[str, str] = field(repr=False)


class TransferQueue:
    """The transfers of one worker, which all of its interfaces share.

    ``near`` makes, for what is to be pulled, a wrapper around its registry that knows nearer
    places, and tells how many bytes came from which kind of them. What nobody is in a hurry for
    waits ``settle`` seconds, so that the first of many that come together is not the one that
    happened to come first.
    """

    def __init__(
        self,
        store: ImageLayout,
        connection: ClientOptions,
        metrics: Metrics,
        news: EventLog,
        *,
        near: Near | None = None,
        settle: float = 0.1,
    ) -> None:
        self.is_over = False
        self.near = near
        self._store, self._connection = store, connection
        self._metrics, self._news = metrics, news
        self._known: dict[_Key, SharedTransfer] = {}
        self._numbers = itertools.count()
        self._settle = settle
        self._telling: set[asyncio.Task[None]] = set()

    def of(self, reference: Reference) -> SharedTransfer | None:
        """The pull of ``reference`` that waits or is under way."""
        return next((one for one in self.pulls() if one.reference == reference), None)

    def pulls(self) -> list[SharedTransfer]:
        """All pulls that wait or are under way."""
        known = list(self._known.values())  # also asked from other threads
        return [one for one in known if one.kind == PULL and not one.is_stopped]

    def close(self) -> None:
        """Begin nothing more; what is under way gives up, and what came is kept."""
        self.is_over = True
        for each in list(self._known.values()):
            each.end_now()

    def look(self) -> None:
        """Count the pulls that stand still; to be called every now and then."""
        now = time.monotonic()
        for each in self.pulls():
            if each.is_begun and not each.is_stalled and now - each.moved > STALL:
                each.is_stalled = True
                self._metrics.pull_stalls.inc()

    @contextlib.contextmanager
    def pull(
        self,
        reference: Reference,
        credentials: Credentials | None = None,
        *,
        components: tuple[str, ...] = (),
        urgency: int = INTERACTIVE,
        priority: int = 0,
    ) -> Iterator[SharedTransfer]:
        """Take part in the pull of ``reference``; begin it where nobody has. Who joins may make
        it more urgent.

        Only those who show the same credentials share one: nobody fails with another's.

        Raises:
            StoppedError, BusyError: the worker is about to end; too many are under way.
            UsageError: the reference names no registry.
        """
        if reference.registry is None:
            raise UsageError(
                f"{reference} names no registry to pull from",
                hint=f"name one, such as registry.example.com/team/{reference}",
            )
        connection = self._connection
        if credentials is not None:
            entry = dict([credentials.entry])
            connection = replace(connection, auths={reference.name: entry})

        def work(transfer: SharedTransfer, hear: OnEvent) -> Descriptor:
            gate, limit = TransferGate(transfer), connection.limit(reference.registry)
            rate = Rate(limit) if limit else None

            def near(source: Source) -> Source:
                counted = CountedSource(source, transfer.came, rate)
                if self.near is None or credentials is not None:
                    return counted
                return self.near(reference, transfer.came)(counted)

            layers = LayerSelection(components=components) if components else None
            options = PullOptions(layers=layers, on_event=hear, rate=gate, wrap=near)
            return pull(reference, self._store, connection, options).root

        key = (PULL, str(reference), (credentials, components))
        with self._joined(key, reference, work, urgency, priority) as found:
            yield found

    @contextlib.contextmanager
    def push(self, reference: Reference) -> Iterator[SharedTransfer]:
        """Take part in the push of ``reference``. Raises as ``pull``."""

        def work(_: SharedTransfer, hear: OnEvent) -> Descriptor:
            return push(self._store, reference, self._connection, on_event=hear)

        with self._joined((PUSH, str(reference), None), reference, work) as found:
            yield found

    @contextlib.contextmanager
    def _joined(
        self,
        key: _Key,
        reference: Reference,
        work: Work,
        urgency: int = INTERACTIVE,
        priority: int = 0,
    ) -> Iterator[SharedTransfer]:
        found = self._known.get(key)
        if self.is_over:
            raise ending()
        if found is None or found.is_stopped:
            if urgency == INTERACTIVE:
                self._check_room(reference)
            found = SharedTransfer(key[0], reference, work, lambda: self.is_over)
            found.urgency, found.priority = urgency, priority
            found.number = next(self._numbers)
            self._known[key] = found
            found.result.add_done_callback(lambda _: self._ended(key, found))
        found.users += 1
        found.urgency = min(found.urgency, urgency)
        found.priority = max(found.priority, priority)
        if urgency == INTERACTIVE:
            self._turn()
        else:
            asyncio.get_running_loop().call_later(self._settle, self._turn)
        try:
            yield found
        finally:
            found.users -= 1
            if not found.users and not found.is_kept and not found.is_begun:
                found.stop()

    def _check_room(self, reference: Reference) -> None:
        """Raise BusyError where too many ask already, of this registry or at all."""
        asked = [one for one in self._known.values() if one.urgency == INTERACTIVE]
        of_one = sum(one.reference.registry == reference.registry for one in asked)
        if of_one >= MOST or len(asked) >= _ALL:
            raise BusyError(len(asked), 5)

    def _turn(self) -> None:
        """Begin those that wait, as far as there is room."""
        known = [one for one in self._known.values() if not one.result.done()]
        for one in _next(known):
            one.start()
        still = Counter(one.urgency for one in known if not one.is_begun and one.kind == PULL)
        for urgency, name in enumerate(URGENCIES):
            self._metrics.pull_queue.labels(name).set(still[urgency])
        pulls = sum(one.is_begun for one in known if one.kind == PULL)
        self._metrics.pull_inflight.set(pulls)

    def _ended(self, key: _Key, transfer: SharedTransfer) -> None:
        if self._known.get(key) is transfer:
            del self._known[key]
        error = transfer.result.exception()
        outcome = "done" if error is None else "stopped" if transfer.is_stopped else "failed"
        facts: dict[str, Any] = {"reference": str(transfer.reference), "outcome": outcome}
        if transfer.kind == PULL and transfer.is_begun:
            self._count(transfer, outcome)
            if outcome == "failed":
                self._count_failure(transfer, error)
            if isinstance(error, VerificationError):
                self._metrics.mismatches.inc()
            moved = {name: count for name, count in transfer.sources.items() if name != "cache"}
            facts |= {"seconds": round(time.monotonic() - transfer.begun, 3), "bytes": moved}
        if isinstance(error, AImageError) and outcome == "failed":
            facts["reason"] = error.message
        task = asyncio.ensure_future(self._news.tell(transfer.kind, **facts))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        self._turn()

    def _count(self, transfer: SharedTransfer, outcome: str) -> None:
        metrics = self._metrics
        metrics.pulls.labels(outcome, metrics.host(transfer.reference.registry or "")).inc()
        metrics.pull_seconds.observe(time.monotonic() - transfer.begun)
        for source, count in transfer.sources.items():
            metrics.pull_bytes.labels(source).inc(count)
        metrics.dedup.inc(transfer.sources["cache"])

    def _count_failure(self, transfer: SharedTransfer, error: BaseException | None) -> None:
        metrics, code = self._metrics, "failed"  # a mistake of ours
        if isinstance(error, AImageError):
            code = again(error, 1, 0.0, 0.0).code
        metrics.pull_failures.labels(code, metrics.host(transfer.reference.registry or "")).inc()


def _next(known: list[SharedTransfer]) -> list[SharedTransfer]:
    """Those that begin now: the urgent first, of these the larger priority.

    One registry leaves the last place of a room to another that can use it. That is for those who
    come together; who comes when all places are taken begins beyond the room, one of each registry.
    There the longest wait counts, not the priority. So no number of silent registries keeps out
    another one for ever: whatever is at work ends, if only by its time-outs; the places beyond the
    room then go to those who came first, and these do not grow more.
    """
    at_work = [one for one in known if one.is_begun]
    waiting = [one for one in known if not one.is_begun]
    waiting.sort(key=lambda one: (one.urgency, -one.priority, one.number))
    for left in (1, 0):  # what is free the second time, no other registry can use
        for one in waiting:
            most = _ROOM[one.urgency]
            if one not in at_work and len(at_work) < most and _beside(one, at_work) < most - left:
                at_work.append(one)
    for one in sorted(waiting, key=lambda one: (one.urgency, one.number)):
        most = _ROOM[one.urgency]
        is_due = sum(other.urgency < one.urgency for other in at_work) < most
        if is_due and len(at_work) < most + _BEYOND and not _beside(one, at_work):
            at_work.append(one)
    return [one for one in at_work if not one.is_begun]


def _beside(one: SharedTransfer, at_work: list[SharedTransfer]) -> int:
    """How many of its registry are at work."""
    return sum(other.reference.registry == one.reference.registry for other in at_work)
