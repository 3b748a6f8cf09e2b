"""The queue of a worker's transfers: each runs once, in order of urgency."""

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
from clowder_aimage.content.copy_option import OnEvent
from clowder_aimage.content.platform import ANY, ManifestSelector
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.engine.admission import BusyError, ending
from clowder_aimage.engine.backoff import again
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.shared_transfer import (
    PULL,
    PUSH,
    CountedSource,
    SharedTransfer,
    TransferGate,
    Work,
)
from clowder_aimage.errors import AImageError, UsageError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions

MAX_TRANSFERS = 32  # interactive ones per registry: each has its own threads
_MAX_ALL = 2 * MAX_TRANSFERS  # in total: an unresponsive registry cannot use them all
INTERACTIVE, DESIRED, PREFETCH = range(3)  # urgencies
URGENCIES = ("interactive", "desired", "prefetch")
_PLACES = (8, 4, 2)  # by urgency: a transfer begins while fewer are running
_EXTRA = 4  # additional places for registries without a running transfer
STALL = 15.0  # seconds without a byte that count as a stall
OnBytes = Callable[[str, int], object]
Near = Callable[[Reference, OnBytes], Callable[[Source], Source]]
_Key = tuple[str, str, object]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a pull: an entry of docker's config file.

    It has ``auth`` or ``registrytoken``. It is held in memory during the pull and never logged.
    """

    entry: tuple[str, str] = field(repr=False)


class TransferQueue:
    """The transfers of a worker, shared by all of its interfaces.

    ``near`` returns, for a reference, a wrapper that adds nearer sources to its registry and
    reports the bytes by source. ``selector`` selects the manifest of an index.
    Non-interactive transfers wait for ``settle`` seconds, so that the first of many concurrent
    transfers is selected by priority.
    """

    def __init__(
        self,
        store: ImageLayout,
        connection: ClientOptions,
        metrics: Metrics,
        events: EventLog,
        *,
        settle: float = 0.1,
        selector: ManifestSelector = ANY,
    ) -> None:
        self.is_over = False
        self.near: Near | None = None
        self.connection = connection
        self._store, self._selector = store, selector
        self._metrics, self._events = metrics, events
        self._known: dict[_Key, SharedTransfer] = {}
        self._numbers = itertools.count()
        self._settle = settle

    def of(self, reference: Reference) -> SharedTransfer | None:
        """Return the queued or running pull of ``reference``, if any."""
        return next((one for one in self.pulls() if one.reference == reference), None)

    def pulls(self) -> list[SharedTransfer]:
        """Return all queued or running pulls."""
        known = list(self._known.values())  # called from other threads too
        return [one for one in known if one.kind == PULL and not one.is_stopped]

    def close(self) -> None:
        """Refuse new transfers and stop the others; partial content is kept."""
        self.is_over = True
        for each in list(self._known.values()):
            each.stop(is_now=True)

    def look(self) -> None:
        """Count stalled pulls; call this periodically."""
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
        is_early: bool = False,
        urgency: int = INTERACTIVE,
        priority: int = 0,
    ) -> Iterator[SharedTransfer]:
        """Join or begin the pull of ``reference``; a new user may raise its urgency.

        With ``is_early`` a new one fetches blobs in the order in which a model is loaded. A pull is
        shared only between users with the same credentials. Raises StoppedError, BusyError, and
        UsageError if the reference has no registry.
        """
        if reference.registry is None:
            hint = f"use a name with one, such as registry.example.com/team/{reference}"
            raise UsageError(f"cannot pull {reference}: the name has no registry", hint=hint)
        connection = self.connection
        if credentials is not None:
            connection = replace(connection, auths={reference.name: dict([credentials.entry])})

        def work(transfer: SharedTransfer, on_event: OnEvent) -> Descriptor:
            gate, limit = TransferGate(transfer), connection.limit(reference.registry)
            rate = Rate(limit) if limit else None

            def near(source: Source) -> Source:
                counted = CountedSource(source, transfer.count, rate)
                if self.near is None or credentials is not None:
                    return counted
                return self.near(reference, transfer.count)(counted)

            layers = LayerSelection(components=components) if components else None
            options = PullOptions(
                self._selector,
                layers,
                on_event=on_event,
                rate=gate,
                wrap=near,
                begin=transfer.begin if is_early else None,
            )
            return pull(reference, self._store, connection, options).root

        key = (PULL, str(reference), (credentials, components))
        with self._joined(key, reference, work, urgency, priority) as found:
            yield found

    @contextlib.contextmanager
    def push(self, reference: Reference) -> Iterator[SharedTransfer]:
        """Join or begin the push of ``reference``. Raises as ``pull``."""
        with self._joined(
            (PUSH, str(reference), None),
            reference,
            lambda _, on_event: push(self._store, reference, self.connection, on_event=on_event),
        ) as found:
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
                self._check_places(reference)
            found = SharedTransfer(key[0], reference, work, lambda: self.is_over)
            found.urgency, found.priority = urgency, priority
            found.number = next(self._numbers)
            self._known[key] = found
            found.result.add_done_callback(lambda _: self._ended(key, found))
        found.urgency = min(found.urgency, urgency)
        found.priority = max(found.priority, priority)
        with found.used():
            if urgency == INTERACTIVE:
                self._turn()
            else:
                asyncio.get_running_loop().call_later(self._settle, self._turn)
            yield found

    def _check_places(self, reference: Reference) -> None:
        interactive = [one for one in self._known.values() if one.urgency == INTERACTIVE]
        of_one = sum(one.reference.registry == reference.registry for one in interactive)
        if of_one >= MAX_TRANSFERS or len(interactive) >= _MAX_ALL:
            raise BusyError(len(interactive), 5)

    def _turn(self) -> None:
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
            self._count(transfer, outcome, error)
            fetched = {name: count for name, count in transfer.sources.items() if name != "cache"}
            facts |= {"seconds": round(time.monotonic() - transfer.begun, 3), "bytes": fetched}
        if isinstance(error, AImageError) and outcome == "failed":
            facts["reason"] = error.message
        self._events.record(transfer.kind, **facts)
        self._turn()

    def _count(self, pull: SharedTransfer, outcome: str, error: BaseException | None) -> None:
        metrics, host = self._metrics, self._metrics.host(pull.reference.registry or "")
        metrics.pulls.labels(outcome, host).inc()
        metrics.pull_seconds.observe(time.monotonic() - pull.begun)
        for source, count in pull.sources.items():
            metrics.pull_bytes.labels(source).inc(count)
        metrics.dedup.inc(pull.sources["cache"])
        if outcome == "failed":  # internal errors have the code "failed" too
            code = again(error, 1, 0.0, 0.0).code if isinstance(error, AImageError) else "failed"
            metrics.pull_failures.labels(code, host).inc()
        if isinstance(error, VerificationError):
            metrics.mismatches.inc()


def _next(known: list[SharedTransfer]) -> list[SharedTransfer]:
    """Return the transfers to start now, by urgency, then by priority.

    A registry leaves the last place to another registry that can use it. When all places are taken,
    each registry without a running transfer can use an extra place, by waiting time and not by
    priority. Unresponsive registries therefore never block another one permanently: their transfers
    end by timeouts, and the extra places go to the transfers that have waited longest.
    """
    running = [one for one in known if one.is_begun]
    waiting = [one for one in known if not one.is_begun]
    waiting.sort(key=lambda one: (one.urgency, -one.priority, one.number))
    for left in (1, 0):  # in the second pass no other registry can use the place
        for one in waiting:
            most = _PLACES[one.urgency]
            if one not in running and len(running) < most and _running(one, running) < most - left:
                running.append(one)
    for one in sorted(waiting, key=lambda one: (one.urgency, one.number)):
        most = _PLACES[one.urgency]
        is_due = sum(other.urgency < one.urgency for other in running) < most
        if is_due and len(running) < most + _EXTRA and not _running(one, running):
            running.append(one)
    return [one for one in running if not one.is_begun]


def _running(one: SharedTransfer, running: list[SharedTransfer]) -> int:
    return sum(other.reference.registry == one.reference.registry for other in running)
