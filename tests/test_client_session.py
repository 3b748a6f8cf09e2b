"""Calls of a model in Python: from any thread, awaited, and cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage import AImageError, Answer, Model, Store, create, load
from clowder_aimage.client.work_thread import WorkThreads, check_cancelled
from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.language_model import TextDelta, TextEvent, TextRequest
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.wait import until
from tests.worker.scripted_language_model import ScriptedLanguageModel

NAME = Reference.parse("scripted")
SMALL: Any = {"size": "32x32", "steps": 2}


class Language(ScriptedLanguageModel):
    """A scripted model whose text never ends, if it begins with ``endless``, one in each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[TextRequest] = []
        self.threads: set[int] = set()

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        self.requests.append(request)
        self.threads.add(threading.get_ident())
        if request.messages[-1]["content"] == "endless":
            return self._repeat()
        return super().generate(request)

    def _repeat(self) -> Generator[TextEvent, None, None]:
        self.open += 1
        try:
            while True:
                yield TextDelta("again ")
        finally:
            self.open -= 1


@pytest.fixture
def language() -> Language:
    return Language()


@pytest.fixture
def model(language: Language) -> Iterator[Model]:
    with Model(NAME, language, WorkThreads("test"), ExitStack()) as found:
        yield found


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    store = Store(tmp_path_factory.mktemp("session") / "store")
    create("x", TINY, store=store)
    with load("x", store=store) as found:
        yield found


def test_a_language_model_answers_texts_and_messages(model: Model, language: Language) -> None:
    pieces = list[str]()
    answer = model.chat("notice hm a fox", on_text=pieces.append, system="Be brief.", stop="x")
    warnings = ("the template leaves out Ä",)
    assert answer == Answer("notice a fox ", "hm ", "stop", 7, 4, warnings)
    assert pieces == ["notice ", "a ", "fox "] and repr(model) == "<Model scripted:latest>"
    messages = [{"role": "user", "content": "a b c"}]
    assert model.chat(messages, max_tokens=2).reason == "length"
    first, second = language.requests
    assert [each["role"] for each in first.messages] == ["system", "user"]
    assert first.stop == ("x",) and second.messages == tuple(messages)


def test_texts_are_embedded(model: Model) -> None:
    assert model.embed(["a", "bb"]) == [(1.0, 0.5), (2.0, 0.5)]
    assert model.embed("abc", prompt="query") == [(3.0, 0.5)]
    assert asyncio.run(model.aembed("a")) == [(1.0, 0.5)]
    with pytest.warns(RuntimeWarning, match="1 of 2 texts were cut"):
        model.embed(["cut", "a"])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temperature": -1.0}, UsageError, "temperature must be between"),
        ({"max_tokens": 0}, UsageError, "max_tokens must be at least 1"),
        ({"none": 1}, TypeError, "none"),
    ],
)
def test_wrong_parameters_of_an_answer(
    model: Model, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        model.chat("x", **options)


def test_a_call_for_another_kind_of_model_is_refused(model: Model, image_model: Model) -> None:
    with pytest.raises(UsageError, match="is a language model"):
        model.generate("x")
    calls: list[Callable[[], object]] = [
        lambda: image_model.chat("x"),
        lambda: image_model.embed("x"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is not a language model"):
            call()


def test_all_threads_share_the_thread_of_a_model(model: Model, language: Language) -> None:
    answers = list[str]()
    threads = [
        threading.Thread(target=lambda word=word: answers.append(model.chat(word).text))
        for word in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["a ", "b ", "c "]
    assert len(language.threads) == 1 and threading.get_ident() not in language.threads


def test_a_callback_may_use_the_model(model: Model) -> None:
    inner = list[str]()
    model.chat("a b", on_text=lambda text: inner.append(model.chat(f"not {text}").text))
    assert inner == ["not a ", "not b "]


def test_a_callback_that_fails_ends_the_call_only(model: Model, language: Language) -> None:
    def fail(_: str) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        model.chat("endless", on_text=fail)
    assert not language.open and model.chat("a").text == "a "


def test_a_task_that_is_cancelled_cancels_the_work(model: Model, language: Language) -> None:
    async def cancel() -> Answer:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(
            model.achat("endless", on_text=lambda _: loop.call_soon_threadsafe(begun.set))
        )
        waiting = asyncio.create_task(model.achat("never"))
        # The loop is not blocked, although the model computes.
        await begun.wait()
        waiting.cancel()
        task.cancel()
        for each in (task, waiting):
            with pytest.raises(asyncio.CancelledError):
                await each
        return await model.achat("a fox")

    assert asyncio.run(cancel()).text == "a fox " and not language.open
    assert len(language.requests) == 2


def test_an_interrupt_cancels_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ended = WorkThreads("test"), threading.Event()
    begun = threading.Event()

    def work(is_cancelled: Callable[[], bool]) -> None:
        begun.set()
        until(is_cancelled)
        ended.set()
        check_cancelled(is_cancelled)

    def interrupt(*_: object) -> None:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        threads.run(work)
    threads.close()
    assert ended.is_set()


def test_a_closed_model_is_refused(model: Model) -> None:
    model.close()
    with pytest.raises(AImageError, match="the model is closed"):
        model.chat("a")
    with pytest.raises(AImageError, match="the model is closed"):
        asyncio.run(model.achat("a"))


def test_pictures_are_awaited_and_cancelled_between_steps(image_model: Model) -> None:
    seen = list[tuple[int, int]]()

    async def draw() -> list[bytes]:
        both = [image_model.agenerate("a fox", seed=seed, **SMALL) for seed in (1, 2)]
        made = [picture.pixels.tobytes() for (picture,) in await asyncio.gather(*both)]
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def note(*counts: int) -> None:
            seen.append((counts[0], counts[1]))
            loop.call_soon_threadsafe(begun.set)

        task = asyncio.create_task(image_model.agenerate("a fox", n=1000, progress=note, **SMALL))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (again,) = await image_model.agenerate("a fox", seed=1, **SMALL)
        return [*made, again.pixels.tobytes()]

    first, second, again = asyncio.run(draw())
    assert first == again != second
    assert image_model.generate("a fox", seed=1, **SMALL)[0].pixels.tobytes() == first
    assert seen[-1][0] < 2000


def test_a_language_model_has_neither_backend_nor_device(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    store = Store(tmp_path / "store")
    create("enhancer", Path(__file__).parents[1] / "examples/shapes/enhancer", store=store)
    with pytest.raises(UsageError, match="apply to image models"):
        load("enhancer", store=store, backend="mlx")
