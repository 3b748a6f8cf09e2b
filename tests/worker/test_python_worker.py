"""A worker in Python: the calls, results and errors of a model. Also with ``--gateway``."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clowder_aimage import AImageError, Model, Picture, Store, load
from clowder_aimage import Worker as PythonWorker
from clowder_aimage.errors import FormatError, NetworkError, NotFoundError, UsageError
from tests.scripted_worker import Says, ScriptedWorker, event, says
from tests.worker.conftest import LocalWorker

SMALL: Any = {"size": "32x48", "steps": 2, "seed": 5}
IMAGE = np.random.default_rng(0).integers(0, 256, (48, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def model(worker: LocalWorker) -> Iterator[Model]:
    with load("tiny", store=Store(worker.store)) as found:
        yield found


@pytest.fixture
def there(worker: LocalWorker) -> PythonWorker:
    return PythonWorker(worker.url, model="tiny")


@pytest.mark.integration
def test_a_worker_generates_the_pictures_of_a_model(there: PythonWorker, model: Model) -> None:
    seen, here = list[tuple[int, int]](), list[tuple[int, int]]()
    sent = there.generate("a fox", n=2, **SMALL, progress=lambda *it: seen.append(it))
    made = model.generate("a fox", n=2, **SMALL, progress=lambda *it: here.append(it))
    assert seen == here == [(done, 4) for done in range(5)]
    for remote, local in zip(sent, made, strict=True):
        assert (remote.pixels == local.pixels).all() and remote.seed == local.seed
        assert remote.facts == local.facts and repr(remote) == repr(local)
        assert remote.encode() == local.encode()


@pytest.mark.integration
def test_a_worker_is_sent_pictures(there: PythonWorker, model: Model) -> None:
    mask = np.zeros((48, 32), bool)
    mask[:24] = True
    options: Any = {"image": IMAGE, "mask": mask, "steps": 2, "seed": 1, "paste": True}
    (remote,), (local,) = there.generate("x", **options), model.generate("x", **options)
    assert (remote.pixels == local.pixels).all()


@pytest.mark.integration
@pytest.mark.parametrize(
    "options",
    [
        {"width": 7},
        {"size": "7x7"},
        {"image": b"text"},
        {"image": "no.png"},
        {"mask": IMAGE},
        {"image": IMAGE, "expand": (0, 0, 8, 0), "width": 64},
        {"fit": "bend"},
    ],
)
def test_a_worker_has_the_errors_of_a_model(
    there: PythonWorker, model: Model, options: Any
) -> None:
    errors = list[AImageError]()
    for session in (there, model):
        with pytest.raises(AImageError) as caught:
            session.generate("x", **options)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) and errors[0].message == errors[1].message


@pytest.mark.integration
def test_a_worker_serves_several_tasks(there: PythonWorker) -> None:
    async def draw() -> list[int]:
        calls = [there.agenerate("x", size="32x32", steps=1, seed=seed) for seed in range(3)]
        return [picture.seed for (picture,) in await asyncio.gather(*calls)]

    assert asyncio.run(draw()) == [0, 1, 2]


@pytest.mark.integration
def test_what_a_worker_lacks(worker: LocalWorker, there: PythonWorker) -> None:
    with pytest.raises(NotFoundError, match="none"):
        PythonWorker(worker.url, model="none").generate("x")
    with pytest.raises(UsageError, match="a file, which a worker does not read"):
        there.generate("x", loras=["a.safetensors"])
    with pytest.raises(UsageError, match="generates pictures"):
        there.chat("x")
    with pytest.raises(UsageError, match="invalid token"):
        PythonWorker(worker.url, token="a b")


def piece(**value: object) -> bytes:
    return event("message", value)


def test_answers_and_embeddings_of_a_worker() -> None:
    text = [
        piece(choices=[{"delta": {"reasoning_content": "hm"}}]),
        piece(choices=[{"delta": {"content": "a "}}]),
        piece(choices=[{"delta": {"content": "fox"}, "finish_reason": "stop"}]),
        piece(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}),
    ]
    headers = {"Content-Type": "text/event-stream", "X-Aimage-Warning": "no effort"}
    vectors = {"data": [{"embedding": [1, 0.5]}], "warnings": ["cut"]}
    script = iter([Says(text, 200, headers), says(vectors), Says(text[:2])])
    with ScriptedWorker(lambda _: next(script)).running() as scripted:
        there, pieces = PythonWorker(scripted.host, token="secret"), list[str]()
        answer = there.chat("x", temperature=0, on_text=pieces.append)
        assert (answer.text, answer.thinking, answer.tokens) == ("a fox", "hm", 4)
        assert pieces == ["a ", "fox"] and answer.warnings == ("no effort",)
        with pytest.warns(RuntimeWarning, match="cut"):
            assert there.embed("x") == [(1.0, 0.5)]
        with pytest.raises(NetworkError, match="before the answer was complete"):
            there.chat("x")
        body = scripted.asked[0].value
        # Without a name, the worker chooses its default model.
        assert "model" not in body and body["temperature"] == 0
        assert scripted.asked[0].headers["Authorization"] == "Bearer secret"


def test_a_picture_that_is_not_one_is_refused() -> None:
    done = event("done", {"data": [{"b64_json": "AAAA"}]})
    with ScriptedWorker(lambda _: Says([done])).running() as scripted:
        there = PythonWorker(scripted.host)
        with pytest.raises(FormatError, match="expected a PNG picture"):
            there.generate("x")


def test_warnings_of_a_worker_are_warnings() -> None:
    data = Picture(IMAGE, 1, {"warnings": ["known"]}).encode()
    fields = {"data": [{"b64_json": base64.b64encode(data).decode()}]}
    done = event("done", {**fields, "warnings": ["known", "slow"]})
    with (
        ScriptedWorker(lambda _: Says([done])).running() as scripted,
        pytest.warns(RuntimeWarning, match="slow") as caught,
    ):
        (picture,) = PythonWorker(scripted.host).generate("x", seed=1)
    assert len(caught) == 1 and (picture.pixels == IMAGE).all()


@pytest.mark.parametrize(
    ("repeated", "is_text"),
    [(event("progress", {"step": 1, "total": 2}), False), (b":\n\n", False), (b":\n\n", True)],
)
def test_a_cancelled_task_ends_the_request_of_a_worker(repeated: bytes, is_text: bool) -> None:
    """Also one that waits, for which only comments arrive."""
    loop = asyncio.new_event_loop()
    begun = asyncio.Event()

    def script(_: object) -> Says:
        loop.call_soon_threadsafe(begun.set)
        return Says(itertools.repeat(repeated))

    async def cancel(there: PythonWorker) -> None:
        task = loop.create_task(begin(there))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def begin(there: PythonWorker) -> object:
        return await (there.achat("x") if is_text else there.agenerate("x"))

    with ScriptedWorker(script).running() as scripted:
        loop.run_until_complete(cancel(PythonWorker(scripted.host)))
        assert scripted.left.wait(30)
    loop.close()
