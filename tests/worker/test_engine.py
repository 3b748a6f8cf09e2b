"""The engine with real model processes: events, cancellation, crashes and moved tags."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout.layered_store import LayeredStore

pytest.importorskip("mlx")
pytest.importorskip("prometheus_client")

from clowder_aimage.engine import frame
from clowder_aimage.engine.event import (
    ImageEvent,
    LoadingEvent,
    PreviewEvent,
    PullingEvent,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.engine.machine import lacks_memory
from clowder_aimage.engine.runner import Runner, parse_error
from clowder_aimage.errors import ModelError, NoMemoryError, NotFoundError, UsageError
from clowder_aimage.generate import load
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.pipeline import Image, Step
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.oci import Reference
from tests.model_script import ModelScript
from tests.picture_file import load_picture
from tests.scripted import Answer, ScriptedRegistry
from tests.wait import until, until_async
from tests.worker.engine_runs import (
    NAME,
    Client,
    children,
    job,
    played,
    served,
    stocked,
)


@pytest.fixture(scope="module")
def stocked_store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("engine") / "store")


def test_a_request_yields_queue_step_and_image_events(
    stocked_store: LayeredStore, tmp_path: Path
) -> None:
    """Also after an invalid request; previews have the requested encoding."""

    async def play(engine: Any) -> tuple[Any, Any, Any]:
        first = await served(engine, job(seed=7))
        second = await served(engine, job(seed=7))
        with pytest.raises(UsageError, match="multiple of 16"):
            await served(engine, job(parameters={"width": 33}))
        assert len(engine.list_loaded()) == 1
        encoding = PictureEncoding("jpeg", 80)
        asked = job(steps=4, encoding=encoding, parameters={"previews": 2})
        return first, second, await served(engine, asked)

    first, second, third = played(stocked_store, play)
    previews = [event for event in third if isinstance(event, PreviewEvent)]
    assert [one.number for one in previews] == [0, 1]
    assert all(one.data.startswith(b"\xff\xd8") for one in (*previews, third[-1]))
    drawn = [StartedEvent, Step, Step, ImageEvent]
    assert [type(event) for event in first] == [QueuedEvent, LoadingEvent, *drawn]
    assert [type(event) for event in second] == [QueuedEvent, *drawn]
    assert first[-1].data == second[-1].data
    path = tmp_path / "picture.png"
    path.write_bytes(first[-1].data)
    pixels, facts = load_picture(path)
    assert facts["seed"] == 7
    with stocked_store.lease() as lease:
        model = load(stocked_store, open_runnable(stocked_store, NAME, lease))
        request = GenerateRequest.draft("a dog", steps=2, seed=7).apply_defaults(
            model.stored.aimage
        )
        (image,) = [one for one in model.generate(request) if isinstance(one, Image)]
    assert image.pixels.tobytes() == pixels.tobytes()


@pytest.mark.integration
def test_a_killed_process_fails_its_request_and_is_started_again(
    stocked_store: LayeredStore,
) -> None:
    """Also one that is killed while it is idle."""

    async def play(engine: Any) -> tuple[Any, Any]:
        events = engine.generate(**job(steps=1000))
        async for event in events:
            if isinstance(event, Step):
                break
        os.kill(engine.list_loaded()[0].runner.pid, signal.SIGKILL)
        with pytest.raises(ModelError, match="killed by signal 9"):
            async for _ in events:
                pass
        second = await served(engine, job())
        runner = engine.list_loaded()[0].runner
        os.kill(runner.pid, signal.SIGKILL)
        await until_async(lambda: not runner.is_alive)
        return second, await served(engine, job())

    for events in played(stocked_store, play):
        assert [type(event) for event in events][1] is LoadingEvent
        assert isinstance(events[-1], ImageEvent)


@pytest.mark.integration
def test_a_tag_moved_during_a_load_does_not_affect_earlier_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stocked_store = stocked(tmp_path / "store")
    before, other = stocked_store.resolve(NAME), stocked_store.resolve(Reference.parse("other"))
    assert before.digest != other.digest
    start = Runner.start

    async def moved(*arguments: Any, **options: Any) -> Runner:
        stocked_store.tag(other, NAME)
        return await start(*arguments, **options)

    monkeypatch.setattr(Runner, "start", moved)

    async def play(engine: Any) -> Any:
        events = await served(engine, job())
        assert [one.digest for one in engine.list_loaded()] == [before.digest]
        return events[-1]

    picture = played(stocked_store, play)
    assert stocked_store.resolve(NAME).digest == other.digest
    path = tmp_path / "picture.png"
    path.write_bytes(picture.data)
    assert load_picture(path)[1]["digest"] == str(before.digest)


# -- models that arrive


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ModelScript:
    return ModelScript.of_tiny(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def model(packed: ModelScript) -> ModelScript:
    return ModelScript(packed.manifest, packed.blobs, packed.names)


def awaited(condition: Any) -> Answer | None:
    """Wait in a registry's thread; answer 404 if the condition does not come true."""
    try:
        until(condition)
    except AssertionError:
        return Answer(404)
    return None


@pytest.mark.integration
def test_a_model_is_loaded_while_it_is_pulled(tmp_path: Path, model: ModelScript) -> None:
    before = children()
    model.answers[model.last("transformer")] = lambda: awaited(lambda: children() - before)
    stocked_store = LayeredStore([tmp_path / "store"])
    with ScriptedRegistry(model).running() as registry:
        one = job(f"{registry.host}/team/model")

        async def play(engine: Any) -> list[Any]:
            return [await served(engine, one) for _ in range(2)]

        early, later = played(stocked_store, play)
    assert isinstance(early[-2], Step)
    assert any(isinstance(event, PullingEvent) for event in early)
    assert not any(isinstance(event, PullingEvent) for event in later)
    assert early[-1].data == later[-1].data


@pytest.mark.integration
def test_a_cancelled_request_leaves_the_pull_and_the_model_to_others(
    tmp_path: Path, model: ModelScript
) -> None:
    before, left = children(), threading.Event()
    model.answers[model.last("vae")] = lambda: awaited(left.is_set)

    async def play(engine: Any) -> Any:
        first, second = (Client(engine, job(f"{registry.host}/team/model")) for _ in range(2))
        await until_async(lambda: children() - before)
        await first.leave()
        left.set()
        return await second.result()

    with ScriptedRegistry(model).running() as registry:
        events = played(LayeredStore([tmp_path / "store"]), play)
    assert isinstance(events[-1], ImageEvent)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.integration
def test_a_failed_pull_ends_the_process_that_was_loaded_for_it(
    tmp_path: Path, model: ModelScript, is_loaded: bool
) -> None:
    before, engines = children(), list[Any]()

    def gone() -> Answer:
        awaited(lambda: engines[0].list_loaded() if is_loaded else children() - before)
        return Answer(404)

    # the encoder, the last part of the VAE, is not loaded
    model.answers[model.last("vae" if is_loaded else "transformer")] = gone
    stocked_store = LayeredStore([tmp_path / "store"])

    async def play(engine: Any) -> None:
        engines.append(engine)
        with pytest.raises(NotFoundError):
            await served(engine, job(f"{registry.host}/team/model"))
        await until_async(lambda: not children() - before)

    with ScriptedRegistry(model).running() as registry:
        played(stocked_store, play)
    assert not list(stocked_store.list_tags())


# -- frames


def test_cancelling_receive_in_the_middle_of_a_frame_loses_no_data() -> None:
    whole = frame.encode({"is": "step", "index": 1}, b"x" * 100)
    script = (
        "import sys\n"
        f"whole = {whole!r}\n"
        "out = sys.stdout.buffer\n"
        "out.write(whole[:30]); out.flush(); sys.stderr.write('half\\n'); sys.stderr.flush()\n"
        "sys.stdin.buffer.read(1)\n"
        "out.write(whole[30:] + whole); out.flush()\n"
    )

    async def play() -> list[tuple[dict[str, Any], bytes]]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdin=pipe, stdout=pipe, stderr=pipe
        )
        child = Runner(process, 30.0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await child.receive()
        child.send({"do": "go on"})
        found = [await child.receive(), await child.receive()]
        with pytest.raises(ModelError, match="process exited"):
            await child.receive()
        await child.end(0)
        return found

    assert (
        asyncio.run(asyncio.wait_for(play(), 60)) == [({"is": "step", "index": 1}, b"x" * 100)] * 2
    )


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (RuntimeError("[malloc_or_wait] Unable to allocate 5 bytes."), True),
        (RuntimeError("cudaMallocAsync failed: out of memory"), True),
        (RuntimeError("[matmul] shapes do not fit"), False),
        (ValueError("a dog that is out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(
    error: MemoryError | RuntimeError | ValueError, lacks: bool
) -> None:
    assert lacks_memory(error) is lacks
    if lacks:
        said = {"kind": "NoMemoryError", "message": "not enough memory", "hint": None}
        assert isinstance(parse_error(said), NoMemoryError)
