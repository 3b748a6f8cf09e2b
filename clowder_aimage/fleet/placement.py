"""The suitability of a worker for jobs, by what it has and by the reports of the other workers.

Every worker hears of every job of its fleet, and has the status of all workers. So all have nearly
the same figures, and each of them can tell which one should load a model.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from clowder_aimage.api.model_kind import EMBEDDER, TEXT
from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.fleet.job import choice as job_choice
from clowder_aimage.fleet.store_view import StoreView
from clowder_aimage.fleet.worker_registry import WorkerRegistry

AHEAD = 2  # jobs for pictures of one model: one is served, and one follows it without a pause
LAST = 1000  # jobs that count
BUSY = 0.8  # share of its time that a copy of a model may be at work before another one is needed
_FRESH = 0.5  # seconds after which the statuses are read again, though none has arrived
_WANTED = 1e9  # eviction cost of a model for which a job is on the queue


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
        """Return whether there is room for a job."""
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

    def served(self, digest: str, begun: float) -> None:
        """Count a job that was served here since ``begun``; jobs of a model may follow closely."""
        now = self.clock()
        taken = now - max(begun, self._ended.get(digest, begun))
        self._ended[digest] = now
        self._served[digest] += 1
        self._seconds[digest] = self._seconds.get(digest, 0.0) + taken

    def needed(self, digest: str) -> int:
        """Return how many copies in memory the jobs for a digest keep at work."""
        count = self._served[digest]
        seconds = self._seconds.get(digest, 0.0)
        if not count:  # nothing is known but the mean of other models
            count, seconds = self._served.total(), sum(self._seconds.values())
        if not count or not self._counts[digest]:
            return 1
        rate = self._counts[digest] / max(1.0, self.clock() - self._jobs[0][0])
        return 1 + int(rate * seconds / count / BUSY)

    def eviction_cost(self, digest: str, copies: int) -> float:
        """Return the eviction cost of one of ``copies`` in memory; 0 if the others suffice."""
        return 0.0 if copies > self.needed(digest) else (1 + self._counts[digest]) / copies

    def price(
        self,
        loaded: Collection[str],
        at_work: Collection[str],
        slots: int,
        copies: Mapping[str, int],
    ) -> float | None:
        """Return the cost of what a worker would unload to load a model; None without room.

        ``copies`` counts the copies in memory of the fleet.
        """
        if len(at_work) >= slots:
            return None
        if len({*loaded, *at_work}) < slots:
            return 0.0
        idle = (self.eviction_cost(one, copies.get(one, 1)) for one in loaded if one not in at_work)
        return min(idle, default=None)


@dataclass(frozen=True, slots=True)
class OtherWorkers:
    """The other workers that take jobs, as their statuses said at ``read``.

    ``loaded`` are the ids of those that have a digest in memory, ``copies`` counts those that have
    or load it. ``prices`` are those of the workers that could load it, with their ids.
    """

    read: float
    revision: int
    copies: Counter[str]
    loaded: Mapping[str, list[str]]
    prices: Mapping[str, list[tuple[float, str]]]


class Placement:
    """Knows how well the worker ``place`` is suited among ``workers``."""

    def __init__(
        self,
        service: Service,
        view: StoreView,
        slots: SlotCounter,
        workers: WorkerRegistry,
        place: str,
    ) -> None:
        self._service, self._view, self._slots = service, view, slots
        self._workers, self._place = workers, place
        self.demand = DemandStats()
        self._known = OtherWorkers(0.0, -1, Counter(), {}, {})

    @property
    def loaded(self) -> frozenset[str]:
        """The digests of the models in memory."""
        engine = self._service.engine
        return frozenset(str(one.digest) for one in engine.list_loaded() if one.is_ready)

    def eviction_cost(self, digest: str, *, is_wanted: bool = False) -> float:
        """Return the eviction cost of a model in memory here."""
        copies = self._others().copies[digest] + 1
        return _WANTED if is_wanted else self.demand.eviction_cost(digest, copies)

    def wait(self, digest: str) -> float | None:
        """Return the seconds to wait before asking for a model's jobs; None if there is no room.

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
        others = self._others()
        if at_work or name in self.loaded:
            copies = others.loaded.get(name, ())
            rank = sum(one < self._place for one in copies)
            rank += bool(copies and self._slots.running > at_work)
            return job_choice.claim_delay_loaded(rank)
        return self._load(name, others)

    def lacks_room(self, digest: str) -> bool:
        """Return whether a model that is in the store waits for others to end."""
        name = f"sha256:{digest}"
        return self._slots.is_full and not self._slots.of(name) and name in self._view.kinds

    def _load(self, name: str, others: OtherWorkers) -> float:
        loaded = self.loaded
        copies = others.copies + Counter({*loaded, *self._slots.digests})
        found = self.demand.price(loaded, self._slots.digests, self._slots.slots, copies)
        price = _WANTED if found is None else found
        rank = sum(one < (price, self._place) for one in others.prices.get(name, ()))
        is_elsewhere = others.copies[name] > 0
        return job_choice.claim_delay_stored(rank, is_elsewhere=is_elsewhere, is_missed=price > 0)

    def _fetch(self, name: str) -> float | None:
        if self._service.settings.pull == NEVER:
            return None
        is_there = self._workers.on_disk_elsewhere(name, self._place)
        return job_choice.FETCH_TOO if is_there else job_choice.FETCH

    def _others(self) -> OtherWorkers:
        """Return the other workers, read again when a status has arrived, or after a time."""
        now, known = self.demand.clock(), self._known
        if known.revision != self._workers.revision or now - known.read > _FRESH:
            self._known = known = self._read(now)
        return known

    def _read(self, now: float) -> OtherWorkers:
        statuses = self._workers.others(self._place)
        in_memory = {status.id: {*status.loaded, *status.at_work} for status in statuses}
        own = {*self.loaded, *self._slots.digests}
        copies = Counter(one for found in in_memory.values() for one in found)
        loaded = defaultdict[str, list[str]](list)
        prices = defaultdict[str, list[tuple[float, str]]](list)
        total = copies + Counter(own)
        for status in statuses:
            for digest in status.loaded:
                loaded[digest].append(status.id)
            price = self.demand.price(status.loaded, status.at_work, status.slots, total)
            if price is not None:
                for digest in {*status.models.values()} - in_memory[status.id]:
                    prices[digest].append((price, status.id))
        return OtherWorkers(now, self._workers.revision, copies, loaded, prices)
