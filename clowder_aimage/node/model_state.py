"""The state machine of one model on a node. Pure: no clock, no I/O, no randomness.

``transition`` takes a state and an event and returns the next state and the actions to perform.
Check, MEASURE and PULL come last and have an outcome, which is the next event: Checked, Measured
or Pulled, or else Failed, Stopped or POSTPONED. Times are seconds on the node's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clowder_aimage.content.fetch import RESERVE
from clowder_aimage.engine.backoff import (
    CHANGE,
    NEVER_FETCHED,
    SPACE,
    STORE,
    TIME,
    WRONG,
    Backoff,
    again,
    whole,
)
from clowder_aimage.engine.limits import ALWAYS, NEVER
from clowder_aimage.errors import NoSpaceError, StoreError, VerificationError
from clowder_aimage.node.model_event import (
    Action,
    Announce,
    Check,
    Checked,
    Event,
    Evict,
    Failed,
    Measured,
    Pulled,
    Signal,
    Specified,
    Stopped,
    StoreRead,
    StoreUnreadable,
    Work,
)
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.oci import Descriptor, Digest, Reference

UNKNOWN, PRESENT, PULLING, WAITING, FAILED = (
    "unknown",
    "present",
    "pulling",
    "waiting",
    "failed",
)
LOOK = 10.0  # seconds between two reads of the store
MAX_EVICT = 60.0  # seconds, at most, between two evictions for the same model
STEP = 1024 * 1024  # bytes more, before a pull that had no space at all is tried again
CRASH = 30.0  # seconds after an error in the node itself
STOP = 1.0  # seconds after a transfer was stopped


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


Step = tuple[ModelState, tuple[Action, ...]]


def transition(state: ModelState, event: Event, now: float, chance: float = 0.0) -> Step:
    """Return the state after ``event`` and the actions to perform.

    ``chance``, in [0, 1), is the random part of pauses.
    """
    if isinstance(event, StoreRead):
        return _on_read(state, event, now)
    if isinstance(event, Checked):
        return (_on_check_here if state.is_here else _on_check_missing)(state, event, now)
    if isinstance(event, Measured):
        return _on_measured(state, event, now)
    if isinstance(event, Pulled):
        return _on_pulled(state, event, now, chance)
    if isinstance(event, Failed):
        return _on_failed(state, event, now, chance)
    return _interrupt(state, event, now), ()


def _interrupt(state: ModelState, event: Event, now: float) -> ModelState:
    """Return the state after an event that needs no action now."""
    match event:
        case StoreUnreadable():
            failure = Backoff(STORE, TIME, LOOK)
            state = replace(state, is_here=False, failure=failure, root=None)
            state = replace(state, phase=WAITING, reason=event.reason)
            return replace(state, check_at=now + LOOK, due=now + LOOK)
        case Stopped():
            phase = PRESENT if state.is_here else WAITING
            return replace(state, phase=phase, reason=event.reason, due=now + STOP)
        case Specified() if event.spec == state.spec:
            return replace(state, spec=event.spec)  # its origin may be another file
        case Specified():
            return _anew(replace(state, spec=event.spec))
        case Signal.RETRIED:
            return _anew(state)
        case Signal.STORE_CHANGED:
            return replace(state, due=0.0)
        case Signal.CRASHED:
            return replace(state, phase=FAILED, reason=event.value, due=now + CRASH)
        case _:
            return replace(state, due=now)  # postponed: the store may have changed meanwhile


def _anew(state: ModelState) -> ModelState:
    """Forget all failures."""
    return replace(
        state,
        attempts=0,
        failure=None,
        due=0.0,
        check_at=-math.inf,
        not_before=-math.inf,
        suspect=None,
        shortage=None,
    )


# -- the store


def _on_read(state: ModelState, event: StoreRead, now: float) -> Step:
    state = replace(state, name=event.name, manifest=event.manifest, is_here=event.is_complete)
    if not event.is_complete:
        return _on_missing(state, now)
    state, actions = _present(state, now)
    if not state.is_followed:
        return state, actions
    if now >= state.next_check:
        return state, (*actions, Check(state.root or state.digest))
    if state.is_short and state.drift is not None:
        return state, (*actions, Work.MEASURE)
    return state, actions


def _present(state: ModelState, now: float) -> Step:
    spec = state.spec
    if state.phase != PRESENT:
        check_at = min(state.check_at, now + spec.refresh)
        state = replace(state, attempts=0, failure=None, root=None, shortage=None, reason=None)
        state = replace(state, check_at=check_at)
    state, actions = _enter(state, PRESENT, state.reason)
    state = _rest(state, now) if state.is_followed else replace(state, due=now + LOOK)
    return state, (*actions, Work.KEEP)


def _on_missing(state: ModelState, now: float) -> Step:
    if state.spec.policy == NEVER:
        failure = Backoff(NEVER_FETCHED, CHANGE, LOOK)
        state = replace(state, failure=failure, check_at=math.inf, due=now + LOOK)
        return _enter(state, FAILED, "it is not here, and may not be fetched")
    if state.phase == PRESENT:
        state = _lost(state)
    if state.is_short:
        return state, (Work.MEASURE,)
    if now < state.next_check:
        return _rest(state, now), ()
    if state.suspect is None:
        return _pull(state)
    return state, (Check(None if now >= state.suspect.retry_at else state.suspect.root),)


def _lost(state: ModelState) -> ModelState:
    """Return the state of a model that was removed: it is pulled at once if a failure allows it."""
    failure = state.failure if state.failure and state.failure.after == TIME else None
    reason = state.reason if failure else None
    state = replace(state, phase=WAITING, reason=reason, failure=failure)
    return replace(state, check_at=state.not_before, root=None, sources={})


# -- the registry


def _on_check_here(state: ModelState, event: Checked, now: float) -> Step:
    is_retry = state.suspect is not None and now >= state.suspect.retry_at
    state = replace(state, check_at=now + state.spec.refresh)
    actions: tuple[Action, ...] = ()
    if event.root is not None:
        drift = None if event.chosen == state.digest else event.chosen
        if drift not in (None, state.drift):
            actions = (Announce("drift", {"here": str(state.digest), "there": str(drift)}),)
        state = replace(state, root=event.root, drift=drift)
    is_wanted = state.drift is not None and state.spec.policy == ALWAYS
    suspect = state.suspect
    if not is_wanted or (suspect is not None and suspect.root != state.root):
        suspect = None
    state = _rest(replace(state, suspect=suspect), now)
    if is_wanted and event.root is None and state.is_short:
        return state, (*actions, Work.MEASURE)
    state = replace(state, failure=None, reason=None)
    if suspect is not None and not is_retry:
        failure = Backoff(WRONG, CHANGE, state.spec.refresh)
        return replace(state, failure=failure, reason=suspect.reason), actions
    if not is_wanted or event.root is not None:
        state = replace(state, attempts=0)
    if not is_wanted:
        return state, actions
    state, pull = _pull(state)
    return state, (*actions, *pull)


def _on_check_missing(state: ModelState, event: Checked, now: float) -> Step:
    suspect = state.suspect
    if event.root is None and suspect is not None:
        refresh = state.spec.refresh
        state = replace(state, failure=Backoff(WRONG, CHANGE, refresh), check_at=now + refresh)
        return _enter(_rest(state, now), FAILED, suspect.reason)
    is_same = suspect is not None and suspect.root == event.root
    return _pull(replace(state, root=event.root, suspect=suspect if is_same else None))


# -- pulls


def _pull(state: ModelState) -> Step:
    return replace(state, phase=PULLING, reason=None), (Work.PULL,)


def _on_pulled(state: ModelState, event: Pulled, now: float, chance: float) -> Step:
    read = event.read
    state = replace(state, name=read.name, manifest=read.manifest, is_here=read.is_complete)
    state = replace(state, root=None, drift=None, suspect=None, sources=event.sources)
    if not read.is_complete:
        error = StoreError(f"{state.spec.name} was pulled, and another process removed it")
        return _on_failed(state, Failed(error), now, chance)
    return _present(replace(state, check_at=now + state.spec.refresh), now)


def _on_measured(state: ModelState, event: Measured, now: float) -> Step:
    shortage = state.shortage
    if shortage is None or not state.is_short:  # a retry was requested meanwhile
        return _rest(state, now), ()
    if event.free < min(shortage.free, shortage.room) and now >= shortage.evict_at:
        state, actions = _evict(state, shortage, now)
        return state, (*actions, Work.MEASURE)
    return _pull(state) if event.free >= shortage.free else (_rest(state, now), ())


def _evict(state: ModelState, shortage: Shortage, now: float) -> Step:
    count = shortage.evictions + 1
    evict_at = now + min(MAX_EVICT, LOOK * 2.0 ** min(count - 1, 10))
    shortage = replace(shortage, evictions=count, evict_at=evict_at)
    return replace(state, shortage=shortage), (Evict(shortage.room),)


# -- failures


def _on_failed(state: ModelState, event: Failed, now: float, chance: float) -> Step:
    error, attempts, before = event.error, state.attempts + 1, state.reason
    failure = again(error, attempts, chance, state.spec.refresh)
    state = replace(state, attempts=attempts, failure=failure)
    actions: tuple[Action, ...] = ()
    if isinstance(error, NoSpaceError):
        state, actions = _evict(state, _shortage(state, event, error.missing_size), now)
    if isinstance(error, VerificationError):
        state = _suspected(state, event, now, chance)
    state = _rest(_pause(state, failure, now), now)
    if state.is_here:  # the older version stays in use
        if before != error.message and failure.after != TIME:
            actions = (*actions, Announce("failed", {"reason": error.message}))
        return replace(state, phase=PRESENT, reason=error.message), actions
    state, news = _enter(state, WAITING if failure.after == TIME else FAILED, error.message)
    return state, (*actions, *news)


def _shortage(state: ModelState, event: Failed, missing: int) -> Shortage:
    """Return how much space a retry needs: little more where the pull had not begun to write."""
    free = event.free + (RESERVE if event.began else STEP)
    room = event.free + missing if missing else event.needed + RESERVE
    evictions = state.shortage.evictions if state.shortage else 0
    return Shortage(free, room, evictions)


def _suspected(state: ModelState, event: Failed, now: float, chance: float) -> ModelState:
    root = state.root or event.root
    if root is None:
        return replace(state, suspect=None)
    known = state.suspect
    count = known.count + 1 if known is not None and known.root == root else 1
    suspect = Suspect(root, event.error.message, count, now + whole(count, chance))
    return replace(state, root=root, suspect=suspect)


def _pause(state: ModelState, failure: Backoff, now: float) -> ModelState:
    """Return the state with the times at which the registry may be asked after a failure."""
    is_in_use = state.is_here and math.isinf(failure.delay)
    check_at = now + (state.spec.refresh if is_in_use else failure.delay)
    state = replace(state, check_at=check_at)
    if failure.after == TIME:
        state = replace(state, not_before=check_at)
    if state.suspect is not None and failure.code != WRONG:
        retry_at = max(state.suspect.retry_at, check_at)
        state = replace(state, suspect=replace(state.suspect, retry_at=retry_at))
    return state


# -- all of them


def _rest(state: ModelState, now: float) -> ModelState:
    """Return the state with the next read of the store, or when the registry may be asked."""
    return replace(state, due=max(now, min(now + LOOK, state.next_check)))


def _enter(state: ModelState, phase: str, reason: str | None) -> Step:
    """Return the state in ``phase``, and the announcement of an end that is new."""
    is_news = phase != state.phase and phase in (PRESENT, FAILED)
    actions = (Announce(phase, {"reason": reason} if reason else {}),) if is_news else ()
    return replace(state, phase=phase, reason=reason), actions
