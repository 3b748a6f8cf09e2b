"""One model of the desired state: its state, the actions for it, and the lease that keeps it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.backoff import SPACE, TIME, WRONG, Backoff
from clowder_aimage.engine.metric import SOURCES
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lease import FileLease
from clowder_aimage.node.model_spec import POLICY_NAMES, ModelSpec
from clowder_aimage.oci import Descriptor, Digest, Reference

UNKNOWN, PRESENT, PULLING, WAITING, FAILED = "unknown", "present", "pulling", "waiting", "failed"


@dataclass(frozen=True, slots=True)
class Suspect:
    """Content that failed verification ``count`` times in a row.

    ``root`` is the digest that the tag meant; from ``retry_at`` on it is fetched again, although
    the tag has not moved.
    """

    root: Digest
    reason: str
    count: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """A lack of space: with ``free`` bytes the pull is tried again, ``room`` bytes are evicted for.

    From ``evict_at`` on it may be tried to evict again; ``evictions`` were made so far.
    """

    free: int
    room: int
    evictions: int = 0
    evict_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class ModelState:
    """Everything that decides what happens to a model next.

    ``name`` is its reference in the store, ``manifest`` its meaning there, and ``is_here`` whether
    the store has all of it. ``root`` is the digest of the registry's last answer; ``drift`` is the
    manifest that the tag means in the registry where that is another one. The store is read at
    ``due``. The registry may be asked from ``check_at`` on, and never before ``not_before``, as
    after a failure.
    """

    spec: ModelSpec
    name: Reference
    phase: str = UNKNOWN
    reason: str | None = None
    is_here: bool = False
    manifest: Descriptor | None = None
    root: Digest | None = None
    drift: Digest | None = None
    failure: Backoff | None = None
    attempts: int = 0
    due: float = 0.0
    check_at: float = -math.inf
    not_before: float = -math.inf
    suspect: Suspect | None = None
    shortage: Shortage | None = None
    sources: Mapping[str, int] = field(default_factory=dict)  # bytes of the last pull

    @property
    def digest(self) -> Digest | None:
        return self.manifest.digest if self.manifest else None

    @property
    def is_followed(self) -> bool:
        """Return whether the registry is asked about the tag of a model that is here."""
        return self.spec.is_moving and self.spec.policy != NEVER

    @property
    def is_short(self) -> bool:
        """Return whether the last pull failed for lack of space."""
        return self.failure is not None and self.failure.after == SPACE

    @property
    def is_troubled(self) -> bool:
        """Return whether a failure stays until something changes; an older version may be here."""
        if self.failure is None:
            return False
        return self.phase == FAILED or (self.phase == PRESENT and self.failure.after != TIME)

    @property
    def next_check(self) -> float:
        """The time of the next check; infinite where it takes a change, or space."""
        retry_at = self.suspect.retry_at if self.suspect else math.inf
        return max(self.not_before, min(self.check_at, retry_at))

    @property
    def next_try(self) -> float:
        """The time of the next pull; of a suspect whose tag has not moved: of its retry."""
        is_wrong = self.failure is not None and self.failure.code == WRONG
        return self.suspect.retry_at if is_wrong and self.suspect else self.next_check


class Work(Enum):
    """Actions without parameters."""

    KEEP = "record, lease and pin the model in the store"
    MEASURE = "measure the free space of the store's file system"
    PULL = "pull the model"


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish an event of the node."""

    kind: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """Ask the registry what the tag means, on condition that it is not ``known``."""

    known: Digest | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict other models until ``room`` bytes are free."""

    room: int


Action = Work | Announce | Check | Evict
Step = tuple[ModelState, tuple[Action, ...]]
Event = Callable[[ModelState, float], Step]
"""What happened, as the function to the next state and the actions; the float is the time."""


class ModelStatus:
    """The state of a model, changed by events alone and on the event loop alone."""

    def __init__(self, spec: ModelSpec) -> None:
        self.state = ModelState(spec, spec.reference)
        self.changed = datetime.now(UTC)
        self.transfer: SharedTransfer | None = None
        self.version = 0  # changes when the store is to be read anew
        self._lease: FileLease | None = None
        self._leased: Digest | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def spec(self) -> ModelSpec:
        return self.state.spec

    def apply(self, event: Event, now: float) -> tuple[Action, ...]:
        """Enter the state after ``event``; return the actions to perform."""
        before = self.state
        self.state, actions = event(before, now)
        if (before.phase, before.reason) != (self.state.phase, self.state.reason):
            self.changed = datetime.now(UTC)
        return actions

    def hold(self, store: ImageLayout, digest: Digest) -> None:
        """Lease a manifest, and what it needs. Raises StoreError.

        Another thread may close the lease meanwhile.
        """
        if self._leased == digest:
            return
        lease: FileLease | None = store.lease(digest)  # may wait for a collection: not locked
        with self._lock:
            if not self._is_closed:
                lease, self._lease, self._leased = self._lease, lease, digest
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Release the lease for good. Writes to the disk; any thread may call it."""
        with self._lock:
            self._is_closed = True
            lease, self._lease, self._leased = self._lease, None, None
        if lease is not None:
            lease.close()

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the model as the node's API has it; ``now`` is on the node's clock."""
        state, spec = self.state, self.spec
        transfer = self.transfer if state.phase == PULLING else None
        is_queued = transfer is not None and transfer.is_queued
        failure = state.failure if state.phase in (WAITING, FAILED, PRESENT) else None
        wait = state.next_try - now  # the store is read more often
        sources = self.transfer.sources if self.transfer is not None else state.sources
        return {
            "ref": spec.name,
            "digest": str(state.digest) if state.digest else None,
            "origin": spec.origin,
            "priority": spec.priority,
            "pin": spec.pin,
            "pullPolicy": POLICY_NAMES[spec.policy],
            "refresh": spec.refresh if spec.is_moving else None,
            "state": WAITING if is_queued else state.phase,
            "reason": "other pulls come first" if is_queued else state.reason,
            "code": failure.code if failure else None,
            "next": _after(wait) if failure and math.isfinite(wait) else None,
            "completed": transfer.completed if transfer else 0,
            "total": transfer.total if transfer else 0,
            "rate": round(transfer.rate) if transfer else 0,
            "sources": {key: sources.get(key, 0) for key in SOURCES},
            "changed": self.changed.isoformat(timespec="seconds"),
            "drift": str(state.drift) if state.drift else None,
        }


def _after(seconds: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))
    return at.isoformat(timespec="seconds")
