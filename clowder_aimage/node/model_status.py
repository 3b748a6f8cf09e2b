"""One model of the desired state: its state, its transfer, and the lease that keeps it."""

from __future__ import annotations

import math
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from clowder_aimage.engine.metric import SOURCES
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lease import FileLease
from clowder_aimage.node.model_event import Action, Event, Signal
from clowder_aimage.node.model_spec import POLICIES, ModelSpec
from clowder_aimage.node.model_state import (
    FAILED,
    PRESENT,
    PULLING,
    WAITING,
    ModelState,
    transition,
)
from clowder_aimage.oci import Digest

_WORDS = {word: name for name, word in POLICIES.items()}


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

    def apply(self, event: Event, now: float, chance: float = 0.0) -> tuple[Action, ...]:
        """Enter the state after ``event``; return the actions to perform."""
        before = self.state
        self.state, actions = transition(before, event, now, chance)
        if (before.phase, before.reason) != (self.state.phase, self.state.reason):
            self.changed = datetime.now(UTC)
        if event in (Signal.RETRIED, Signal.STORE_CHANGED):
            self.version += 1
        return actions

    # -- the lease, which may be taken in one thread and released in another

    def hold(self, store: ImageLayout, digest: Digest) -> None:
        """Lease a manifest, and what it needs. Raises StoreError."""
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
            "pullPolicy": _WORDS[spec.policy],
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
