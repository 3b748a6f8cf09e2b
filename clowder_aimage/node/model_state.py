"""The state of a model in the desired state, its actions, and its lease."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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

    ``root`` is the resolved digest of the tag. It is fetched again from ``retry_at`` on, even
    if the tag has not moved.
    """

    root: Digest
    reason: str
    count: int
    retry_at: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """A lack of space: the pull needs ``free`` free bytes; evict ``room`` bytes.

    Eviction may be retried from ``evict_at`` on; ``evictions`` counts the attempts so far.
    ``reason`` is the error of the pull. Until ``wait_until``, bytes become free without a change.
    A pull that has begun may not wait for young blobs: they are its own.
    """

    free: int
    room: int
    evictions: int = 0
    evict_at: float = -math.inf
    reason: str = ""
    has_begun: bool = False
    wait_until: float = -math.inf


@dataclass(frozen=True, slots=True)
class ModelState:
    """The complete input of the transitions of a model.

    ``name`` is its reference in the store, ``manifest`` the descriptor stored under it, and
    ``is_here`` is true if the store has all of its content. ``root`` is the digest in the
    registry's last response; ``drift`` is the manifest of the registry's tag if it differs. The
    store is read at ``due``. The registry is not queried before ``check_at``, nor, after a failure,
    before ``not_before``.
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
    # Bytes of the last pull by source.
    sources: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> Digest | None:
        return self.manifest.digest if self.manifest else None

    @property
    def is_followed(self) -> bool:
        """Return True if the tag is checked in the registry once the model is present."""
        return self.spec.is_moving and self.spec.policy != NEVER

    @property
    def is_short(self) -> bool:
        """Return True if the last pull failed for lack of space."""
        return self.failure is not None and self.failure.after == SPACE

    @property
    def is_troubled(self) -> bool:
        """Return True if a failure lasts until a change; an older version may be present."""
        if self.failure is None:
            return False
        return self.phase == FAILED or (self.phase == PRESENT and self.failure.after != TIME)

    @property
    def next_check(self) -> float:
        """The time of the next check; infinite if it depends on a change or on free space."""
        retry_at = self.suspect.retry_at if self.suspect else math.inf
        return max(self.not_before, min(self.check_at, retry_at))

    @property
    def next_try(self) -> float:
        """The time of the next pull; for a suspect whose tag has not moved, that of its retry."""
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
    """Resolve the tag in the registry unless it still points to ``known``."""

    known: Digest | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict other models until ``room`` bytes are free, or become free if that ``may_wait``."""

    room: int
    may_wait: bool = True


Action = Work | Announce | Check | Evict
Step = tuple[ModelState, tuple[Action, ...]]
Event = Callable[[ModelState, float], Step]
"""A function from the state and the time to the next state and the actions."""


class ModelStatus:
    """The state of a model, changed only by events and only on the event loop."""

    def __init__(self, spec: ModelSpec) -> None:
        self.state = ModelState(spec, spec.reference)
        self.changed = datetime.now(UTC)
        self.transfer: SharedTransfer | None = None
        # Keeps the transfer of a cancelled task for the next one.
        self.handover = ExitStack()
        # Incremented when the store must be read again.
        self.version = 0
        self._lease: FileLease | None = None
        self._leased: Digest | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def spec(self) -> ModelSpec:
        return self.state.spec

    def apply(self, event: Event, time: float) -> tuple[Action, ...]:
        """Apply ``event`` and return the actions to perform."""
        before = self.state
        self.state, actions = event(before, time)
        if (before.phase, before.reason) != (self.state.phase, self.state.reason):
            self.changed = datetime.now(UTC)
        return actions

    def hold(self, store: ImageLayout, digest: Digest) -> None:
        """Lease a manifest and the blobs it references. Raises StoreError.

        Another thread may close the lease concurrently.
        """
        if self._leased == digest:
            return
        # Outside the lock: may wait for gc.
        lease: FileLease | None = store.lease(digest)
        with self._lock:
            if not self._is_closed:
                lease, self._lease, self._leased = self._lease, lease, digest
        if lease is not None:
            lease.close()

    def holds(self, digest: Digest) -> bool:
        """Return True if a manifest is leased."""
        return self._leased == digest

    def close(self) -> None:
        """Release the lease permanently. Writes to the disk; safe to call from any thread."""
        with self._lock:
            self._is_closed = True
            lease, self._lease, self._leased = self._lease, None, None
        if lease is not None:
            lease.close()

    def to_json(self, time: float) -> dict[str, Any]:
        """Return the model in the form of the node's API; ``time`` is on the node's clock."""
        state, spec = self.state, self.spec
        transfer = self.transfer if state.phase == PULLING else None
        is_queued = transfer is not None and transfer.is_queued
        failure = state.failure if state.phase in (WAITING, FAILED, PRESENT) else None
        # The store is read more often than this.
        wait = state.next_try - time
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
            "reason": "queued behind other pulls" if is_queued else state.reason,
            "code": failure.code if failure else None,
            "next": _format_time_after(wait) if failure and math.isfinite(wait) else None,
            "completed": transfer.completed if transfer else 0,
            "total": transfer.total if transfer else 0,
            "rate": round(transfer.rate) if transfer else 0,
            "sources": {key: sources.get(key, 0) for key in SOURCES},
            "changed": self.changed.isoformat(timespec="seconds"),
            "drift": str(state.drift) if state.drift else None,
        }


def _format_time_after(seconds: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))
    return at.isoformat(timespec="seconds")
