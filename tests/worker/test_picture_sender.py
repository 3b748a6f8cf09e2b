"""Pictures are encoded and sent while the next ones are computed."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clowder_aimage import generate
from clowder_aimage.engine import frame
from clowder_aimage.engine.event import ComputedEvent, Event, ImageEvent
from clowder_aimage.engine.picture_sender import MAX_WAITING, PictureSender
from clowder_aimage.engine.process import ModelProcess
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.pipeline import Image, Preview, Step
from clowder_aimage.pictures import generated_picture
from tests.wait import until_async
from tests.worker.engine_runs import Client, FakeRunner, job, played, stocked

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
# Seconds after which a test fails that would wait for ever
LONG = 20


class Model:
    """A model of pictures of one pixel, in two steps; ``on_step`` is called before each."""

    def __init__(self, on_step: Callable[[int, int], None] = lambda *_: None) -> None:
        self._on_step = on_step
        self.stored = SimpleNamespace(descriptor=SimpleNamespace(digest="sha256:0"))
        self.batches = BatchTable()
        self.pipeline = SimpleNamespace(fixed_adapters=())

    def plan_marking(self, *_: Any, **__: Any) -> None:
        """Return no marking."""

    def open(self, request: GenerateRequest) -> Iterator[Step | Preview | Image]:
        pixels = np.zeros((1, 1, 3), np.uint8)
        for picture in range(request.output.n):
            seed = request.sampling.seed + picture
            for index in (1, 2):
                self._on_step(seed, index)
                yield Step(index, 2, picture)
            yield Image(pixels, seed, picture)


def command(number: int, n: int = 1) -> dict[str, Any]:
    """Return the command of a request with the seeds from ten times its number on."""
    request = GenerateRequest.of("a fox", width=16, height=16, steps=2, seed=10 * number, n=n)
    encoding = {"kind": "png", "quality": None, "has_facts": False}
    common = {"do": "generate", "id": number, "reference": "it", "manifest": {}}
    return {**common, "request": request.to_json(), "encoding": encoding}


def answer(
    model: Model,
    encode: Callable[[Image], bytes],
    commands: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> list[dict[str, Any]]:
    """Return the replies of a process to commands; it ends once all have ended."""

    def encode_image(image: Image, facts: Any, *_: Any) -> Any:
        return SimpleNamespace(data=encode(image), facts=facts)

    monkeypatch.setattr(generate, "describe_picture", lambda *_: {})
    monkeypatch.setattr(generated_picture, "encode_image", encode_image)
    monkeypatch.setattr(ModelProcess, "_open_variant", lambda *_: model)
    replies: list[dict[str, Any]] = []
    is_over = threading.Semaphore(0)

    class Target(io.BytesIO):
        def write(self, data: Any) -> int:
            found = frame.read(io.BytesIO(data))
            assert found is not None
            replies.append(found[0])
            if found[0]["is"] in ("done", "error"):
                is_over.release()
            return len(data)

    class Source(io.BytesIO):
        """The commands; the end comes once all requests have ended."""

        def read(self, size: int | None = -1) -> bytes:
            if size and self.tell() == len(self.getvalue()):
                assert all(is_over.acquire(timeout=LONG) for _ in commands)
            return super().read(size)

    process = ModelProcess(Source(b"".join(map(frame.encode, commands))), Target())
    process._model = model
    process.run()
    return replies


def list_kinds(replies: list[dict[str, Any]], number: int) -> list[str]:
    return [reply["is"] for reply in replies if reply["id"] == number]


@pytest.mark.parametrize("commands", [[command(1, n=3)], [command(1), command(2), command(3)]])
def test_no_step_waits_for_an_encoder(
    commands: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that ends once the first step of the next picture has begun: of one or three."""
    begun: list[int] = []
    changed = threading.Condition()

    def note(seed: int, index: int) -> None:
        with changed:
            begun.append(seed)
            changed.notify_all()

    def encode(image: Image) -> bytes:
        pictures = 3
        with changed:
            next_number = len(dict.fromkeys(begun[: begun.index(image.seed) + 1])) + 1
            if next_number <= pictures:
                is_begun = lambda: len(dict.fromkeys(begun)) >= next_number  # noqa: E731
                assert changed.wait_for(is_begun, LONG), "the next picture waits for this one"
        return b"file"

    replies = answer(Model(note), encode, commands, monkeypatch)
    numbers = [one["id"] for one in commands]
    for number in numbers:
        kinds = list_kinds(replies, number)
        pictures = 3 // len(numbers)
        assert kinds.count("image") == pictures and kinds[-1] == "done"
        # The model is free before the last picture is encoded
        assert kinds.index("computed") < len(kinds) - 1
    assert not any(reply["cancelled"] for reply in replies if reply["is"] == "done")


def test_an_encoder_that_fails_ends_its_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(image: Image) -> bytes:
        if image.seed == 11:
            raise ModelError("the encoder failed")
        return b"file"

    replies = answer(Model(), encode, [command(1, n=9), command(2)], monkeypatch)
    assert list_kinds(replies, 1).count("image") == 1
    assert [reply["message"] for reply in replies if reply["is"] == "error"] == [
        "the encoder failed"
    ]
    assert list_kinds(replies, 2)[-2:] == ["image", "done"]


def test_pictures_that_are_finished_come_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    is_failing = threading.Event()

    def fail(seed: int, _: int) -> None:
        if seed == 11:
            is_failing.set()
            raise ModelError("the second picture failed")

    def encode(_: Image) -> bytes:
        assert is_failing.wait(LONG)
        return b"file"

    replies = answer(Model(fail), encode, [command(1, n=2)], monkeypatch)
    kinds = list_kinds(replies, 1)
    assert kinds[-2:] == ["image", "error"] and "computed" not in kinds


def test_pictures_that_wait_for_the_encoder_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast model waits for a slow encoder: the memory for pictures has a bound."""
    computed, encoded, most = 0, 0, 0

    def note(_: int, index: int) -> None:
        nonlocal computed, most
        computed += index == 2
        most = max(most, computed - encoded)

    def encode(_: Image) -> bytes:
        nonlocal encoded
        threading.Event().wait(0.002)
        encoded += 1
        return b"file"

    answer(Model(note), encode, [command(1, n=12)], monkeypatch)
    # Those that wait, one at the encoder, one that waits for a place, and one in computation
    assert 1 < most <= MAX_WAITING + 3


def test_the_rest_is_left_out_once_the_worker_has_exited() -> None:
    @contextmanager
    def report(_: int) -> Iterator[None]:
        yield

    sent: list[int] = []

    def send(number: int) -> None:
        sent.append(number)
        raise BrokenPipeError

    reports: Callable[[int], AbstractContextManager[None]] = report
    sender = PictureSender(reports)
    for number in range(2 * MAX_WAITING):
        sender.put(1, lambda number=number: send(number))  # type: ignore[misc]
    sender.wait(1)
    assert len(sent) == 2 * MAX_WAITING


class EncodingRunner(FakeRunner):
    """A model that is free once a request is computed; its picture follows with ``encoded``."""

    waiting: int = 0
    encoded: Any = None

    @property
    def is_encoding(self) -> bool:  # type: ignore[override]
        return self.waiting > 0

    async def generate(
        self,
        name: str,
        manifest: object,
        request: GenerateRequest,
        encoding: object,
        on_event: Callable[[Event], None],
    ) -> None:
        pictures: list[Any] = []

        def hold(event: Any) -> None:
            (pictures if isinstance(event, ImageEvent) else heard).append(event)

        heard: list[Any] = []
        await super().generate(name, manifest, request, encoding, hold)
        for event in heard:
            on_event(event)
        self.waiting += 1
        type(self).total_computed += 1
        on_event(ComputedEvent())
        await self.encoded.wait()
        self.waiting -= 1
        on_event(pictures[0])

    total_computed = 0


def test_a_worker_begins_the_next_request_while_a_picture_is_encoded(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is not taken for idle meanwhile: the pictures would be lost with it."""
    store: LayeredStore = stocked(tmp_path / "store")
    monkeypatch.setattr(EncodingRunner, "total_computed", 0)
    monkeypatch.setattr(Runner, "start", EncodingRunner.start)

    async def play(engine: Any) -> list[Any]:
        monkeypatch.setattr(EncodingRunner, "encoded", asyncio.Event())
        clients = [Client(engine, job(seed=seed)) for seed in (1, 2)]
        await until_async(lambda: EncodingRunner.total_computed == 2)
        (model,) = engine.list_loaded()
        assert not model.served and not model.is_idle
        assert not any(isinstance(event, ImageEvent) for one in clients for event in one.heard)
        EncodingRunner.encoded.set()
        events = [await client.task for client in clients]
        assert model.is_idle
        return events

    for events in played(store, play):
        assert isinstance(events[-1], ImageEvent)
        assert not any(isinstance(event, ComputedEvent) for event in events)
