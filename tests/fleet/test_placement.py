"""Models of workers: room, demand, and the waits that follow."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

from clowder_aimage.engine.admission import NEVER
from clowder_aimage.fleet.job.choice import (
    ELSEWHERE,
    FOLLOW,
    claim_delay_loaded,
    claim_delay_stored,
)
from clowder_aimage.fleet.placement import DemandStats, Placement, SlotCounter
from clowder_aimage.fleet.worker_registry import WorkerRegistry, WorkerStatus
from tests.fleet.worker_status import A, B, C, status_of


def test_room_is_shared_by_texts_of_one_model() -> None:
    room = SlotCounter(slots=2, parallel=3)
    for _ in range(3):
        assert room.has(A, is_text=True)
        room.take(A)
    assert not room.has(A, is_text=True)
    room.take(B)
    assert room.has(B, is_text=False)  # one may follow
    assert not room.has("sha256:c", is_text=False)
    room.leave(B)
    assert room.has("sha256:c", is_text=False) and room.running == 3


def test_a_model_with_fewer_jobs_costs_less_to_evict_and_a_copy_too_many_nothing() -> None:
    now = 0.0
    demand = DemandStats(lambda: now)
    for _ in range(90):
        now += 0.1
        demand.record(A)
    demand.record(B)
    demand.record_end(A, now - 0.05)  # half of a copy is at work
    assert demand.count_needed(A) == 1 and demand.count_needed("sha256:c") == 1
    assert (
        demand.estimate_eviction_cost(A, 1)
        > demand.estimate_eviction_cost(B, 1)
        > 0.0
        == demand.estimate_eviction_cost(A, 2)
    )
    demand.record_end(A, now - 0.35)  # which followed the other closely, and took no longer
    assert demand.count_needed(A) == 1
    now += 10.0
    for _ in range(9):
        demand.record_end(A, now - 9.0)
        now += 1.0
    assert demand.count_needed(A) > 2 and demand.estimate_eviction_cost(
        A, 2
    ) > demand.estimate_eviction_cost(B, 1)
    copies = Counter({A: 1, B: 1})
    estimate = partial(demand.estimate_unload_cost, slots=2, copies=copies)
    for has_room in (False, True):
        assert estimate((A, B), (A, B), has_room=has_room) is None  # all are at work
        assert estimate((), (), has_room=has_room) == 0.0
    assert estimate((A, B, C), (A,), has_room=True) == 0.0
    assert estimate((A,), (), has_room=False) == demand.estimate_eviction_cost(A, 1)
    assert estimate((A, B), (B,), has_room=False) == demand.estimate_eviction_cost(A, 1)
    assert estimate((A, B), (), has_room=False) == demand.estimate_eviction_cost(B, 1)


def placed(worker: str, loaded: tuple[str, ...], *statuses: WorkerStatus) -> Placement:
    """Return the placement of a worker with two slots, which has the models A and B."""
    models = [SimpleNamespace(variants={digest: None}, is_ready=True) for digest in loaded]
    # Each model takes one of two bytes
    engine = SimpleNamespace(list_loaded=lambda: models, room=2 - len(models))
    service: Any = SimpleNamespace(engine=engine, settings=SimpleNamespace(pull=NEVER))
    digests = (A, B, C)
    view: Any = SimpleNamespace(
        kinds=dict.fromkeys(digests, "image"), needs=dict.fromkeys(digests, 1)
    )
    workers = WorkerRegistry()
    for each in statuses:
        workers.put(each)
    return Placement(service, view, SlotCounter(2, 1), workers, worker)


def test_a_worker_waits_by_what_the_others_have() -> None:
    models = {"a": A, "b": B, "c": C}
    busy = status_of("w1", slots=2, loaded=(A,), at_work=(A,), models=models)
    a = A.partition(":")[2]
    assert placed("w2", (A,), busy).wait(a) == claim_delay_loaded(1)
    assert placed("w0", (A,), busy).wait(a) == claim_delay_loaded(0)
    assert placed("w2", (), busy).wait(a) == ELSEWHERE
    assert placed("w2", (B, C), busy).wait(a) == claim_delay_stored(
        0, is_elsewhere=True, evicts_last_copy=True
    )
    loading = status_of("w1", slots=2, at_work=(A,), models=models)
    assert placed("w2", (), loading).wait(a) == ELSEWHERE  # soon it has it
    free = status_of("w1", slots=2, models=models)
    assert placed("w2", (), free).wait(a) == claim_delay_stored(1, evicts_last_copy=False)
    assert placed("w0", (), free).wait(a) == claim_delay_stored(0, evicts_last_copy=False)
    assert placed("w0", (B, C), free).wait(a) == claim_delay_stored(1, evicts_last_copy=True)
    assert placed("w2", (), free).wait("unknown") is None
    # Memory for another model counts, not the number of loaded ones
    other = f"sha256:{'d' * 64}"
    roomy = status_of("w1", slots=1, loaded=(other,), room=1, models=models)
    assert placed("w0", (B, C), roomy).wait(a) == claim_delay_stored(1)
    full = status_of("w1", slots=9, loaded=(other,), room=0, models=models)
    assert placed("w2", (B,), full).wait(a) == claim_delay_stored(0)
    here = placed("w2", (A,), busy)
    here._slots.take(A)
    assert here.wait(a) == FOLLOW
    here._slots.take(A)
    assert here.wait(a) is None
    assert (
        here.estimate_eviction_cost(B) == 1.0
        and here.estimate_eviction_cost(A, is_wanted=True)
        > 1e6
        > here.estimate_eviction_cost(A)
        == 0.0
    )
