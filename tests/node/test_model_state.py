"""The state machine of a model, as a table of transitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from clowder_aimage.content.fetch import RESERVE
from clowder_aimage.engine.admission import ALWAYS, FOR_EVER, IF_MISSING, NEVER
from clowder_aimage.engine.backoff import CHANGE, SPACE, TIME, Backoff, compute_full_backoff
from clowder_aimage.errors import (
    NetworkError,
    NoSpaceError,
    NotFoundError,
    RegistryError,
    VerificationError,
)
from clowder_aimage.layout.completeness import Completeness
from clowder_aimage.node import model_transition as event
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_state import (
    FAILED,
    PRESENT,
    PULLING,
    UNKNOWN,
    WAITING,
    Announce,
    Check,
    Evict,
    ModelState,
    Shortage,
    Suspect,
    Work,
)
from clowder_aimage.node.model_transition import CRASH, LOOK, STEP, WAIT, Failure
from clowder_aimage.oci import Descriptor, Digest, Reference

NOW, REFRESH = 1000.0, 300.0
NAME = Reference.parse("registry.example.com/team/model:v1")
OLD, NEW = Digest.of(b"old"), Digest.of(b"new")
MANIFEST = Descriptor("application/vnd.oci.image.manifest.v1+json", OLD, 100)
COMPLETE, INCOMPLETE = Completeness(MANIFEST), Completeness(MANIFEST, 100, (MANIFEST,))
HERE, PART, GONE = (
    partial(event.apply_store_read, name=NAME, completeness=found)
    for found in (COMPLETE, INCOMPLETE, Completeness())
)
UNREACHABLE, ABSENT = NetworkError("no answer"), NotFoundError("no such tag")
WRONG, FULL = VerificationError("other bytes"), NoSpaceError("disk full", missing_size=700)
BUSY = RegistryError("too many requests", status=429, retry_after=120.0)
DENIED = Backoff("not_found", CHANGE, REFRESH)
SHORT = Backoff("no_space", SPACE, math.inf)
SILENT = Backoff("unreachable", TIME, 4.0)
BAD = Suspect(NEW, "other bytes", 1, NOW + 3000.0)


def spec(policy: str = ALWAYS, refresh: float = REFRESH, **facts: Any) -> ModelSpec:
    return ModelSpec(NAME, policy=policy, refresh=refresh, **facts)


def state(
    phase: str = UNKNOWN, *, policy: Any = ALWAYS, refresh: Any = REFRESH, **facts: Any
) -> ModelState:
    return ModelState(spec(policy, refresh), NAME, phase=phase, **facts)


def present(**facts: Any) -> ModelState:
    """Return the state of a present model whose tag is checked in ``REFRESH`` seconds."""
    known = {"is_here": True, "manifest": MANIFEST, "check_at": NOW + REFRESH}
    return state(PRESENT, **(known | facts))


def failed(error: Any, *facts: Any, **named: Any) -> partial[tuple[ModelState, tuple[Any, ...]]]:
    return partial(event.apply_failure, event=Failure(error, *facts, **named), chance=0.5)


def pulled(
    found: Completeness, sources: dict[Any, Any] | None = None
) -> partial[tuple[ModelState, tuple[Any, ...]]]:
    return partial(
        event.apply_pull, name=NAME, completeness=found, sources=sources or {}, chance=0.5
    )


def specified(wanted: ModelSpec) -> partial[tuple[ModelState, tuple[Any, ...]]]:
    return partial(event.apply_spec, spec=wanted)


def measured(free: int) -> partial[tuple[ModelState, tuple[Any, ...]]]:
    return partial(event.apply_measurement, free=free)


def checked(
    root: Digest | None = None, chosen: Digest | None = None
) -> partial[tuple[ModelState, tuple[Any, ...]]]:
    return partial(event.apply_check, root=root, chosen=chosen)


def step(before: ModelState, *events: Any, now: float = NOW) -> tuple[ModelState, tuple[Any, ...]]:
    """Return the state after the events, and the actions of the last."""
    actions = ()
    for each in events:
        before, actions = each(before, now)
    return before, actions


def facts(found: ModelState, expected: dict[str, Any]) -> dict[Any, Any]:
    return {name: getattr(found, name) for name in expected}


LATER = partial(event.apply_wait_for_space, expected="9 MB are young")
YOUNG = Shortage(900, 800, 1, NOW, "disk full")
STOPPED = partial(event.apply_stop, reason="stopped")
NEWS = Announce(PRESENT)
DRIFT = Announce("drift", {"here": str(OLD), "there": str(NEW)})
MOVED, SAME = checked(NEW, NEW), checked()


@pytest.mark.parametrize(
    ("before", "happened", "after", "actions"),
    [
        # -- the store was read: the model is present
        (state(), HERE, {"phase": PRESENT, "is_here": True, "manifest": MANIFEST},
         (NEWS, Work.KEEP, Check(OLD))),
        (state(policy=NEVER), HERE, {"phase": PRESENT, "due": NOW + LOOK}, (NEWS, Work.KEEP)),
        (present(), HERE, {"phase": PRESENT, "due": NOW + LOOK}, (Work.KEEP,)),
        (present(check_at=NOW + 3), HERE, {"due": NOW + 3}, (Work.KEEP,)),
        (present(check_at=NOW), HERE, {}, (Work.KEEP, Check(OLD))),
        (present(check_at=NOW, not_before=NOW + 60), HERE, {"due": NOW + LOOK}, (Work.KEEP,)),
        (present(failure=SHORT, drift=NEW), HERE, {}, (Work.KEEP, Work.MEASURE)),
        (present(failure=DENIED, reason="why"), HERE, {"failure": DENIED, "reason": "why"},
         (Work.KEEP,)),
        # pulled by another process: failures are reset, the registry's pause is kept
        (state(FAILED, failure=DENIED, attempts=3, reason="why", check_at=math.inf), HERE,
         {"failure": None, "attempts": 0, "reason": None, "check_at": NOW + REFRESH},
         (NEWS, Work.KEEP)),
        (state(WAITING, failure=SILENT, not_before=NOW + 60, check_at=NOW + 60), HERE,
         {"failure": None, "next_check": NOW + 60}, (NEWS, Work.KEEP)),
        # -- the store was read: the model, or a part of it, is missing
        (state(), GONE, {"phase": PULLING, "is_here": False}, (Work.PULL,)),
        (state(policy=NEVER), GONE, {"phase": FAILED, "due": NOW + LOOK, "next_try": math.inf},
         (Announce(FAILED, {"reason": "not in the store, and the pull policy is Never"}),)),
        (present(policy=IF_MISSING), GONE, {"phase": PULLING, "is_here": False}, (Work.PULL,)),
        (present(failure=SILENT, not_before=NOW + 60), GONE,
         {"phase": WAITING, "failure": SILENT, "next_try": NOW + 60}, ()),
        (present(failure=DENIED), GONE, {"phase": PULLING, "failure": None}, (Work.PULL,)),
        (state(FAILED, failure=DENIED, check_at=NOW + 3), GONE, {"due": NOW + 3}, ()),
        (state(FAILED, failure=SHORT, check_at=math.inf), GONE, {}, (Work.MEASURE,)),
        (state(FAILED, failure=DENIED, suspect=BAD), GONE, {}, (Check(NEW),)),
        (state(FAILED, suspect=replace(BAD, retry_at=NOW)), GONE, {}, (Check(None),)),
        # -- the store could not be read
        (present(root=NEW), partial(event.apply_store_error, reason="damaged"),
         {"phase": WAITING, "is_here": False, "root": None, "due": NOW + LOOK}, ()),
        # -- the registry responded, and the model is present
        (present(check_at=NOW), SAME, {"check_at": NOW + REFRESH, "due": NOW + LOOK}, ()),
        (present(check_at=NOW), checked(NEW, OLD), {"root": NEW, "drift": None}, ()),
        (present(check_at=NOW), MOVED, {"phase": PULLING, "drift": NEW}, (DRIFT, Work.PULL)),
        (present(policy=IF_MISSING), MOVED, {"phase": PRESENT, "drift": NEW}, (DRIFT,)),
        (present(drift=NEW, root=NEW), checked(OLD, OLD), {"drift": None}, ()),
        (present(drift=NEW, root=NEW, failure=SILENT), SAME, {"phase": PULLING}, (Work.PULL,)),
        (present(drift=NEW, root=NEW, failure=SHORT), SAME, {"failure": SHORT}, (Work.MEASURE,)),
        (present(drift=NEW, root=NEW, failure=SHORT), MOVED, {"failure": None}, (Work.PULL,)),
        (present(failure=DENIED, reason="why", attempts=2), SAME,
         {"failure": None, "reason": None, "attempts": 0}, ()),
        (present(drift=NEW, root=NEW, suspect=BAD), SAME,
         {"phase": PRESENT, "reason": "other bytes", "next_try": NOW + 3000.0}, ()),
        (present(drift=NEW, root=NEW, suspect=replace(BAD, retry_at=NOW)), SAME,
         {"phase": PULLING}, (Work.PULL,)),
        (present(drift=NEW, root=NEW, suspect=BAD), checked(OLD, OLD), {"suspect": None}, ()),
        # -- the registry responded, and the model is missing
        (state(FAILED, suspect=BAD, reason="other"), SAME,
         {"phase": FAILED, "reason": "other bytes", "check_at": NOW + REFRESH, "suspect": BAD}, ()),
        (state(FAILED, suspect=BAD), checked(OLD, OLD), {"root": OLD, "suspect": None},
         (Work.PULL,)),
        (state(FAILED, suspect=BAD), MOVED, {"root": NEW, "suspect": BAD}, (Work.PULL,)),
        # -- a pull ended
        (state(PULLING, failure=SILENT, attempts=3, suspect=BAD, drift=NEW, root=NEW),
         pulled(COMPLETE, {"registry": 5}),
         {"phase": PRESENT, "failure": None, "attempts": 0, "suspect": None, "drift": None,
          "root": None, "check_at": NOW + REFRESH, "sources": {"registry": 5}},
         (NEWS, Work.KEEP)),
        (state(PULLING), pulled(INCOMPLETE), {"phase": WAITING, "is_here": False}, ()),
        (state(PULLING), STOPPED, {"phase": WAITING, "due": NOW + 1}, ()),
        (present(), STOPPED, {"phase": PRESENT, "reason": "stopped"}, ()),
        # -- a failure, and the model is missing
        (state(PULLING), failed(UNREACHABLE),
         {"phase": WAITING, "attempts": 1, "not_before": NOW + 1, "next_try": NOW + 1}, ()),
        (state(PULLING), failed(BUSY), {"next_try": NOW + 120, "due": NOW + LOOK}, ()),
        (state(PULLING), failed(ABSENT), {"phase": FAILED, "next_try": NOW + REFRESH},
         (Announce(FAILED, {"reason": "no such tag"}),)),
        (state(PULLING, refresh=FOR_EVER), failed(ABSENT), {"next_try": math.inf},
         (Announce(FAILED, {"reason": "no such tag"}),)),
        (state(PULLING, suspect=BAD), failed(BUSY), {"suspect": BAD}, ()),
        (state(PULLING, suspect=replace(BAD, retry_at=NOW)), failed(BUSY),
         {"suspect": replace(BAD, retry_at=NOW + 120)}, ()),
        # -- a failure, and an older version is present
        (present(), failed(UNREACHABLE), {"phase": PRESENT, "reason": "no answer"}, ()),
        (present(), failed(ABSENT), {"phase": PRESENT, "next_try": NOW + REFRESH},
         (Announce("failed", {"reason": "no such tag"}),)),
        (present(reason="no such tag"), failed(ABSENT), {"reason": "no such tag"}, ()),
        # -- content that failed verification
        (state(PULLING, root=NEW), failed(WRONG),
         {"phase": FAILED,
          "suspect": Suspect(NEW, "other bytes", 1, NOW + compute_full_backoff(1, 0.5))},
         (Announce(FAILED, {"reason": "other bytes"}),)),
        (state(PULLING), failed(WRONG, root=NEW), {"root": NEW},
         (Announce(FAILED, {"reason": "other bytes"}),)),
        (state(FAILED, root=NEW, suspect=BAD), failed(WRONG),
         {"suspect": Suspect(NEW, "other bytes", 2, NOW + compute_full_backoff(2, 0.5))}, ()),
        (state(FAILED, root=OLD, suspect=BAD), failed(WRONG),
         {"suspect": Suspect(OLD, "other bytes", 1, NOW + compute_full_backoff(1, 0.5))}, ()),
        (state(FAILED), failed(WRONG), {"suspect": None, "next_try": NOW + REFRESH}, ()),
        # -- a lack of space
        (state(PULLING), failed(FULL, free=100),
         {"phase": FAILED, "shortage": Shortage(100 + STEP, 800, 1, NOW + 10, "disk full"),
          "due": NOW + LOOK, "next_try": math.inf},
         (Evict(800), Announce(FAILED, {"reason": "disk full"}))),
        (state(FAILED, shortage=Shortage(1, 1, 3)), failed(NoSpaceError("x"), 100, 500, True),
         {"shortage": Shortage(100 + RESERVE, 500 + RESERVE, 4, NOW + 60, "x", True)},
         (Evict(500 + RESERVE, False),)),
        (present(), failed(FULL), {"phase": PRESENT, "next_check": NOW + REFRESH},
         (Evict(700), Announce("failed", {"reason": "disk full"}))),
        (state(FAILED, failure=SHORT, shortage=Shortage(900, 800)), measured(900),
         {"phase": PULLING}, (Work.PULL,)),
        (state(FAILED, failure=SHORT, shortage=Shortage(900, 800)), measured(850),
         {"phase": FAILED, "due": NOW}, ()),
        (state(FAILED, failure=SHORT, shortage=Shortage(900, 800)), measured(700),
         {"shortage": Shortage(900, 800, 1, NOW + 10)}, (Evict(800), Work.MEASURE)),
        (state(FAILED, failure=SHORT, shortage=Shortage(900, 800, 1, NOW + 1)), measured(700),
         {"phase": FAILED}, ()),
        (state(WAITING), measured(10**9), {"phase": WAITING}, ()),
        # -- bytes become free later
        (state(FAILED, failure=SHORT, shortage=YOUNG, check_at=math.inf), LATER,
         {"phase": WAITING, "reason": "disk full; 9 MB are young", "due": NOW + LOOK,
          "shortage": replace(YOUNG, evict_at=NOW + LOOK, wait_until=NOW + WAIT)}, ()),
        (present(failure=SHORT, shortage=YOUNG, check_at=math.inf), LATER,
         {"phase": PRESENT, "reason": "disk full; 9 MB are young"}, ()),
        (state(PULLING), LATER, {"phase": PULLING}, ()),
        (state(WAITING, failure=SHORT, shortage=replace(YOUNG, wait_until=NOW + 1), reason="z"),
         measured(850), {"phase": WAITING, "reason": "z"}, ()),
        (state(WAITING, failure=SHORT, shortage=replace(YOUNG, wait_until=NOW + 1)),
         measured(900), {"phase": PULLING}, (Work.PULL,)),
        (state(WAITING, failure=SHORT, shortage=replace(YOUNG, wait_until=NOW)), measured(850),
         {"phase": FAILED, "reason": "disk full"}, (Announce(FAILED, {"reason": "disk full"}),)),
        (present(failure=SHORT, shortage=replace(YOUNG, wait_until=NOW), reason="z"),
         measured(850), {"phase": PRESENT, "reason": "disk full"}, ()),
        # -- external events
        (state(FAILED, failure=DENIED, attempts=4, suspect=BAD, not_before=NOW + 9),
         event.apply_retry,
         {"failure": None, "attempts": 0, "suspect": None, "due": NOW, "next_check": -math.inf},
         ()),
        (present(due=NOW + 9), event.apply_store_change, {"due": NOW, "phase": PRESENT}, ()),
        (present(), event.apply_crash, {"phase": FAILED, "due": NOW + CRASH}, ()),
        (present(failure=DENIED), specified(spec(IF_MISSING)), {"failure": None, "due": NOW}, ()),
        (present(failure=DENIED), specified(spec(origin="b.yaml")), {"failure": DENIED}, ()),
    ],
)  # fmt: skip
def test_each_event_leads_to_the_expected_state_and_actions(
    before: ModelState,
    happened: partial[Any] | Callable[[ModelState, float], tuple[ModelState, tuple[Any, ...]]],
    after: dict[str, Any],
    actions: tuple[Any, ...],
) -> None:
    found, performed = step(before, happened)
    assert facts(found, after) == after
    assert performed == actions


@pytest.mark.parametrize("refresh", [REFRESH, FOR_EVER])
def test_a_failed_model_is_looked_up_in_the_store_only(refresh: float) -> None:
    before, _ = step(state(refresh=refresh), GONE, failed(ABSENT))
    assert before.due == NOW + LOOK
    assert step(before, GONE, now=NOW + LOOK) == (replace(before, due=NOW + 2 * LOOK), ())


def test_eviction_is_retried_at_intervals_of_up_to_a_minute() -> None:
    before, _ = step(state(), GONE, failed(FULL))
    times = []
    for now in range(int(NOW) + 10, int(NOW) + 260, 10):
        before, actions = step(before, GONE, measured(0), now=now)
        times += [now - NOW] * (Work.MEASURE in actions)
    assert times == [10, 30, 70, 130, 190, 250]


def test_wrong_content_is_pulled_again_with_exponential_backoff() -> None:
    before, now = state(), NOW
    for count in (1, 2, 3):
        before, _ = step(before, GONE, now=now)
        before, _ = step(before, failed(WRONG, root=NEW), now=now)
        assert before.next_try == now + compute_full_backoff(count, 0.5)
        almost = before.next_try - 1
        before, actions = step(before, GONE, SAME, now=almost)
        assert (before.phase, actions) == (FAILED, ())
        now = before.next_try
        assert step(before, GONE, now=now)[1] == (Check(None),)
        before, actions = step(before, GONE, MOVED, now=now)
        assert actions == (Work.PULL,)


def test_backoff_doubles_after_failures_and_resets_after_success() -> None:
    before, now, pauses = state(), NOW, []
    for _ in range(4):
        before, actions = step(before, GONE, now=now)
        assert actions == (Work.PULL,)
        before, _ = step(before, failed(UNREACHABLE), now=now)
        pauses.append(before.next_try - now)
        now = before.next_try
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    before, _ = step(before, GONE, pulled(COMPLETE), now=now)
    assert (before.attempts, before.failure, before.next_check) == (0, None, now + REFRESH)


def test_is_troubled_is_true_for_permanent_failures_only() -> None:
    assert state(FAILED, failure=DENIED).is_troubled
    assert present(failure=DENIED).is_troubled
    assert not present(failure=SILENT).is_troubled
    assert not state(WAITING, failure=SILENT).is_troubled
    assert not present().is_troubled
