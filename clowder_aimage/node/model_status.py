"""One wanted model as the node sees it at this moment."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from clowder_aimage.engine.backoff import TIME, WRONG, Backoff
from clowder_aimage.engine.limits import FOR_EVER
from clowder_aimage.engine.metric import SOURCES
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lease import FileLease
from clowder_aimage.node.model_spec import POLICIES, ModelSpec
from clowder_aimage.oci import Digest, Reference

UNKNOWN, PRESENT, PULLING, WAITING, FAILED = (
    "unknown",
    "present",
    "pulling",
    "waiting",
    "failed",
)
_WORDS = {word: name for name, word in POLICIES.items()}


@dataclass(slots=True)
class ModelStatus:
    """On the node's clock: ``due``: when to look at it in the store next; ``ask_at``: from when on
    the registry may be asked; ``patience``: before when it may not be asked at all, as its failure
    has it; ``whole_at``: when what was wrong is fetched again in full, ``room_at``: when room is
    made again. ``is_here``: in full, when it was looked at last; ``root``: what the registry said
    last; ``name``: what the store calls it."""

    want: ModelSpec
    name: Reference
    state: str = UNKNOWN
    is_here: bool = False
    reason: str | None = None
    digest: Digest | None = None
    drift: Digest | None = None
    root: Digest | None = None
    again: Backoff | None = None
    attempts: int = 0
    due: float = 0.0
    ask_at: float = -math.inf
    patience: float = -math.inf
    whole_at: float = math.inf
    room_at: float = math.inf
    rooms: int = 0  # how often room was made for it since it was here
    room: int = 0  # bytes that are to be free then
    free: int = 0  # bytes that there are to be before one is tried that had no room
    needed: int = 0  # bytes that the last pull was to bring
    has_begun: bool = False  # whether some of them came
    lease: FileLease | None = None  # on the manifest that is ``held`` for it
    held: Digest | None = None
    is_over: bool = False  # nobody wants it any more
    wrong: tuple[Digest, str] | None = None  # what was fetched and is not what it should be: why
    wrongs: int = 0  # how often that was
    changed: datetime = field(default_factory=lambda: datetime.now(UTC))
    transfer: SharedTransfer | None = None
    sources: dict[str, int] = field(default_factory=dict)  # what brought what is here
    forced: int = 0  # how often it was to be looked at anew
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def is_moving(self) -> bool:
        """Whether its tag may come to mean something else that counts."""
        return self.want.digest is None and self.want.refresh != FOR_EVER

    @property
    def next_question(self) -> float:
        """When the registry is asked next; infinite where only something else can bring that."""
        return max(self.patience, min(self.ask_at, self.whole_at))

    @property
    def next_try(self) -> float:
        """When it is tried again; what was wrong and means the same still is when it is fetched."""
        is_wrong = self.again is not None and self.again.code == WRONG and self.wrong is not None
        return self.whole_at if is_wrong else self.next_question

    def turn(self, state: str, reason: str | None = None) -> bool:
        """Enter a state; whether it is another one."""
        is_new = state != self.state
        if is_new or reason != self.reason:
            self.changed = datetime.now(UTC)
        self.state, self.reason = state, reason
        return is_new

    def rest(self, now: float, longest: float) -> None:
        """Look at the store again after ``longest`` seconds, or when the registry may be asked."""
        self.due = max(now, min(now + longest, self.next_question))

    def wait(self, now: float, delay: float, *, is_here: bool) -> None:
        """Let the registry alone after a failure, for ``delay`` seconds from its answer on."""
        after = self.again.after if self.again else TIME
        is_followed = is_here and not math.isfinite(delay)  # it is asked as ever
        self.ask_at = now + (self.want.refresh if is_followed else delay)
        if after == TIME:
            self.patience = self.ask_at
        if self.wrong is not None and self.again is not None and self.again.code != WRONG:
            self.whole_at = max(self.whole_at, self.ask_at)

    def look_anew(self) -> None:
        """Look for all of its blobs in the store, and soon; also where a look is under way."""
        self.due = 0.0
        self.forced += 1

    def begin_anew(self) -> None:
        """Look at it now, whatever was: something has changed."""
        self.look_anew()
        self.attempts, self.again = 0, None
        self.ask_at = self.patience = -math.inf
        self.rooms, self.room_at = 0, math.inf
        self.forgive()

    def forgive(self) -> None:
        """What was wrong counts no more."""
        self.wrong, self.wrongs, self.whole_at = None, 0, math.inf

    def lose(self) -> None:
        """What was here is gone: it may be fetched at once, unless the registry is to be left
        alone."""
        self.ask_at, self.root, self.sources = self.patience, None, {}
        if self.again is not None and self.again.after != TIME:
            self.again = None
        self.turn(WAITING, self.reason if self.again else None)

    # -- the lease. It may be taken in one thread and let go of in another.

    def hold(self, store: ImageLayout, digest: Digest) -> None:
        """Let nobody remove a manifest, and what it needs. Raises StoreError."""
        if self.held == digest:
            return
        lease: FileLease | None = store.lease(
            digest
        )  # which may wait for a collection: nobody waits for us here
        with self._lock:
            if not self.is_over:
                lease, self.lease, self.held = self.lease, lease, digest
        if lease is not None:
            lease.close()

    def end(self) -> None:
        """Nobody wants it any more: whatever is still at it must hold nothing. Writes to the disk,
        and may be called in any thread."""
        with self._lock:
            self.is_over = True
            lease, self.lease, self.held = self.lease, None, None
        if lease is not None:
            lease.close()

    @property
    def is_troubled(self) -> bool:
        """Whether something is wrong with it that time alone does not mend, though an older
        version may be here."""
        if self.again is None:
            return False
        return self.state == FAILED or (self.state == PRESENT and self.again.after != TIME)

    def to_json(self, now: float) -> dict[str, Any]:
        """As the node's status says it; ``now`` on the node's clock."""
        transfer, want = self.transfer, self.want
        is_pulling = self.state == PULLING and transfer is not None
        is_queued = is_pulling and transfer is not None and transfer.is_queued
        wait = self.next_try - now  # it is looked at in the store more often
        is_known = self.again is not None and self.state in (WAITING, FAILED, PRESENT)
        is_waiting = is_known and math.isfinite(wait)
        sources = transfer.sources if transfer is not None else self.sources
        return {
            "ref": want.name,
            "digest": str(self.digest) if self.digest else None,
            "origin": want.origin,
            "priority": want.priority,
            "pin": want.pin,
            "pullPolicy": _WORDS[want.policy],
            "refresh": want.refresh if self.is_moving else None,
            "state": WAITING if is_queued else self.state,
            "reason": "other pulls come first" if is_queued else self.reason,
            "code": self.again.code if self.again and is_known else None,
            "next": _iso(wait) if is_waiting else None,
            "completed": transfer.completed if is_pulling and transfer else 0,
            "total": transfer.total if is_pulling and transfer else 0,
            "rate": round(transfer.rate) if is_pulling and transfer else 0,
            "sources": {key: sources.get(key, 0) for key in SOURCES},
            "changed": self.changed.isoformat(timespec="seconds"),
            "drift": str(self.drift) if self.drift else None,
        }


def _iso(seconds: float) -> str:
    at = datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))
    return at.isoformat(timespec="seconds")
