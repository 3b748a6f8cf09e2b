"""The suitability of a worker for jobs, by its models and by the status of the other workers.

Every worker receives the announcement of every job of its fleet, and the status of all workers. So
all have nearly the same figures, and each can compute the worker that should load a model.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from clowder_aimage.api.model_kind import EMBEDDER, TEXT
from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.fleet.job import choice as job_choice
from clowder_aimage.fleet.store_view import StoreView
from clowder_aimage.fleet.worker_registry import WorkerRegistry

# Jobs for pictures of one model: one is served, and one follows it without a pause.
AHEAD = 2
# The last jobs of the fleet that are counted.
LAST = 1000
# Share of its time that a copy of a model may be at work before another one is needed.
BUSY = 0.8
# Seconds after which the statuses are read again, though none has arrived.
_FRESH = 0.5
# Eviction cost of a model for which a job is on the queue.
_WANTED = 1e9


class SlotCounter:
    """Counts jobs by digest. A model at work takes a slot; texts of one model share it."""

    def __init__(self, slots: int, parallel: int) -> None:
        self.slots, self._parallel = slots, parallel
        self._jobs: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """The number of jobs."""
        return self._jobs.total()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the models at work."""
        return tuple(self._jobs)

    def of(self, digest: str) -> int:
        """Return the number of jobs for a digest."""
        return self._jobs[digest]

    @property
    def is_full(self) -> bool:
        """True if other models than those at work have no room."""
        return len(self._jobs) >= self.slots

    def has(self, digest: str, *, is_text: bool) -> bool:
        """Return True if a job for a digest has a slot."""
        if digest in self._jobs:
            return self._jobs[digest] < (self._parallel if is_text else AHEAD)
        return not self.is_full

    def take(self, digest: str) -> None:
        """Count a job."""
        self._jobs[digest] += 1

    def leave(self, digest: str) -> None:
        """Count a job as ended."""
        self._jobs[digest] -= 1
        if not self._jobs[digest]:
            del self._jobs[digest]


@dataclass(slots=True)
class DemandStats:
    """The last jobs of a fleet by digest, and the seconds that jobs take here."""

    clock: Callable[[], float] = time.monotonic
    _jobs: deque[tuple[float, str]] = field(default_factory=deque)
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)
    _served: Counter[str] = field(default_factory=Counter)
    _ended: dict[str, float] = field(default_factory=dict)

    def record(self, digest: str) -> None:
        """Count a job of the fleet."""
        self._jobs.append((self.clock(), digest))
        self._counts[digest] += 1
        if len(self._jobs) > LAST:
            self._counts[self._jobs.popleft()[1]] -= 1

    def record_end(self, digest: str, start: float) -> None:
        """Count a job that was served here since ``start``; jobs of a model may follow closely."""
        end = self.clock()
        duration = end - max(start, self._ended.get(digest, start))
        self._ended[digest] = end
        self._served[digest] += 1
        self._seconds[digest] = self._seconds.get(digest, 0.0) + duration

    def count_needed(self, digest: str) -> int:
        """Return the number of copies in memory that the jobs for a digest keep busy."""
        count = self._served[digest]
        seconds = self._seconds.get(digest, 0.0)
        # Nothing is known but the mean of other models.
        if not count:
            count, seconds = self._served.total(), sum(self._seconds.values())
        if not count or not self._counts[digest]:
            return 1
        rate = self._counts[digest] / max(1.0, self.clock() - self._jobs[0][0])
        return 1 + int(rate * seconds / count / BUSY)

    def estimate_eviction_cost(self, digest: str, copies: int) -> float:
        """Return the eviction cost of one of ``copies`` in memory; 0 if the others suffice."""
        return 0.0 if copies > self.count_needed(digest) else (1 + self._counts[digest]) / copies

    def estimate_unload_cost(
        self,
        loaded: Collection[str],
        at_work: Collection[str],
        slots: int,
        copies: Mapping[str, int],
        *,
        has_room: bool,
    ) -> float | None:
        """Return the cost of the model that a worker would unload for another; None if busy.

        ``copies`` counts the copies in memory of the fleet. ``has_room``: the memory has room for
        it beside the others.
        """
        if len(at_work) >= slots:
            return None
        if has_room or not loaded:
            return 0.0
        idle = (
            self.estimate_eviction_cost(digest, copies.get(digest, 1))
            for digest in loaded
            if digest not in at_work
        )
        return min(idle, default=None)


@dataclass(frozen=True, slots=True)
class OtherWorkers:
    """The other workers that take jobs, as their statuses said at ``read``.

    ``loaded`` are the ids of those that have a digest in memory, ``copies`` counts those that have
    or load it. ``prices`` are those of the workers that could load it, with their ids.
    ``room`` are the bytes that this worker had for a further model.
    """

    read: float
    revision: int
    copies: Counter[str]
    loaded: Mapping[str, list[str]]
    prices: Mapping[str, list[tuple[float, str]]]
    room: int | None = None


class Placement:
    """The suitability of ``worker`` among ``workers``."""

    def __init__(
        self,
        service: Service,
        view: StoreView,
        slots: SlotCounter,
        workers: WorkerRegistry,
        worker: str,
    ) -> None:
        self._service, self._view, self._slots = service, view, slots
        self._workers, self._worker = workers, worker
        self.demand = DemandStats()
        self._read_others = OtherWorkers(0.0, -1, Counter(), {}, {})

    @property
    def loaded(self) -> frozenset[str]:
        """The digests of the models in memory."""
        models = self._service.engine.list_loaded()
        return frozenset(
            str(digest) for model in models if model.is_ready for digest in model.variants
        )

    def _has_room(self, digest: str, room: int | None) -> bool:
        """Return True if a model of this store fits into the memory that a worker has left."""
        return room is None or self._view.needs.get(digest, 0) <= room

    def estimate_eviction_cost(self, digest: str, *, is_wanted: bool = False) -> float:
        """Return the eviction cost of a model in memory here."""
        copies = self._get_others().copies[digest] + 1
        return _WANTED if is_wanted else self.demand.estimate_eviction_cost(digest, copies)

    def wait(self, digest: str) -> float | None:
        """Return the seconds to wait before asking for a model's jobs; None without a free slot.

        ``digest`` is its hexadecimal part.
        """
        name = f"sha256:{digest}"
        kind = self._view.kinds.get(name)
        is_text = kind in (TEXT, EMBEDDER)
        if not self._slots.has(name, is_text=is_text):
            return None
        if kind is None:
            return self._fetch(name)
        at_work = self._slots.of(name)
        if at_work and not is_text:
            return job_choice.FOLLOW
        other_workers = self._get_others()
        if at_work or name in self.loaded:
            copies = other_workers.loaded.get(name, ())
            rank = sum(worker < self._worker for worker in copies)
            rank += bool(copies and self._slots.running > at_work)
            return job_choice.claim_delay_loaded(rank)
        return self._load(name, other_workers)

    def lacks_room(self, digest: str) -> bool:
        """Return True if a model in the store waits for a slot."""
        name = f"sha256:{digest}"
        return self._slots.is_full and not self._slots.of(name) and name in self._view.kinds

    def _load(self, name: str, other_workers: OtherWorkers) -> float:
        loaded = self.loaded
        copies = other_workers.copies + Counter({*loaded, *self._slots.digests})
        cost = self.demand.estimate_unload_cost(
            loaded,
            self._slots.digests,
            self._slots.slots,
            copies,
            has_room=self._has_room(name, other_workers.room),
        )
        price = _WANTED if cost is None else cost
        rank = sum(
            other_price < (price, self._worker)
            for other_price in other_workers.prices.get(name, ())
        )
        is_elsewhere = other_workers.copies[name] > 0
        return job_choice.claim_delay_stored(
            rank, is_elsewhere=is_elsewhere, evicts_last_copy=price > 0
        )

    def _fetch(self, name: str) -> float | None:
        if self._service.settings.pull == NEVER:
            return None
        is_there = self._workers.on_disk_elsewhere(name, self._worker)
        return job_choice.FETCH_TOO if is_there else job_choice.FETCH

    def _get_others(self) -> OtherWorkers:
        """Return the other workers, read again when a status has arrived, or after a time."""
        timestamp, last_read = self.demand.clock(), self._read_others
        if last_read.revision != self._workers.revision or timestamp - last_read.read > _FRESH:
            self._read_others = last_read = self._read(timestamp)
        return last_read

    def _read(self, timestamp: float) -> OtherWorkers:
        statuses = self._workers.list_others(self._worker)
        in_memory = {status.id: {*status.loaded, *status.at_work} for status in statuses}
        local = {*self.loaded, *self._slots.digests}
        copies = Counter(copy for digests in in_memory.values() for copy in digests)
        loaded = defaultdict[str, list[str]](list)
        prices = defaultdict[str, list[tuple[float, str]]](list)
        total = copies + Counter(local)
        for status in statuses:
            for digest in status.loaded:
                loaded[digest].append(status.id)
            estimate = partial(
                self.demand.estimate_unload_cost,
                status.loaded,
                status.at_work,
                status.slots,
                total,
            )
            costs = {has_room: estimate(has_room=has_room) for has_room in (False, True)}
            for digest in {*status.models.values()} - in_memory[status.id]:
                price = costs[self._has_room(digest, status.room)]
                if price is not None:
                    prices[digest].append((price, status.id))
        room = self._service.engine.room
        return OtherWorkers(timestamp, self._workers.revision, copies, loaded, prices, room)
