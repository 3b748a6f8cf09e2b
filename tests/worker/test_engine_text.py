"""Texts of language models: in turns within a process, and by many clients of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.dialect import AImage
from clowder_aimage.engine import engine, frame, runner
from clowder_aimage.engine.admission import CALLER, BusyError
from clowder_aimage.engine.event import Event
from clowder_aimage.engine.process import ModelProcess
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.text.language_model import (
    ContextError,
    EmbeddingRequest,
    Embeddings,
    Sampling,
    TextDelta,
    TextEnd,
    TextRequest,
    Token,
    ToolCall,
)
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Reference
from tests.program import need_package
from tests.text.tiny_text import write_model
from tests.wait import until_async
from tests.worker.engine_runs import NAME, played, sample, stocked
from tests.worker.scripted_language_model import CONTEXT, ScriptedLanguageModel

REAL = runner._COMMAND
COMMAND = (sys.executable, "-m", "tests.worker.scripted_language_model")


@pytest.fixture(scope="module")
def stocked_store(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    return stocked(tmp_path_factory.mktemp("store"))


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "_COMMAND", COMMAND)
    monkeypatch.setattr(engine, "find_runtime", lambda _: "scripted")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield


def asked(text: str, **options: Any) -> TextRequest:
    return TextRequest(({"role": "user", "content": text},), **options)


def written(engine: Any, request: Any, name: str = "tiny") -> Any:
    """Return the events of a request for text."""

    def make(_: AImage) -> Any:
        return request

    return engine.generate(Reference.parse(name), make, is_text=True)


async def heard(engine: Any, request: Any) -> list[Event]:
    async with contextlib.aclosing(written(engine, request)) as events:
        return [event async for event in events]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


# -- within a process


def replies(model: ScriptedLanguageModel, *commands: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replies of a process with ``model`` to commands that arrive together."""
    target = io.BytesIO()
    process = ModelProcess(io.BytesIO(b""), target)
    process._model = model
    for command in commands:
        process._execute(command)
    process._commands.put({"do": "nothing"})  # arrives later
    assert process._commands.get() == {"do": "nothing"}
    while process._texts:
        process._take_turns()
    target.seek(0)
    found = []
    while (one := frame.read(target)) is not None:
        found.append(one[0])
    return found


def write(number: int, text: str) -> dict[str, Any]:
    return {"do": "write", "id": number, "request": {"prompt": text}}


def test_texts_are_read_in_turns() -> None:
    found = replies(ScriptedLanguageModel(2), write(1, "a b"), write(2, "c d"))
    pieces = [one["text"] for one in found if one["is"] == "piece"]
    assert pieces == ["a ", "c ", "b ", "d "]
    assert [one["id"] for one in found if one["is"] == "done"] == [1, 2]


def test_an_error_ends_only_its_own_text() -> None:
    model = ScriptedLanguageModel(2)
    found = replies(model, write(1, "a fail"), write(2, "c d"))
    (error,) = [one for one in found if one["is"] == "error"]
    assert (error["id"], error["kind"]) == (1, "ModelError") and "secret" not in str(error)
    assert [one["text"] for one in found if one.get("id") == 2 and one["is"] == "piece"] == [
        "c ",
        "d ",
    ]
    assert model.open == 0


def embed(number: int, *texts: str) -> dict[str, Any]:
    return {"do": "embed", "id": number, "request": {"texts": texts}}


def test_embeddings_are_computed_in_parts_between_the_pieces_of_texts() -> None:
    model = ScriptedLanguageModel(2)
    found = replies(model, embed(1, *["a"] * 20, "b" * 5000, "c"), write(2, "c d e"))
    (vectors,) = [one for one in found if one["is"] == "vectors"]
    assert model.embedded == [20 - 4, 4, 1, 1] and vectors["count"] == vectors["tokens"] == 22
    order = [one["is"] for one in found if one["is"] in ("piece", "vectors")]
    assert order == ["piece", "piece", "vectors"]  # after all of the text, in two frames


def test_embeddings_that_are_cancelled_are_not_computed_to_the_end() -> None:
    model = ScriptedLanguageModel(1)
    target = io.BytesIO()
    process = ModelProcess(io.BytesIO(b""), target)
    process._model = model
    process._execute(embed(1, *["a"] * 100))
    process._advance(1, process._texts[1])
    process._cancelled.add(1)
    process._advance(1, process._texts[1])
    assert model.embedded == [16] and not process._texts and not process._cancelled
    target.seek(0)
    assert [frame.read(target)[0]["is"] for _ in range(3)] == ["opening", "started", "done"]  # type: ignore[index]


# -- by clients of an engine


def test_all_events_of_a_text_arrive_and_errors_with_their_facts(
    stocked_store: LayeredStore,
) -> None:
    async def play(engine: Any) -> list[Any]:
        one = await heard(engine, asked("hm so call it", alternatives=1))
        two = await heard(engine, asked("one two three", max_tokens=2))
        three = await heard(engine, EmbeddingRequest(("ab", "c d")))
        with pytest.raises(ContextError) as found:
            await heard(engine, asked("a " * (CONTEXT + 1)))
        assert found.value.facts == {"tokens": str(CONTEXT + 1), "context": str(CONTEXT)}
        rates = [
            sample(engine, "aimage_text_tokens_total", model="tiny", kind=kind)
            for kind in ("prompt", "text")
        ]
        assert text_of(await heard(engine, asked("bye"))) == "bye "  # it ended before its process
        return [one, two, three, rates]

    one, two, three, rates = played(stocked_store, play)
    pieces = [event for event in one if isinstance(event, TextDelta)]
    assert [(piece.text, piece.kind) for piece in pieces][:2] == [
        ("hm ", "thinking"),
        ("so ", "content"),
    ]
    other = Token("other", (1, 2), -2.5)
    assert pieces[0].tokens == (Token("hm", (104, 109), -0.5, (other,)),)
    assert ToolCall("look", '{"at": 1}') in one
    assert one[-1] == TextEnd("stop", 7, 4, 3, 0.5, 0.25)
    assert text_of(two) == "one two " and two[-1].reason == "length"
    assert three[-1] == Embeddings(((2.0, 0.5), (3.0, 0.5)), 3)
    assert rates == [14, 7]


@pytest.mark.integration
def test_twenty_clients_of_a_real_model_are_served_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None falls behind, the 21st waits, and each has the text that it would have alone."""
    need_package("mlx_lm")
    monkeypatch.setattr(runner, "_COMMAND", REAL)
    monkeypatch.setattr(engine, "find_runtime", find_runtime)
    own, length = LayeredStore([tmp_path / "store"]), 90
    create(own, NAME, write_model(tmp_path / "model"))

    async def play(engine: Any) -> Any:
        counts = [0] * 21  # tokens
        at_last_begin, at_first_end = list[int](), list[int]()

        async def client(number: int) -> str:
            sampling = Sampling(temperature=1, top_k=9, seed=number)  # top_k: it does not end
            request = TextRequest(prompt="the ball", max_tokens=length, sampling=sampling)
            events = list[Event]()
            async with contextlib.aclosing(written(engine, request)) as coming:
                async for event in coming:
                    events.append(event)
                    if isinstance(event, TextDelta):
                        counts[number] += event.drawn.count
                        if not at_last_begin and min(counts[:20]):
                            at_last_begin.extend(counts)
                    elif isinstance(event, TextEnd) and not at_first_end:
                        at_first_end.extend(counts)
            assert isinstance(events[-1], TextEnd) and events[-1].tokens == length
            return text_of(events)

        texts = await asyncio.gather(*map(client, range(21)))  # they begin when it is loaded
        return texts, [await client(number) for number in (0, 20)], at_last_begin, at_first_end

    texts, alone, before, after = played(own, play, parallel=20, queue=2)
    assert [texts[0], texts[20]] == alone and len(set(texts)) == 21
    assert before and before[20] == after[20] == 0
    written_together = [end - begin for begin, end in zip(before[:20], after[:20], strict=True)]
    assert max(written_together) <= 2 * min(written_together) + 4


def test_more_requests_than_there_is_room_for_are_refused(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> list[Any]:
        clients = (heard(engine, asked("slow " * 20)) for _ in range(6))
        return await asyncio.gather(*clients, return_exceptions=True)

    outcomes = played(stocked_store, play, parallel=2, queue=1)
    refused = [one for one in outcomes if isinstance(one, BaseException)]
    assert len(refused) == 3 and all(isinstance(one, BusyError) for one in refused)


def test_a_client_that_leaves_ends_only_its_own_text(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> str:
        other = asyncio.create_task(heard(engine, asked("slow " * 50)))
        async with contextlib.aclosing(written(engine, asked("slow " * 500))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        (model,) = engine.list_loaded()
        await until_async(lambda: not model.runner.cancellations)
        assert model.users == 1 and not other.done()
        return text_of(await other)

    assert played(stocked_store, play, parallel=2) == "slow " * 50


@pytest.mark.integration
def test_a_crash_is_an_error_of_that_request_alone(stocked_store: LayeredStore) -> None:
    """The others go on in the next process."""
    rich = asked("hm " + "slow " * 8 + "call end", alternatives=1)

    async def play(engine: Any) -> Any:
        alone = await heard(engine, rich)
        begun = [rich, rich, asked("process " + "slow " * 8)]
        clients = [asyncio.create_task(heard(engine, one)) for one in begun]
        await until_async(lambda: sample(engine, "aimage_text_first_token_seconds_count") == 4)
        others = [asked("wait here"), asked("slow slow crash")]
        clients += [asyncio.create_task(heard(engine, one)) for one in others]
        return alone, await asyncio.gather(*clients, return_exceptions=True)

    alone, (first, second, other, silent, crash) = played(stocked_store, play, parallel=6)
    assert parts(first) == parts(second) == parts(alone) and len(parts(alone)) == 12
    assert text_of(silent) == "wait here "
    process, *rest = text_of(other).split()  # the beginning is that of the first process
    assert process.isdecimal() and rest == ["slow"] * 8
    assert type(crash).__name__ == "DiedError"


# Texts in the order in which they are begun, all open together; the last one ends or blocks their
# process. "left" is of a client that leaves then. How often each is begun, and which are answered
LONG = "slow " * 40
ENDS = {
    "blocked before it begins": ((f"left {LONG}", f"other {LONG}", "hang"), "121", ["other"]),
    "blocked by one of all": ((f"left {LONG}", f"other {LONG}", "late stall"), "111", []),
    "ended by one of all": ((f"some {LONG}", f"other {LONG}", "crash"), "222", ["some", "other"]),
    "ended by two": ((f"crash1 {LONG} crash", f"other {LONG}", "crash"), "222", []),
}


@pytest.mark.parametrize(("texts", "counts", "answered"), ENDS.values(), ids=ENDS)
@pytest.mark.integration
def test_a_text_is_begun_again_once_and_never_if_its_process_was_killed_for_it(
    stocked_store: LayeredStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: tuple[str, ...],
    counts: str,
    answered: list[str],
) -> None:
    monkeypatch.setenv("SCRIPTED_LOG", str(log := tmp_path / "log"))
    log.touch()

    async def play(engine: Any) -> dict[str, Any]:
        clients: dict[str, asyncio.Task[list[Event]]] = {}
        for text in texts:
            name = text.split()[0]
            clients[name] = asyncio.create_task(heard(engine, asked(text)))
            await until_async(lambda name=name: name in log.read_text())  # type: ignore[misc]
        if "left" in clients:
            is_blocked = lambda: texts[-1].split()[-1] in log.read_text()  # noqa: E731
            await until_async(is_blocked)
            clients["left"].cancel()
        outcomes = await asyncio.gather(*clients.values(), return_exceptions=True)
        return dict(zip(clients, outcomes, strict=True))

    outcomes = played(stocked_store, play, parallel=3, cancel_timeout=0.3)
    words = log.read_text().split()
    assert "".join(str(words.count(name)) for name in outcomes) == counts
    assert [name for name, one in outcomes.items() if isinstance(one, list)] == answered
    failed = [one for one in outcomes.values() if isinstance(one, Exception)]
    assert {type(one).__name__ for one in failed} <= {"DiedError"}


def test_others_are_served_while_a_schema_is_tried(
    stocked_store: LayeredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_LOG", str(log := tmp_path / "log"))

    async def play(engine: Any) -> Any:
        trial = asyncio.create_task(heard(engine, asked("a", schema={})))
        await until_async(log.exists)
        # The trial ends when this text has begun
        other = await heard(engine, asked("b"))
        with pytest.raises(UsageError, match="cannot be used") as caught:
            await trial
        return text_of(other), caught.value.facts

    # The only place of the model is that of the other text
    assert played(stocked_store, play, parallel=1) == ("b ", {"field": "response_format"})


def test_a_text_with_a_schema_that_is_accepted_is_written(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> str:
        return text_of(await heard(engine, asked("a b", schema={"const": True})))

    assert played(stocked_store, play, parallel=1, keep_alive=0) == "a b "


def test_the_next_place_is_for_a_caller_that_has_fewer_than_its_share(
    stocked_store: LayeredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_LOG", str(log := tmp_path / "log"))

    async def play(engine: Any) -> None:
        def ask(caller: str, text: str) -> asyncio.Task[list[Event]]:
            CALLER.set(caller)
            return asyncio.create_task(heard(engine, asked(text)))

        mine = [ask("me", f"mine{number} " + "slow " * 400) for number in range(4)]
        await until_async(lambda: log.exists() and log.read_text().count("mine") == 4)
        later = ask("me", "later")
        await until_async(lambda: engine.waiting == 1)
        theirs = ask("others", "theirs")
        await until_async(lambda: engine.waiting == 2)
        mine[0].cancel()
        await asyncio.gather(later, theirs)
        for task in mine:
            task.cancel()
        await asyncio.wait(mine)

    played(stocked_store, play, parallel=4)
    assert log.read_text().split()[4:] == ["theirs", "later"]


def test_the_model_gets_the_client_of_a_text(
    stocked_store: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str] = []
    send = Runner.send

    def record(self: Runner, message: dict[str, Any]) -> None:
        if message["do"] == "write":
            owners.append(message["request"]["owner"])
        send(self, message)

    async def play(engine: Any) -> None:
        CALLER.set("me")
        await heard(engine, asked("a", owner="others"))

    monkeypatch.setattr(Runner, "send", record)
    played(stocked_store, play)
    assert owners == ["me"]


def test_a_client_that_leaves_ends_the_trial_of_its_schema(
    stocked_store: LayeredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_LOG", str(log := tmp_path / "log"))

    async def play(engine: Any) -> None:
        trial = asyncio.create_task(heard(engine, asked("a", schema={})))
        await until_async(log.exists)
        trial.cancel()
        await until_async(lambda: "cancelled" in log.read_text())
        await until_async(lambda: not engine.list_loaded()[0].runner.cancellations)
        assert text_of(await heard(engine, asked("b"))) == "b "

    played(stocked_store, play, parallel=2)


def parts(events: list[Event]) -> list[Event]:
    """Return pieces, calls and the end, without its times."""
    kinds = TextDelta | ToolCall | TextEnd
    found = [one for one in events if isinstance(one, kinds)]
    return [replace(one, seconds=0) if isinstance(one, TextEnd) else one for one in found]


def test_the_advice_after_a_kill_is_for_language_models(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> None:
        async with contextlib.aclosing(written(engine, asked("slow " * 500))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    os.kill(engine.list_loaded()[0].runner.pid, signal.SIGKILL)

    with pytest.raises(ModelError, match=r"killed by signal 9, .* try a smaller context"):
        played(stocked_store, play)


def test_a_stop_ends_all_texts(stocked_store: LayeredStore) -> None:
    async def play(engine: Any) -> list[Any]:
        clients = [asyncio.create_task(heard(engine, asked("slow " * 500))) for _ in range(3)]
        await until_async(lambda: engine.list_loaded() and len(engine.list_loaded()[0].served) == 3)
        assert await engine.stop(NAME)
        return await asyncio.gather(*clients, return_exceptions=True)

    outcomes = played(stocked_store, play, parallel=4)
    assert [type(one).__name__ for one in outcomes] == ["StoppedError"] * 3
