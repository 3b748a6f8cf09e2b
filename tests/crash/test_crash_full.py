"""A full disk at each allocating call: exit code 6 and a message.

No partial file has a final name, existing data is intact, and the same command succeeds once
there is space.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from tests.crash.conftest import sampled
from tests.crash.scene import Job, Places, check_finished, side_by_side

VERBS = "tag retag pin pull create pull-new create-new tag-foreign pin-foreign".split()
FEW = 2  # call numbers of a command
NO_SPACE = 6
TEMPORARY = re.compile(r".*\.[0-9a-f]{16}")


@pytest.fixture(params=sampled(VERBS, "tag"))
def writer(request: pytest.FixtureRequest, make_job: Callable[[str], Job]) -> Job:
    """Return each of the commands that allocate space."""
    return make_job(request.param)


def fill_up(job: Job, places: Places, codes: Counter[int], number: int, *, ever: bool) -> None:
    place = places.new(job.template)
    done = place.run(*job.argv, full=number, ever=ever)
    codes[done.code] += 1
    try:
        if done.code == 0:  # optional data was skipped: the time of last use
            check_finished(place.store, job.wanted, foreign=job.foreign)
        else:
            assert done.code == NO_SPACE, f"{done.code}: {done.err}"
            assert "no space left for the store" in done.err
            assert "free some space" in done.err
            left = (place.store / ".aimage").rglob("*.*")
            assert [path for path in left if TEMPORARY.fullmatch(path.name)] == []
        job.check_broken(place)
        job.finish(place)
    except AssertionError as error:
        error.add_note(f"{job.verb}, full at {number}, ever: {ever}, {place.directory}")
        raise
    places.drop(place)


def fill_up_at(job: Job, places: Places, numbers: range) -> None:
    codes: Counter[int] = Counter()
    calls = [
        partial(fill_up, job, places, codes, number, ever=ever)
        for number in numbers
        for ever in (False, True)
    ]
    side_by_side(calls)
    assert codes[NO_SPACE]  # of a few calls, most may be for optional data


def test_a_full_disk_at_sampled_calls(writer: Job, places: Places) -> None:
    stride = max(1, writer.allocations // FEW)
    fill_up_at(writer, places, range(random.randrange(stride), writer.allocations, stride))


@pytest.mark.slow
def test_a_full_disk_at_every_call(writer: Job, places: Places) -> None:
    fill_up_at(writer, places, range(writer.allocations))
