"""SIGKILL before every writing call, and at random.

No name is lost, the data is valid, and the same command completes the job.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from tests.crash.scene import KILLED, Job, Places, check_sound, names, side_by_side

FEW = 3  # kills per command


def break_off(job: Job, places: Places, number: int, *, torn: bool = False) -> None:
    place = places.new(job.template)
    done = place.run(*job.argv, kill=number, torn=torn)
    assert done.code in (KILLED, 0), done.err  # threads: this run may have fewer calls
    try:
        job.check_broken(place)
        job.finish(place)
    except AssertionError as error:
        error.add_note(f"{job.verb}, killed before call {number}, torn: {torn}, {place.directory}")
        raise
    places.drop(place)


def test_kill_at_sampled_calls(job: Job, places: Places) -> None:
    """Calls are sampled evenly over the command, with a random start."""
    stride = max(1, job.calls // FEW)
    numbers = range(random.randrange(stride), job.calls, stride)
    side_by_side([partial(break_off, job, places, n, torn=n % 2 == 1) for n in numbers])


@pytest.mark.slow
def test_kill_at_every_call(job: Job, places: Places) -> None:
    for torn in (False, True):
        side_by_side([partial(break_off, job, places, n, torn=torn) for n in range(job.calls)])


# -- random kills


def live_through(places: Places, make_job: Any, seed: int, kills: int) -> None:
    """Kill commands on one store in succession, without repeating any of them at once."""
    draw = random.Random(seed)
    place = places.new(make_job("tag").template)
    (remote, pulled), (made, created) = (
        next((name, digest) for name, digest in job.wanted.items() if name not in job.before)
        for job in (make_job("pull-new"), make_job("create-new"))
    )
    pull, create = make_job("pull-new").argv, make_job("create-new").argv
    killed = 0
    for _ in range(20 * kills):
        before = names(place.store)
        source, name = draw.choice(sorted(before)), f"tagged:v{draw.randrange(4)}"
        victim = draw.choice([*sorted(before.keys() - {"keep:v1"}), ""])
        verb = draw.choice(["pull", "create", "tag", "rm" if victim else "tag", "gc"])
        argv, change = {
            "pull": (pull, {remote: pulled}),
            "create": (create, {made: created}),
            "tag": (("tag", source, name), {name: before[source]}),
            "rm": (("rm", victim), {victim: ""}),
            "gc": (("gc", "--grace", "0"), {}),
        }[verb]
        done = place.run(*argv, after=draw.expovariate(1 / 0.03))
        killed += done.code == KILLED
        said = f"seed {seed}: {argv} ended with {done.code} in {place.directory}\n{done.err}"
        assert done.code in (KILLED, 0), said
        try:
            kept = {name: digest for name, digest in before.items() if name not in change}
            found = check_sound(place.store, keeps=kept)
            wanted = {name: digest for name, digest in (before | change).items() if digest}
            assert found.items() <= before.items() | wanted.items()
            assert done.code == KILLED or found == wanted
        except AssertionError as error:
            error.add_note(said)
            raise
        if killed == kills:
            break
    assert killed == kills
    for argv in (pull, create):
        assert place.run(*argv).code == 0
    wanted = names(place.store)
    assert (wanted[remote], wanted[made]) == (pulled, created)
    Collector(ImageLayout(place.store), grace=0).run()
    assert list((place.store / ".aimage" / "ingest").iterdir()) == []
    assert check_sound(place.store, keeps={}) == wanted


@pytest.mark.integration
@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_at_random(places: Places, make_job: Callable[[str], Job], kills: int) -> None:
    """Half of the kills in each of two stores."""
    halves = (kills // 2, kills - kills // 2)
    for verb in ("pull-new", "create-new", "tag"):
        make_job(verb)
    side_by_side([partial(live_through, places, make_job, secrets.randbits(32), n) for n in halves])
