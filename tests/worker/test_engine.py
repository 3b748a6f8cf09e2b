"""The engine with real model processes: turns, limits, cancelling, crashes, and who goes when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal

import pytest

pytest.importorskip("mlx")
pytest.importorskip("prometheus_client")

from clowder_aimage.engine.engine_error import BusyError, DeadlineError, StoppedError
from clowder_aimage.engine.event import (
    ImageEvent,
    LoadingEvent,
    PreviewEvent,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError, NotFoundError, UsageError
from clowder_aimage.generate import find, load
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.picture import load_picture
from clowder_aimage.model.pipeline import GenerateRequest, Image, PictureEncoding, Step
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.worker.playing import NAME, job, played, sample, served, stocked


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stocked(tmp_path_factory.mktemp("engine") / "store")


def test_a_request_hears_of_its_turn_its_steps_and_its_picture(store, tmp_path):
    async def play(engine):
        first = await served(engine, job(seed=7))
        second = await served(engine, job(seed=7))
        return first, second

    first, second = played(store, play)
    drawn = [StartedEvent, Step, Step, ImageEvent]
    assert [type(event) for event in first] == [QueuedEvent, LoadingEvent, *drawn]
    assert [type(event) for event in second] == [QueuedEvent, *drawn]
    assert first[-1].data == second[-1].data
    path = tmp_path / "picture.png"
    path.write_bytes(first[-1].data)
    pixels, facts = load_picture(path)
    assert facts["seed"] == 7
    with store.lease() as lease:
        model = load(store, find(store, NAME, lease))
        request = GenerateRequest.for_model(model.stored.aimage, "a dog", steps=2, seed=7)
        (image,) = [one for one in model.generate(request) if isinstance(one, Image)]
    assert image.pixels.tobytes() == pixels.tobytes()


def test_previews_and_other_encodings(store):
    async def play(engine):
        encoding = PictureEncoding("jpeg", 80)
        asked = job(steps=4, encoding=encoding, parameters={"previews": 2})
        return await served(engine, asked)

    events = played(store, play)
    previews = [event for event in events if isinstance(event, PreviewEvent)]
    assert [one.number for one in previews] == [0, 1]
    assert all(one.data.startswith(b"\xff\xd8") for one in (*previews, events[-1]))


def test_past_the_queue_requests_are_refused_at_once(store):
    async def play(engine):
        async def one(seed):
            try:
                await served(engine, job(seed=seed))
            except BusyError as error:
                return error.retry_after
            return "served"

        found = await asyncio.gather(*(one(seed) for seed in range(20)))
        after = await one(99)
        return found, after, engine.waiting

    found, after, waiting = played(store, play, queue=4)
    assert found.count("served") == 5  # one at work, and four that wait
    assert all(retry >= 1 for retry in found if retry != "served")
    assert (after, waiting) == ("served", 0)


def test_who_leaves_frees_the_engine_within_a_step(store):
    async def play(engine):
        async with contextlib.aclosing(engine.generate(**job(steps=1000))) as events:
            seen = 0
            async for event in events:
                seen += isinstance(event, Step)
                if seen == 3:
                    break
        steps = _count(engine, "aimage_generation_step_seconds_count")
        again = await served(engine, job())
        return steps, again, _count(engine, "aimage_generation_cancelled_total")

    steps, again, cancelled = played(store, play)
    assert steps == 3
    assert isinstance(again[-1], ImageEvent)
    assert cancelled == 1


def test_who_leaves_the_queue_makes_room(store):
    async def play(engine):
        running = engine.generate(**job(steps=300))
        await anext(running)
        while not isinstance(await anext(running), Step):
            pass
        waiting = asyncio.create_task(served(engine, job()))
        while engine.waiting == 0:
            await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        left = engine.waiting
        await running.aclose()
        return left

    assert played(store, play, queue=1) == 0


def test_a_process_that_is_killed_is_a_clean_error_and_the_next_request_works(store):
    async def play(engine):
        events = engine.generate(**job(steps=1000))
        async for event in events:
            if isinstance(event, Step):
                break
        os.kill(engine.loaded()[0].runner.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="killed by signal 9"):
            async for _ in events:
                pass
        return await served(engine, job())

    assert isinstance(played(store, play)[-1], ImageEvent)


def test_a_process_that_was_killed_while_idle_is_started_again(store):
    async def play(engine):
        await served(engine, job())
        runner = engine.loaded()[0].runner
        os.kill(runner.pid, signal.SIGKILL)
        while runner.is_alive:
            await asyncio.sleep(0.01)
        return await served(engine, job())

    assert [type(event) for event in played(store, play)][1] is LoadingEvent


def test_keep_alive(store):
    async def play(engine):
        await served(engine, job(keep_alive=0))
        gone = len(engine.loaded())
        await served(engine, job(keep_alive=0.05))
        await engine.expire()
        there = len(engine.loaded())
        await asyncio.sleep(0.06)
        await engine.expire()
        return gone, there, len(engine.loaded())

    assert played(store, play) in ((0, 1, 0), (0, 0, 0))  # slow machines take longer than 0.05 s


def test_for_ever_is_for_ever(store):
    async def play(engine):
        await served(engine, job(keep_alive=float("inf")))
        await engine.expire()
        (model,) = engine.loaded()
        return model.until

    assert played(store, play, keep_alive=0.0) is None


def test_the_model_that_was_idle_for_longest_makes_room(store):
    async def play(engine):
        await served(engine, job("tiny"))
        pid = engine.loaded()[0].runner.pid
        await served(engine, job("other"))
        return pid, [str(model.reference) for model in engine.loaded()]

    pid, names = played(store, play, models=1)
    assert names == ["other:latest"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # all of its memory is free


def test_two_models_may_stay(store):
    async def play(engine):
        await asyncio.gather(served(engine, job("tiny")), served(engine, job("other")))
        return sorted(str(model.reference) for model in engine.loaded())

    assert played(store, play, models=2) == ["other:latest", "tiny:latest"]


def test_stop_ends_what_runs(store):
    async def play(engine):
        events = engine.generate(**job(steps=1000))
        async for event in events:
            if isinstance(event, Step):
                break
        assert await engine.stop(NAME)
        with pytest.raises(StoppedError, match="was stopped"):
            async for _ in events:
                pass
        return len(engine.loaded()), await engine.stop(NAME)

    assert played(store, play) == (0, False)


def test_a_deadline(store):
    async def play(engine):
        await served(engine, job())
        engine.limits = dataclasses.replace(engine.limits, deadline=0.3)
        with pytest.raises(DeadlineError, match="took longer than"):
            await served(engine, job(steps=1000, parameters={"width": 256, "height": 256}))
        failed = sample(
            engine, "aimage_generation_duration_seconds_count", model="tiny", outcome="failed"
        )
        given_up = sample(engine, "aimage_generation_cancelled_total")
        engine.limits = dataclasses.replace(engine.limits, deadline=float("inf"))
        return failed, given_up, await served(engine, job(steps=1))

    failed, given_up, heard = played(store, play)
    assert (failed, given_up) == (1, 0)  # nobody has left
    assert isinstance(heard[-1], ImageEvent)


def test_a_bad_request_is_refused_and_the_model_stays(store):
    async def play(engine):
        with pytest.raises(UsageError, match="multiple of 16"):
            await served(engine, job(parameters={"width": 33}))
        return len(engine.loaded())

    assert played(store, play) == 1


@pytest.mark.parametrize("name", ["absent", "localhost:1/absent"])
def test_a_model_that_is_not_here(store, name):
    async def play(engine):
        with pytest.raises(NotFoundError, match="there is no model"):
            await served(engine, job(name, pull="never"))

    played(store, play)


def test_a_model_is_pulled_first_and_its_progress_is_heard(store, registry, repository, tmp_path):
    from clowder_aimage.engine.event import PullingEvent
    from clowder_aimage.push import push

    there = Reference.parse(f"{repository}:v1")
    store.tag(store.resolve(NAME), there)
    push(store, there, ClientOptions())
    fresh = LayeredStore([tmp_path / "fresh"])

    async def play(engine):
        return await served(engine, job(str(there)))

    events = played(fresh, play)
    pulling = [event for event in events if isinstance(event, PullingEvent)]
    assert pulling[-1].done == pulling[-1].total > 0
    assert isinstance(events[-1], ImageEvent)


def test_an_engine_that_ends_takes_nothing_more_and_lets_what_runs_end(store):
    async def play(engine):
        running = asyncio.create_task(served(engine, job(steps=50)))
        while not engine.loaded():
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.close(60))
        await asyncio.sleep(0)
        with pytest.raises(StoppedError):
            await served(engine, job())
        await closing
        return await running

    assert isinstance(played(store, play)[-1], ImageEvent)


def _count(engine, name):
    for line in engine.metrics.text().decode().splitlines():
        if line.startswith(name):
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError(name)


def test_a_tag_that_moves_while_its_model_is_loaded_changes_nothing_for_who_asked_before(
    tmp_path, monkeypatch
):
    store = stocked(tmp_path / "store")
    before, other = store.resolve(NAME), store.resolve(Reference.parse("other"))
    assert before.digest != other.digest
    start = Runner.start

    async def moved(*arguments, **options):
        store.tag(other, NAME)
        return await start(*arguments, **options)

    monkeypatch.setattr(Runner, "start", moved)

    async def play(engine):
        events = await served(engine, job())
        assert [one.digest for one in engine.loaded()] == [before.digest]
        return events[-1]

    picture = played(store, play)
    assert store.resolve(NAME).digest == other.digest
    path = tmp_path / "picture.png"
    path.write_bytes(picture.data)
    assert load_picture(path)[1]["digest"] == str(before.digest)
