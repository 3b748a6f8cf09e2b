"""File systems where flock has no effect.

Bytes may be fetched twice, but no byte is wrong and no name is lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.verify import verify
from tests.crash.scene import (
    KILLED,
    Job,
    Place,
    Places,
    check_finished,
    check_sound,
)
from tests.process import Done

PROCESSES, NAMES = 4, 4


@pytest.fixture
def place(places: Places, template: Path) -> Place:
    return places.new(template)


def run(place: Place, *argv: str) -> Done:
    done = place.run(*argv, locks=False)
    assert done.code == 0, f"{argv}: {done.err}"
    return done


def together(*calls: Callable[..., Done | None]) -> None:
    """Start all at the same time, each in its own thread."""
    barrier = threading.Barrier(len(calls))

    def one(call: Any) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[None]] = [pool.submit(one, call) for call in calls]
    for future in futures:
        future.result()


@pytest.mark.integration
@pytest.mark.parametrize("locks", [True, False])
def test_an_ineffective_lock_uses_anonymous_ingests(
    place: Place, make_job: Callable[[str], Job], locks: bool
) -> None:
    """A precondition of the other tests: a blob then has a private ingest file."""
    job = make_job("pull")
    assert place.run(*job.argv, kill=job.calls // 2, locks=locks).code == KILLED
    left = {path.suffix for path in (place.store / ".aimage" / "ingest").iterdir()}
    assert left <= {"", ".journal"} if locks else not left & {"", ".journal"}


@pytest.mark.integration
def test_concurrent_tags_and_pulls_without_locks(
    place: Place, remote: str, make_job: Callable[[str], Job]
) -> None:
    before = place.names()
    pulled = make_job("pull-new").wanted

    def one(who: int) -> None:
        run(place, "-q", "pull", remote, "--jobs", "2")
        for number in range(NAMES):
            run(place, "tag", "keep:v1", f"who{who}:v{number}")

    together(*(lambda who=who: one(who) for who in range(PROCESSES)))
    tagged = {f"who{who}:v{n}": before["keep:v1"] for who in range(PROCESSES) for n in range(NAMES)}
    wanted = before | pulled | tagged
    assert check_sound(place.store, keeps={}) == wanted  # our verbs already list all of them
    last = place.run("tag", "keep:v1", "last:v1")
    assert last.code == 0
    wanted |= {"last:v1": before["keep:v1"]}
    check_finished(place.store, wanted)
    listed = json.loads(place.run("ls", "--json").out)
    assert {entry["reference"] for entry in listed} == wanted.keys()


def collect_beside(place: Place, *arguments: str, pull: Callable[[], Done]) -> None:
    """Collect repeatedly until four processes have done ``pull``."""
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            place.run("gc", *arguments, locks=False)

    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(collect)
        try:
            together(*[pull] * PROCESSES)
        finally:
            ended.set()
    collecting.result()


@pytest.mark.integration
def test_concurrent_collections_and_pulls_without_locks(
    place: Place, remote: str, make_job: Callable[[str], Job]
) -> None:
    """With the default grace period."""
    wanted = place.names() | make_job("pull-new").wanted
    collect_beside(place, pull=lambda: run(place, "-q", "pull", remote))
    assert check_sound(place.store, keeps={}) == wanted


@pytest.mark.integration
def test_blobs_taken_by_collections_without_grace_are_fetched_again(
    place: Place, remote: str, make_job: Callable[[str], Job]
) -> None:
    """Nothing stops a collection from missing a pull that starts meanwhile."""
    before = place.names()
    collect_beside(place, "--grace", "0", pull=lambda: place.run("-q", "pull", remote, locks=False))
    report = verify(ImageLayout(place.store))
    assert {problem.kind for problem in report.problems} <= {"missing"}
    assert before.items() <= place.names().items()
    run(place, "-q", "pull", remote)
    assert check_sound(place.store, keeps=before) == before | make_job("pull-new").wanted
