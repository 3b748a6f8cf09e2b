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
from clowder_aimage.engine.admission import BusyError, shutdown_error
from clowder_aimage.engine.backoff import compute_backoff
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

# Interactive transfers per registry: each has its own threads
MAX_TRANSFERS = 32
# In total: an unresponsive registry cannot use them all
_MAX_ALL = 2 * MAX_TRANSFERS
# Urgencies
INTERACTIVE, DESIRED, PREFETCH = range(3)
URGENCIES = ("interactive", "desired", "prefetch")
# Slots by urgency: a transfer begins while fewer are running
_SLOTS = (8, 4, 2)
# Additional slots for registries without a running transfer
_EXTRA_SLOTS = 4
# Seconds without a byte that count as a stall
STALL = 15.0
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
        self._transfers: dict[_Key, SharedTransfer] = {}
        self._numbers = itertools.count()
        self._settle = settle

    def find_pull(self, reference: Reference) -> SharedTransfer | None:
        """Return the queued or running pull of ``reference``, if any."""
        return next(
            (transfer for transfer in self.list_pulls() if transfer.reference == reference), None
        )

    def list_pulls(self) -> list[SharedTransfer]:
        """Return all queued or running pulls."""
        # A copy, as it is called from other threads too
        transfers = list(self._transfers.values())
        return [
            transfer for transfer in transfers if transfer.kind == PULL and not transfer.is_stopped
        ]

    def close(self) -> None:
        """Refuse new transfers and stop the others; partial content is kept."""
        self.is_over = True
        for transfer in list(self._transfers.values()):
            transfer.stop(is_now=True)

    def count_stalls(self) -> None:
        """Count stalled pulls; call this periodically."""
        timestamp = time.monotonic()
        for transfer in self.list_pulls():
            if (
                transfer.is_begun
                and not transfer.is_stalled
                and timestamp - transfer.progressed > STALL
            ):
                transfer.is_stalled = True
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

        With ``is_early`` a new pull fetches blobs in the order of their use during a load. A pull
        is shared only between users with the same credentials. Raises StoppedError, BusyError, and
        UsageError if the reference has no registry.
        """
        if reference.registry is None:
            hint = f"use a name with one, such as registry.example.com/team/{reference}"
            raise UsageError(f"cannot pull {reference}: the name has no registry", hint=hint)
        connection = self.connection
        if credentials is not None:
            connection = replace(connection, auths={reference.name: dict([credentials.entry])})

        def run_pull(transfer: SharedTransfer, on_event: OnEvent) -> Descriptor:
            gate, limit = TransferGate(transfer), connection.limit(reference.registry)
            rate = Rate(limit) if limit else None

            def wrap_source(source: Source) -> Source:
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
                wrap=wrap_source,
                begin=transfer.record_aimage if is_early else None,
            )
            return pull(reference, self._store, connection, options).root

        key = (PULL, str(reference), (credentials, components))
        with self._join(key, reference, run_pull, urgency, priority) as shared:
            yield shared

    @contextlib.contextmanager
    def push(self, reference: Reference) -> Iterator[SharedTransfer]:
        """Join or begin the push of ``reference``. Raises as ``pull``."""
        with self._join(
            (PUSH, str(reference), None),
            reference,
            lambda _, on_event: push(self._store, reference, self.connection, on_event=on_event),
        ) as transfer:
            yield transfer

    @contextlib.contextmanager
    def _join(
        self,
        key: _Key,
        reference: Reference,
        work: Work,
        urgency: int = INTERACTIVE,
        priority: int = 0,
    ) -> Iterator[SharedTransfer]:
        transfer = self._transfers.get(key)
        if self.is_over:
            raise shutdown_error()
        if transfer is None or transfer.is_stopped:
            if urgency == INTERACTIVE:
                self._check_limits(reference)
            transfer = SharedTransfer(key[0], reference, work, lambda: self.is_over)
            transfer.urgency, transfer.priority = urgency, priority
            transfer.number = next(self._numbers)
            self._transfers[key] = transfer
            transfer.result.add_done_callback(lambda _: self._finish(key, transfer))
        transfer.urgency = min(transfer.urgency, urgency)
        transfer.priority = max(transfer.priority, priority)
        with transfer.using():
            if urgency == INTERACTIVE:
                self._start_next()
            else:
                asyncio.get_running_loop().call_later(self._settle, self._start_next)
            yield transfer

    def _check_limits(self, reference: Reference) -> None:
        interactive = [
            transfer for transfer in self._transfers.values() if transfer.urgency == INTERACTIVE
        ]
        of_registry = sum(
            transfer.reference.registry == reference.registry for transfer in interactive
        )
        if of_registry >= MAX_TRANSFERS or len(interactive) >= _MAX_ALL:
            raise BusyError(len(interactive), 5)

    def _start_next(self) -> None:
        open_transfers = [
            transfer for transfer in self._transfers.values() if not transfer.result.done()
        ]
        for transfer in _select_next(open_transfers):
            transfer.start()
        waiting = Counter(
            transfer.urgency
            for transfer in open_transfers
            if not transfer.is_begun and transfer.kind == PULL
        )
        for urgency, name in enumerate(URGENCIES):
            self._metrics.pull_queue.labels(name).set(waiting[urgency])
        pulls = sum(transfer.is_begun for transfer in open_transfers if transfer.kind == PULL)
        self._metrics.pull_inflight.set(pulls)

    def _finish(self, key: _Key, transfer: SharedTransfer) -> None:
        if self._transfers.get(key) is transfer:
            del self._transfers[key]
        error = transfer.result.exception()
        outcome = "done" if error is None else "stopped" if transfer.is_stopped else "failed"
        facts: dict[str, Any] = {"reference": str(transfer.reference), "outcome": outcome}
        if transfer.kind == PULL and transfer.is_begun:
            self._count(transfer, outcome, error)
            fetched = {name: count for name, count in transfer.sources.items() if name != "cache"}
            facts |= {"seconds": round(time.monotonic() - transfer.started, 3), "bytes": fetched}
        if isinstance(error, AImageError) and outcome == "failed":
            facts["reason"] = error.message
        self._events.record(transfer.kind, **facts)
        self._start_next()

    def _count(self, pull: SharedTransfer, outcome: str, error: BaseException | None) -> None:
        metrics, host = self._metrics, self._metrics.host(pull.reference.registry or "")
        metrics.pulls.labels(outcome, host).inc()
        metrics.pull_seconds.observe(time.monotonic() - pull.started)
        for source, count in pull.sources.items():
            metrics.pull_bytes.labels(source).inc(count)
        metrics.dedup.inc(pull.sources["cache"])
        # Internal errors have the code "failed" too
        if outcome == "failed":
            code = (
                compute_backoff(error, 1, 0.0, 0.0).code
                if isinstance(error, AImageError)
                else "failed"
            )
            metrics.pull_failures.labels(code, host).inc()
        if isinstance(error, VerificationError):
            metrics.mismatches.inc()


def _select_next(transfers: list[SharedTransfer]) -> list[SharedTransfer]:
    """Return the transfers to start now, by urgency, then by priority.

    The last slot is reserved for another registry that can use it. When all slots are occupied,
    each registry without a running transfer can use an extra slot, by waiting time and not by
    priority. Unresponsive registries therefore never block another one permanently: their transfers
    end by timeouts, and the extra slots go to the transfers that have waited longest.
    """
    running = [transfer for transfer in transfers if transfer.is_begun]
    waiting = [transfer for transfer in transfers if not transfer.is_begun]
    waiting.sort(key=lambda transfer: (transfer.urgency, -transfer.priority, transfer.number))
    # In the second pass no other registry can use the reserved slot
    for reserved in (1, 0):
        for transfer in waiting:
            limit = _SLOTS[transfer.urgency]
            if (
                transfer not in running
                and len(running) < limit
                and _count_of_registry(transfer, running) < limit - reserved
            ):
                running.append(transfer)
    for transfer in sorted(waiting, key=lambda transfer: (transfer.urgency, transfer.number)):
        limit = _SLOTS[transfer.urgency]
        is_due = sum(started.urgency < transfer.urgency for started in running) < limit
        if (
            is_due
            and len(running) < limit + _EXTRA_SLOTS
            and not _count_of_registry(transfer, running)
        ):
            running.append(transfer)
    return [transfer for transfer in running if not transfer.is_begun]


def _count_of_registry(transfer: SharedTransfer, running: list[SharedTransfer]) -> int:
    return sum(started.reference.registry == transfer.reference.registry for started in running)
