"""The time that requests may compute: by default, from their turn on, and without waiting."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.engine import compute_deadline, engine, runner
from clowder_aimage.engine.admission import DeadlineError, EngineLimits
from clowder_aimage.engine.compute_deadline import (
    ComputeDeadline,
    PictureTimes,
    compute_picture_limit,
)
from clowder_aimage.engine.event import ImageEvent
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Digest
from tests.process import Aimage
from tests.text.tiny_text import write_model
from tests.wait import until, until_async
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.engine_runs import Client, FakeRunner, job, played, sample, served, stocked
from tests.worker.test_engine_text import COMMAND, asked, heard, text_of
from tests.worker.text_worker import scripted_worker

MODEL, OTHER = (Digest("sha256", letter * 64) for letter in "ab")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stocked_store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("store"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_COMMAND", COMMAND)
    monkeypatch.setattr(engine, "find_runtime", lambda _: "scripted")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def picture(side: int = 64, steps: int = 4, n: int = 1) -> GenerateRequest:
    return GenerateRequest.draft("a dog", width=side, height=side, steps=steps, n=n)


def test_the_limits_apply_by_default() -> None:
    assert (EngineLimits().text_deadline, EngineLimits().picture_deadline) == (600.0, 20.0)


@pytest.mark.parametrize(
    ("factor", "estimate", "seconds"),
    [(20, 0, 3600), (20, 1, 600), (20, 100, 2000), (0.5, 1e6, 5e5), (0, 100, math.inf)],
)
def test_the_limit_of_pictures(factor: float, estimate: float, seconds: float) -> None:
    assert compute_picture_limit(factor, estimate) == seconds


def test_the_estimate_follows_from_earlier_pictures_of_the_model() -> None:
    times = PictureTimes()
    times.observe(MODEL, picture(), 8.0)
    assert times.estimate(MODEL, picture()) == 8.0
    assert times.estimate(MODEL, picture(side=128, steps=8, n=2)) == 128.0
    assert times.estimate(OTHER, picture()) == 0.0
    times.observe(MODEL, picture(), 18.0)
    assert times.estimate(MODEL, picture()) == pytest.approx(11.0)


# -- texts


def limit_texts(engine: Any, seconds: float) -> None:
    engine.limits = replace(engine.limits, text_deadline=seconds)


def test_a_text_ends_at_its_limit_and_its_model_serves_the_next_one(
    stocked_store: LayeredStore, scripted: None
) -> None:
    async def play(engine: Any) -> Any:
        first = text_of(await heard(engine, asked("process")))
        limit_texts(engine, 0.1)
        with pytest.raises(DeadlineError, match=r"computed for 0\.1 seconds") as caught:
            await heard(engine, asked("slow " * 500))
        limit_texts(engine, math.inf)
        name = "aimage_generation_duration_seconds_count"
        failed = sample(engine, name, model="tiny", outcome="failed")
        return first, failed, caught.value.message, text_of(await heard(engine, asked("process")))

    first, failed, message, last = played(stocked_store, play)
    assert first == last  # of the same process
    assert failed == 1 and "request fewer tokens" in message


@pytest.mark.parametrize("text", ["hang", "late stall"])
def test_a_process_that_does_not_stop_at_the_limit_is_killed(
    stocked_store: LayeredStore, scripted: None, text: str
) -> None:
    async def play(engine: Any) -> tuple[str, str]:
        first = text_of(await heard(engine, asked("process")))
        limit_texts(engine, 0.1)
        with pytest.raises(DeadlineError):
            await heard(engine, asked(text))
        limit_texts(engine, math.inf)
        return first, text_of(await heard(engine, asked("process")))

    first, last = played(stocked_store, play, cancel_timeout=0.1)
    assert first != last


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that each text had computed when it began."""
    seconds: list[float] = []

    class Recorded(ComputeDeadline):
        def __init__(self, interrupt: Any, computed: float) -> None:
            seconds.append(computed)
            super().__init__(interrupt, computed)

    monkeypatch.setattr(engine, "ComputeDeadline", Recorded)
    return seconds


def test_waiting_for_a_turn_does_not_count(
    stocked_store: LayeredStore, scripted: None, begun: list[float]
) -> None:
    async def play(engine: Any) -> None:
        first = asyncio.create_task(heard(engine, asked("slow " * 20)))
        await until_async(lambda: begun)
        second = asyncio.create_task(heard(engine, asked("slow")))
        await until_async(lambda: engine.waiting)
        assert begun == [0.0]
        await asyncio.gather(first, second)

    played(stocked_store, play, parallel=1)
    assert begun == [0.0, 0.0]


def test_the_time_in_two_processes_counts_together(
    stocked_store: LayeredStore, scripted: None, begun: list[float]
) -> None:
    async def play(engine: Any) -> None:
        texts = (asked("slow " * 20 + "crash"), asked("slow " * 40))
        await asyncio.gather(*(heard(engine, one) for one in texts), return_exceptions=True)

    played(stocked_store, play, parallel=2)
    assert begun[:2] == [0.0, 0.0] and min(begun[2:]) > 0 and len(begun) == 4


# -- pictures


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.engine.scheduler.Runner", FakeRunner)


def test_a_picture_ends_at_its_limit(
    stocked_store: LayeredStore, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_deadline, "_LEAST", 0.1)

    async def play(engine: Any) -> Any:
        await served(engine, job())
        (model,) = engine.list_loaded()
        model.runner.is_running.clear()
        engine.limits = replace(engine.limits, picture_deadline=1.0)
        with pytest.raises(DeadlineError, match="the picture has been computed for"):
            await served(engine, job())
        model.runner.is_running.set()
        engine.limits = replace(engine.limits, picture_deadline=0.0)
        return await served(engine, job())

    assert isinstance(played(stocked_store, play, picture_deadline=0.0)[-1], ImageEvent)


def test_the_first_picture_of_a_model_has_a_limit_too(
    stocked_store: LayeredStore, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_deadline, "_UNMEASURED", 0.1)

    async def play(engine: Any) -> None:
        start = FakeRunner.start

        async def paused(*_: object, **__: object) -> FakeRunner:
            runner = await start()
            runner.is_running.clear()
            return runner

        monkeypatch.setattr(FakeRunner, "start", paused)
        client = Client(engine, job())
        with pytest.raises(DeadlineError, match="has been computed for"):
            await client.result()

    played(stocked_store, play)


# -- clients


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    home = tmp_path_factory.mktemp("deadline")
    here = Aimage(home, home / "store")
    here("create", "-q", "words", write_model(home / "words", "qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_run, "FLUSH_INTERVAL", 0.05)
        with scripted_worker(here, "--text-deadline", "0.3s") as found:
            yield found


def test_a_client_gets_504_with_a_sentence_and_need_not_try_again(worker: LocalWorker) -> None:
    body = {"model": "words", "messages": [{"role": "user", "content": "slow " * 500}]}
    url = f"{worker.url}/v1/chat/completions"
    status, headers, data = answer_to(urllib.request.Request(url, json.dumps(body).encode()))
    error = json.loads(data)["error"]
    assert (status, error["code"], headers["X-Should-Retry"]) == (504, "deadline_exceeded", "false")
    assert "the text has been computed for 0.3 seconds, its limit" in error["message"]


def test_a_line_of_a_batch_has_the_limit_as_well(worker: LocalWorker) -> None:
    url = "/v1/completions"
    body = {"model": "words", "prompt": "slow " * 500, "max_tokens": 900}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", line.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None and batch.request_counts.failed == 1
        assert batch.error_file_id is not None
        (failed,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["status_code"] == 504
