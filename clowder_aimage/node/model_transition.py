"""The transitions of a model: pure functions from a state and an event to a state and actions.

Check, MEASURE and PULL are last in the actions and produce the next event: ``checked``,
``measured`` or ``pulled``, or else ``failed``, ``stopped`` or ``store_changed``. Evict produces
``wait_for_space`` if bytes become free later; then the actions after it are left out. The
functions use no clock, no I/O and no randomness: ``now`` is in seconds on the node's monotonic
clock, and ``chance``, in [0, 1), is the jitter of delays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from clowder_aimage.content.fetch import RESERVE
from clowder_aimage.engine.admission import ALWAYS, NEVER
from clowder_aimage.engine.backoff import (
    CHANGE,
    NEVER_FETCHED,
    STORE,
    TIME,
    WRONG,
    Backoff,
    compute_backoff,
    compute_full_backoff,
)
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, VerificationError
from clowder_aimage.layout.completeness import Completeness
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_state import (
    FAILED,
    PRESENT,
    PULLING,
    WAITING,
    Action,
    Announce,
    Check,
    Evict,
    ModelState,
    Shortage,
    Step,
    Suspect,
    Work,
)
from clowder_aimage.oci import Digest, Reference

# Seconds between two reads of the store.
LOOK = 10.0
# Minimum seconds between two evictions for one model, at most.
MAX_EVICT = 60.0
# Additional bytes required to retry a pull that found no space at all.
STEP = 1024 * 1024
# Seconds that a model waits for bytes that become free: the grace of blobs, and a look after it.
WAIT = 90.0
CRASHED = "internal error; see the node's log"
# Seconds after an internal error of the node.
CRASH = 30.0
# Seconds after a transfer was stopped.
STOP = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed action.

    For lack of space: the ``free`` bytes and the bytes ``needed`` by the pull; ``began`` is true if
    the pull had begun to write. For content that failed verification: the ``root`` of the tag.
    """

    error: AImageError
    free: int = 0
    needed: int = 0
    began: bool = False
    root: Digest | None = None


def apply_spec(state: ModelState, time: float, spec: ModelSpec) -> Step:
    """Apply a newly read spec; a changed spec clears failures."""
    # The origin may be another file.
    is_same = spec == state.spec
    state = replace(state, spec=spec)
    return (state, ()) if is_same else apply_retry(state, time)


def apply_retry(state: ModelState, time: float) -> Step:
    """Apply a requested retry or changed credentials: clear failures."""
    state = replace(state, attempts=0, failure=None, suspect=None, shortage=None)
    return replace(state, due=time, check_at=-math.inf, not_before=-math.inf), ()


def apply_store_change(state: ModelState, time: float) -> Step:
    """Apply a possible removal from the store: read the store at once."""
    return replace(state, due=time), ()


def apply_crash(state: ModelState, time: float) -> Step:
    """Apply an internal error of the node."""
    return replace(state, phase=FAILED, reason=CRASHED, due=time + CRASH), ()


def apply_stop(state: ModelState, time: float, reason: str) -> Step:
    """Apply the stop of a transfer from outside."""
    phase = PRESENT if state.is_here else WAITING
    return replace(state, phase=phase, reason=reason, due=time + STOP), ()


def apply_store_error(state: ModelState, time: float, reason: str) -> Step:
    """Apply a failed read of the store, whose content is then unknown."""
    state = replace(state, phase=WAITING, reason=reason, is_here=False, root=None)
    failure = Backoff(STORE, TIME, LOOK)
    return replace(state, failure=failure, check_at=time + LOOK, due=time + LOOK), ()


def apply_store_read(
    state: ModelState, time: float, name: Reference, completeness: Completeness
) -> Step:
    """Apply a read of the store; ``name`` is the model's name in it."""
    found = name, completeness.root, completeness.is_complete
    # Hundreds of states are replaced every few seconds, though nothing changes
    if found != (state.name, state.manifest, state.is_here):
        state = replace(state, name=name, manifest=found[1], is_here=found[2])
    if not completeness.is_complete:
        return _on_missing(state, time)
    state, actions = _enter_present(state, time)
    if state.is_followed and time >= state.next_check:
        return state, (*actions, Check(state.root or state.digest))
    if state.is_followed and state.is_short and state.drift is not None:
        return state, (*actions, Work.MEASURE)
    return state, actions


def _enter_present(state: ModelState, time: float) -> Step:
    if state.phase != PRESENT:
        state = replace(state, attempts=0, failure=None, root=None, shortage=None, reason=None)
        state = replace(state, check_at=min(state.check_at, time + state.spec.refresh))
    state, actions = _enter(state, PRESENT, state.reason)
    state = _schedule(state, time) if state.is_followed else replace(state, due=time + LOOK)
    return state, (*actions, Work.KEEP)


def _on_missing(state: ModelState, time: float) -> Step:
    if state.spec.policy == NEVER:
        failure = Backoff(NEVER_FETCHED, CHANGE, LOOK)
        state = replace(state, failure=failure, check_at=math.inf, due=time + LOOK)
        return _enter(state, FAILED, "not in the store, and the pull policy is Never")
    if state.phase == PRESENT:
        state = _lose(state)
    if state.is_short:
        return state, (Work.MEASURE,)
    if time < state.next_check:
        return _schedule(state, time), ()
    if state.suspect is None:
        return _pull(state)
    return state, (Check(None if time >= state.suspect.retry_at else state.suspect.root),)


def _lose(state: ModelState) -> ModelState:
    """Return the state of a removed model: due for a pull, unless a failure delays it."""
    failure = state.failure if state.failure and state.failure.after == TIME else None
    reason = state.reason if failure else None
    state = replace(state, phase=WAITING, reason=reason, failure=failure)
    return replace(state, check_at=state.not_before, root=None, sources={})


def apply_check(
    state: ModelState, time: float, root: Digest | None = None, chosen: Digest | None = None
) -> Step:
    """Apply a response of the registry: the tag resolves to ``root``; None if it has not changed.

    ``chosen`` is the manifest for this machine if ``root`` is an index.
    """
    if state.is_here:
        return _apply_check_if_present(state, time, root, chosen)
    suspect = state.suspect
    if root is None and suspect is not None:
        refresh = state.spec.refresh
        state = replace(state, failure=Backoff(WRONG, CHANGE, refresh), check_at=time + refresh)
        return _enter(_schedule(state, time), FAILED, suspect.reason)
    is_same = suspect is not None and suspect.root == root
    return _pull(replace(state, root=root, suspect=suspect if is_same else None))


def _apply_check_if_present(
    state: ModelState, time: float, root: Digest | None, chosen: Digest | None
) -> Step:
    is_retry = state.suspect is not None and time >= state.suspect.retry_at
    state = replace(state, check_at=time + state.spec.refresh)
    actions: tuple[Action, ...] = ()
    if root is not None:
        drift = None if chosen == state.digest else chosen
        if drift not in (None, state.drift):
            actions = (Announce("drift", {"here": str(state.digest), "there": str(drift)}),)
        state = replace(state, root=root, drift=drift)
    is_wanted = state.drift is not None and state.spec.policy == ALWAYS
    suspect = state.suspect
    if not is_wanted or (suspect is not None and suspect.root != state.root):
        suspect = None
    state = _schedule(replace(state, suspect=suspect), time)
    if is_wanted and root is None and state.is_short:
        return state, (*actions, Work.MEASURE)
    state = replace(state, failure=None, reason=None)
    if suspect is not None and not is_retry:
        failure = Backoff(WRONG, CHANGE, state.spec.refresh)
        return replace(state, failure=failure, reason=suspect.reason), actions
    if not is_wanted or root is not None:
        state = replace(state, attempts=0)
    if not is_wanted:
        return state, actions
    state, pull = _pull(state)
    return state, (*actions, *pull)


def _pull(state: ModelState) -> Step:
    return replace(state, phase=PULLING, reason=None), (Work.PULL,)


def apply_pull(
    state: ModelState,
    time: float,
    name: Reference,
    completeness: Completeness,
    sources: Mapping[str, int],
    chance: float,
) -> Step:
    """Apply a completed pull and a read of the store; ``sources`` are the bytes by source."""
    state = replace(state, name=name, manifest=completeness.root, is_here=completeness.is_complete)
    state = replace(state, root=None, drift=None, suspect=None, sources=sources)
    if not completeness.is_complete:
        error = StoreError(f"{state.spec.name} was pulled, and removed by another process")
        return apply_failure(state, time, Failure(error), chance)
    return _enter_present(replace(state, check_at=time + state.spec.refresh), time)


def apply_measurement(state: ModelState, time: float, free: int) -> Step:
    """Apply a measurement of ``free`` bytes in the store's file system."""
    shortage = state.shortage
    # A retry was requested in the meantime.
    if shortage is None or not state.is_short:
        return _schedule(state, time), ()
    if free < min(shortage.free, shortage.room) and time >= shortage.evict_at:
        state, actions = _evict(state, shortage, time)
        return state, (*actions, Work.MEASURE)
    if free >= shortage.free:
        return _pull(state)
    state = _schedule(state, time)
    # It has waited in vain.
    if math.isfinite(shortage.wait_until) and time >= shortage.wait_until:
        return _enter(state, PRESENT if state.is_here else FAILED, shortage.reason)
    return state, ()


def apply_wait_for_space(state: ModelState, time: float, expected: str) -> Step:
    """Apply an eviction that did not free enough; the rest, ``expected``, becomes free later."""
    shortage = state.shortage
    # A retry was requested in the meantime.
    if shortage is None or not state.is_short:
        return _schedule(state, time), ()
    shortage = replace(shortage, evict_at=time + LOOK, wait_until=time + WAIT)
    phase = PRESENT if state.is_here else WAITING
    reason = f"{shortage.reason}; {expected}"
    return _schedule(replace(state, phase=phase, reason=reason, shortage=shortage), time), ()


def _evict(state: ModelState, shortage: Shortage, time: float) -> Step:
    count = shortage.evictions + 1
    evict_at = time + min(MAX_EVICT, LOOK * 2.0 ** min(count - 1, 10))
    shortage = replace(shortage, evictions=count, evict_at=evict_at)
    return replace(state, shortage=shortage), (Evict(shortage.room, not shortage.has_begun),)


def apply_failure(state: ModelState, time: float, event: Failure, chance: float) -> Step:
    """Apply the failure of an action."""
    error, attempts, before = event.error, state.attempts + 1, state.reason
    failure = compute_backoff(error, attempts, chance, state.spec.refresh)
    state = replace(state, attempts=attempts, failure=failure)
    actions: tuple[Action, ...] = ()
    if isinstance(error, NoSpaceError):
        state, actions = _evict(state, _compute_shortage(state, event, error.missing_size), time)
    if isinstance(error, VerificationError):
        state = _record_suspect(state, event, time, chance)
    state = _schedule(_pause(state, failure, time), time)
    # The older version stays in use.
    if state.is_here:
        if before != error.message and failure.after != TIME:
            actions = (*actions, Announce("failed", {"reason": error.message}))
        return replace(state, phase=PRESENT, reason=error.message), actions
    state, entered = _enter(state, WAITING if failure.after == TIME else FAILED, error.message)
    return state, (*actions, *entered)


def _compute_shortage(state: ModelState, event: Failure, missing: int) -> Shortage:
    """Return the space required for a retry: slightly more if the pull had not begun to write."""
    free = event.free + (RESERVE if event.began else STEP)
    room = event.free + missing if missing else event.needed + RESERVE
    evictions = state.shortage.evictions if state.shortage else 0
    return Shortage(free, room, evictions, reason=event.error.message, has_begun=event.began)


def _record_suspect(state: ModelState, event: Failure, time: float, chance: float) -> ModelState:
    root = state.root or event.root
    if root is None:
        return replace(state, suspect=None)
    previous = state.suspect
    count = previous.count + 1 if previous is not None and previous.root == root else 1
    suspect = Suspect(root, event.error.message, count, time + compute_full_backoff(count, chance))
    return replace(state, root=root, suspect=suspect)


def _pause(state: ModelState, failure: Backoff, time: float) -> ModelState:
    """Return the state with the earliest times of the next queries after a failure."""
    is_in_use = state.is_here and math.isinf(failure.delay)
    check_at = time + (state.spec.refresh if is_in_use else failure.delay)
    state = replace(state, check_at=check_at)
    if failure.after == TIME:
        state = replace(state, not_before=check_at)
    if state.suspect is not None and failure.code != WRONG:
        retry_at = max(state.suspect.retry_at, check_at)
        state = replace(state, suspect=replace(state.suspect, retry_at=retry_at))
    return state


def _schedule(state: ModelState, time: float) -> ModelState:
    """Return the state with the time of the next read of the store or query of the registry."""
    return replace(state, due=max(time, min(time + LOOK, state.next_check)))


def _enter(state: ModelState, phase: str, reason: str | None) -> Step:
    """Return the state in ``phase``, with an announcement if it newly became present or failed."""
    is_new = phase != state.phase and phase in (PRESENT, FAILED)
    actions = (Announce(phase, {"reason": reason} if reason else {}),) if is_new else ()
    if (phase, reason) != (state.phase, state.reason):
        state = replace(state, phase=phase, reason=reason)
    return state, actions
