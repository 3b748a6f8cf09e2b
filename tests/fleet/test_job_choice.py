"""The next job of a worker."""

from __future__ import annotations

from itertools import pairwise

from clowder_aimage.fleet.job.choice import (
    ELSEWHERE,
    FOLLOW,
    LEFT,
    MOST,
    ON_DISK,
    JobChoice,
    claim_delay_loaded,
    claim_delay_stored,
)
from clowder_aimage.fleet.name import BATCH, INTERACTIVE


def test_jobs_of_loaded_models_come_first_and_batches_last() -> None:
    waits = {"hot": 0.0, "cold": 1.0, "none": None}
    choice = JobChoice(lambda digest: waits[digest])
    for key in ((BATCH, "hot"), (INTERACTIVE, "cold"), (INTERACTIVE, "none")):
        choice.record(key, 0.0)
    assert choice.select_next(0.5) == ((BATCH, "hot"), 0.0)
    assert choice.select_next(1.5) == (
        (INTERACTIVE, "cold"),
        0.0,
    )  # it has waited, and is interactive
    choice.forget((BATCH, "hot"))
    assert choice.select_next(0.5) == (None, 0.5)
    choice.forget((INTERACTIVE, "cold"))
    assert choice.select_next(9.0) == (None, None)
    assert choice.select_next(700.0) == (None, None)


def test_no_job_follows_another_while_an_earlier_one_lacks_room() -> None:
    waits: dict[str, float | None] = {"here": FOLLOW, "there": None}
    choice = JobChoice(waits.__getitem__, lambda digest: digest == "there")
    here, there = (INTERACTIVE, "here"), (INTERACTIVE, "there")
    choice.record(here, 1.0, 1)
    choice.record(there, 2.0, 2)
    assert choice.select_next(5.0)[0] == here  # it came first
    choice.record_delivery(here, 1)
    choice.record(here, 3.0, 3)
    assert choice.select_next(5.0)[0] is None
    choice.forget(there)
    assert choice.select_next(5.0)[0] == here
    choice.record((BATCH, "here"), 1.0, 4)
    choice.record_delivery(here, 3)
    choice.record(there, 4.0, 5)
    assert choice.select_next(5.0)[0] is None  # a batch waits for others
    choice.forget(there, 3.0)
    assert choice.select_next(5.0)[0] is None  # it was announced after the queue was empty


def test_a_job_that_was_given_back_is_left_to_others() -> None:
    """It is found on the queue again; jobs that are announced are served meanwhile."""
    choice, key = JobChoice(lambda _: 0.0), (INTERACTIVE, "m")
    choice.record(key, 1.0)
    choice.leave(key, 1.0)
    choice.record(key, 2.0)
    assert choice.select_next(2.0) == (None, None)
    choice.record(key, 2.0, 7)
    assert choice.select_next(2.0)[0] == key
    choice.leave(key, 2.0)
    assert choice.select_next(2.0)[0] == key
    choice.record_delivery(key, 7)
    choice.record(key, 2.1 + LEFT)
    assert choice.select_next(2.1 + LEFT)[0] == key


def test_what_is_remembered_of_queues_that_nobody_serves_is_bounded() -> None:
    choice, key = JobChoice(lambda _: None), (INTERACTIVE, "m")
    for number in range(1, 2 * MOST):
        choice.record(key, float(number), number)
        choice.record((BATCH, str(number)), 0.0)
    assert len(choice._announced[key]) == MOST and len(choice._announced) == MOST
    assert choice._get_oldest_time(key) == 1.0
    choice.record_delivery(key, 2 * MOST - 2)
    assert choice.is_wanted("m")  # the last one is there
    choice.record_delivery(key, 2 * MOST - 1)
    assert not choice.is_wanted("m")


def test_a_worker_that_would_load_a_model_waits_for_a_job_that_is_old_enough() -> None:
    """A job that came just now is for the workers that have its model."""
    choice, key = JobChoice(lambda _: ELSEWHERE), (INTERACTIVE, "m")
    choice.record(key, 0.0, 7)
    choice.record(key, 0.9, 8)
    choice.record(key, 0.1)  # a look at the queue, which has jobs that are being served too
    assert choice.is_due(key, 1.0) and choice.is_wanted("m") and not choice.is_wanted("n")
    choice.record_delivery(key, 7)
    assert not choice.is_due(key, 1.8) and choice.is_due(key, 1.9)
    choice.record_delivery(key, 8)
    assert not choice.is_wanted("m") and choice.is_due(key, 1.1)  # perhaps one is delivered again
    choice.forget(key)
    assert not choice.is_due(key, 9.0)


def test_workers_wait_in_the_order_of_their_ranks() -> None:
    copies = [claim_delay_loaded(rank) for rank in range(4)]
    loads = [claim_delay_stored(rank, evicts_last_copy=True) for rank in range(4)]
    assert copies == sorted(copies) and copies[0] == 0.0 and copies[1] < ON_DISK == loads[0]
    assert all(later - one >= 0.02 for one, later in pairwise(loads))  # more than messages differ
    waits = [
        claim_delay_stored(0, is_elsewhere=True, evicts_last_copy=evicts_last_copy)
        for evicts_last_copy in (False, True)
    ]
    assert loads[-1] < ELSEWHERE == waits[0] < waits[1]
    assert claim_delay_stored(99, evicts_last_copy=True) < ELSEWHERE
