"""Pictures that are computed at once: equal to those made alone, in turns with others."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.adapter import Adapter, DenseChange, LowRank
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.engine import process
from clowder_aimage.errors import ModelError, NoMemoryError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.flow.forward_pass import StepPasses
from clowder_aimage.model.library_choice import TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, Preview, Step
from tests.adapter.vectors import TINY
from tests.model.model_blobs import import_directory

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
SMALL = GenerateRequest.of("a fox", width=32, height=32, steps=3, seed=1)
SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "model"
# Of 32 and of 64 tokens with their padding
LONG = "a very long text about a fox " * 5
Uses = Sequence[tuple[LoadedAdapter, float]]


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return import_directory(TINY, tmp_path_factory.mktemp("blobs"))


def load(blobs: Any, **options: Any) -> Any:
    tuning = TorchTuning(device="cpu", **options)
    return load_pipeline(*blobs, backend="torch", dtype="float32", tuning=tuning)


@pytest.fixture(scope="module")
def alone(blobs: Any) -> Any:
    return load(blobs, batch=1)


@pytest.fixture
def together(blobs: Any) -> Any:
    return load(blobs, batch=8)


class Turns:
    """Requests of a pipeline, a step of all at a time, as in the process of a worker.

    ``events`` and ``errors`` are those of each request, by the order in which they were added.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._open: dict[int, Any] = {}
        self.events: list[list[Any]] = []
        self.errors: dict[int, Exception] = {}

    def add(self, request: GenerateRequest, uses: Uses = ()) -> None:
        self._pipeline.use_adapters(uses)
        self._open[len(self.events)] = self._pipeline.open(request)
        self.events.append([])

    def close(self, number: int) -> None:
        self._open.pop(number).close()

    def take(self) -> bool:
        """Let all requests go on to their next passes; return False if all have ended."""
        steps: list[StepPasses] = []
        for number, events in [*self._open.items()]:
            try:
                for event in events:
                    if isinstance(event, StepPasses):
                        steps.append(event)
                        break
                    self.events[number].append(event)
                else:
                    del self._open[number]
            except Exception as error:
                self.errors[number] = error
                del self._open[number]
        if steps:
            self._pipeline.compute(steps)
        return bool(steps)

    def finish(self) -> list[list[Image]]:
        """Return the pictures of all requests."""
        while self.take():
            pass
        return [[each for each in made if isinstance(each, Image)] for made in self.events]


def compare(
    alone: Any, made: Sequence[Sequence[Image]], requests: Sequence[tuple[GenerateRequest, Uses]]
) -> None:
    for (request, uses), images in zip(requests, made, strict=True):
        alone.use_adapters(uses)
        exact = [event for event in alone.generate(request) if isinstance(event, Image)]
        assert [each.seed for each in images] == [each.seed for each in exact]
        for image, expected in zip(images, exact, strict=True):
            difference = image.pixels.astype(int) - expected.pixels
            assert np.abs(difference).max() <= 1
            assert expected.batch == 1


def adapter(pipeline: Any, name: str, *, rank: int, seed: int, layer: int = 0) -> LoadedAdapter:
    tensor = f"transformer/layers.{layer}.{name}.weight"
    rows, columns = pipeline.shapes[tensor]
    values = np.random.default_rng(seed)
    down = values.standard_normal((rank, columns)).astype(np.float32)
    up = values.standard_normal((rows, rank)).astype(np.float32)
    changes = {tensor: (LowRank(down, up, 0.1),)}
    return LoadedAdapter(f"{name}{seed}", Adapter(name, changes))


def set_values(pipeline: Any) -> LoadedAdapter:
    """Return an adapter that changes the values of weights."""
    tensor = "transformer/layers.1.attention.to_k.weight"
    values = np.random.default_rng(2).standard_normal(pipeline.shapes[tensor])
    changes = {tensor: (DenseChange(0.1 * values.astype(np.float32)),)}
    return LoadedAdapter("values", Adapter("values", changes))


def test_pictures_of_a_batch_equal_those_made_alone(alone: Any, together: Any) -> None:
    """Of different prompts, lengths, seeds, guidance and adapters."""
    few = adapter(alone, "attention.to_v", rank=2, seed=1)
    many = adapter(alone, "feed_forward.w1", rank=20, seed=2, layer=1)
    requests: list[tuple[GenerateRequest, Uses]] = [
        (SMALL, ()),
        (SMALL.change(prompt=LONG, seed=2), [(few, 1.0)]),
        (SMALL.change(guidance=3.0, negative=LONG, seed=3), [(many, -0.5), (few, 0.2)]),
        (SMALL.change(guidance=2.0, guidance_end=0.5, cfg_normalization=0.8), [(few, 1.0)]),
        (SMALL.change(seed=9, n=2), ()),
    ]
    turns = Turns(together)
    for request, uses in requests:
        turns.add(request, uses)
    made = turns.finish()
    # Of the eight passes of the first step, as many as the table allows are computed at once
    assert {image.batch for images in made for image in images} == {8}
    compare(alone, made, requests)
    # The adapters of the batch are those of no later picture
    compare(alone, [[*_images(together, SMALL)]], [(SMALL, ())])


def _images(pipeline: Any, request: GenerateRequest) -> list[Image]:
    pipeline.use_adapters(())
    return [event for event in pipeline.generate(request) if isinstance(event, Image)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_of_shapes_equal_those_made_alone(tmp_path: Path, dtype: str) -> None:
    """A model that was trained, with captions of two lengths."""
    source = import_directory(SHAPES, tmp_path)
    exact, found = (
        load_pipeline(
            *source, backend="torch", dtype=dtype, tuning=TorchTuning(device="cpu", batch=count)
        )
        for count in (1, 4)
    )
    guided = SMALL.change(prompt="a red circle", steps=2, guidance=3.0, negative=LONG, n=2)
    made = _images(found, guided)
    assert [image.batch for image in made] == [4, 4]
    compare(exact, [made], [(guided, ())])


def test_adapters_that_change_weights_are_computed_apart(alone: Any, together: Any) -> None:
    few, values = adapter(alone, "attention.to_v", rank=2, seed=1), set_values(alone)
    requests: list[tuple[GenerateRequest, Uses]] = [
        (SMALL, ()),
        (SMALL.change(seed=2), [(values, 1.0)]),
        (SMALL.change(seed=3), [(few, 1.0)]),
        (SMALL.change(seed=4), [(values, 1.0)]),
    ]
    turns = Turns(together)
    for request, uses in requests:
        turns.add(request, uses)
    made = turns.finish()
    assert [images[0].batch for images in made] == [2, 2, 2, 2]
    compare(alone, made, requests)


def test_pictures_in_turns_have_the_same_weights(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that change other ones, or none, wait until the others have ended."""
    few, values = adapter(together, "attention.to_v", rank=2, seed=1), set_values(together)
    together.networks.transformer.get()
    served, orders = process.ModelProcess(io.BytesIO(), io.BytesIO()), list[int]()
    monkeypatch.setattr(served, "_take_step", lambda: orders.append(served._pictures.popitem()[0]))
    for number, uses in enumerate(
        ([], [(few, 1.0)], [(values, 1.0)], [(values, 1.0)], [(values, 0.5)], [(few, 1.0)])
    ):
        together.use_adapters(uses)
        opened = process._OpenPictures(iter(()), print, together.fixed_adapters)  # type: ignore[arg-type]
        served._open_pictures(number, opened)
    assert orders == [1, 0, 3, 2, 4] and [*served._pictures] == [5]
    together.use_adapters(())


def test_a_request_joins_and_leaves_between_two_steps(alone: Any, together: Any) -> None:
    requests = [(SMALL.change(steps=4), ()), (SMALL.change(seed=2, steps=4), ())]
    turns = Turns(together)
    turns.add(*requests[0])
    turns.take()
    turns.take()
    assert turns.events[0] == [Step(1, 4, 0)]
    turns.add(*requests[1])
    turns.take()
    turns.take()
    assert turns.events == [[Step(index, 4, 0) for index in (1, 2, 3)], [Step(1, 4, 0)]]
    made = turns.finish()
    assert [images[0].batch for images in made] == [2, 2]
    compare(alone, made, requests)


def test_the_end_of_one_request_leaves_the_others(alone: Any, together: Any) -> None:
    requests = [(SMALL.change(seed=seed), ()) for seed in range(3)]
    turns = Turns(together)
    for request in requests:
        turns.add(*request)
    turns.take()
    turns.close(1)
    made = turns.finish()
    compare(alone, [made[0], made[2]], [requests[0], requests[2]])
    assert not made[1]


def test_an_error_of_one_picture_leaves_the_others(
    alone: Any, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(SMALL.change(seed=seed), ()) for seed in range(3)]
    network = type(together.networks.transformer.get())
    compute, call = network.compute_batch, network.__call__
    bad = together.denoiser.draw_noise(SMALL, 1)[0, 0, 0]

    def is_bad(latents: Any) -> bool:
        return bool(latents[0, 0, 0] == bad)

    def compute_batch(self: Any, passes: Any) -> Any:
        if any(is_bad(latents) for latents, *_ in passes):
            raise ModelError("one of them")
        return compute(self, passes)

    def compute_one(self: Any, latents: Any, *others: Any) -> Any:
        if is_bad(latents):
            raise ModelError("this one")
        return call(self, latents, *others)

    monkeypatch.setattr(network, "compute_batch", compute_batch)
    monkeypatch.setattr(network, "__call__", compute_one)
    turns = Turns(together)
    for request in requests:
        turns.add(*request)
    made = turns.finish()
    assert {number: str(error) for number, error in turns.errors.items()} == {1: "this one"}
    monkeypatch.undo()
    compare(alone, [made[0], made[2]], [requests[0], requests[2]])


def test_an_error_of_the_device_ends_all_that_it_computes(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only known after the passes were called; later pictures are not ended."""

    def fail() -> None:
        raise ModelError("the GPU is gone")

    turns = Turns(together)
    with monkeypatch.context() as patch:
        patch.setattr(together.library, "pace", fail)
        for seed in (1, 2):
            turns.add(SMALL.change(seed=seed))
        turns.finish()
    assert [str(error) for error in turns.errors.values()] == ["the GPU is gone"] * 2
    assert len(_images(together, SMALL)) == 1


def test_the_error_of_a_pass_does_not_hold_its_memory(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is free once the error was reported, without a collection of cycles."""
    network, alive = type(together.networks.transformer.get()), list[Any]()

    def compute_one(_: Any, latents: Any, *__: Any) -> Any:
        activations = torch.zeros_like(latents)
        alive.append(weakref.ref(activations))
        raise NoMemoryError("the memory of the GPU is insufficient")

    monkeypatch.setattr(network, "__call__", compute_one)
    gc.disable()
    try:
        with suppress(NoMemoryError):
            _images(together, SMALL)
        assert len(alive) == 1 and alive[0]() is None
    finally:
        gc.enable()


def test_a_batch_without_memory_is_computed_in_parts_from_then_on(
    alone: Any, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = type(together.networks.transformer.get())
    compute, counts = network.compute_batch, list[int]()

    def compute_batch(self: Any, passes: Any) -> Any:
        counts.append(len(passes))
        if len(passes) > 2:
            raise NoMemoryError("the memory of the GPU is insufficient")
        return compute(self, passes)

    monkeypatch.setattr(network, "compute_batch", compute_batch)
    together.library.batches = BatchTable({64**2: 4})
    request = SMALL.change(n=4, steps=4)
    made = _images(together, request)
    # All alone after a lack, then three and one, then two and two
    assert counts == [4, 3, 2, 2, 2, 2] and together.library.batches.limits == {64**2: 2}
    compare(alone, [made], [(request, ())])


def test_a_batch_has_no_more_pictures_than_the_memory_has_room_for(
    alone: Any, together: Any
) -> None:
    budget = together.networks.budget
    for stage in together.list_stages(SMALL):
        budget.use(stage)
    _, denoise, _ = together.list_stages(SMALL)
    loaded = sum(module.size for module in budget.modules if module.is_loaded)
    budget.memory = int(loaded + budget._base_memory + 2.5 * denoise.work)
    budget.device = together.library.memory
    assert budget.has_work(denoise, 32 * 32, 2) and not budget.has_work(denoise, 32 * 32, 3)
    made = _images(together, SMALL.change(n=3))
    assert [image.batch for image in made] == [2, 2, 2]
    compare(alone, [made], [(SMALL.change(n=3), ())])


def test_steps_are_counted_over_all_pictures_and_previews_stay_in_order(together: Any) -> None:
    events = [*together.generate(SMALL.change(n=3))]
    steps = [event for event in events if isinstance(event, Step)]
    assert [step.done for step in steps] == [*range(1, 10)]
    assert [(step.index, step.picture) for step in steps[:4]] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert [event.picture for event in events[9:]] == [0, 1, 2]
    # Clients are not told of which picture a preview is
    shown = [*together.generate(SMALL.change(n=2, previews=1))]
    pictures = [event.picture for event in shown if isinstance(event, Preview | Image)]
    assert pictures == [0, 0, 1, 1]
    assert [event.done for event in shown if isinstance(event, Step)] == [*range(1, 7)]


def test_only_the_last_step_of_pictures_with_a_cache_is_computed_at_once(
    alone: Any, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, counts = type(together.networks.transformer.get()), list[int]()
    compute = network.compute_batch

    def compute_batch(self: Any, passes: Any) -> Any:
        counts.append(len(passes))
        return compute(self, passes)

    monkeypatch.setattr(network, "compute_batch", compute_batch)
    requests = [(SMALL.change(seed=seed, cache_threshold=0.1), ()) for seed in (1, 2)]
    turns = Turns(together)
    for request in requests:
        turns.add(*request)
    made = turns.finish()
    assert counts == [2]
    compare(alone, made, requests)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a GPU be imitated, whose passes all take a second; return a list of measurements."""
    from clowder_aimage.model.torch.library import TorchLibrary

    measured: list[int] = []

    def time_work(_: Any, work: Any) -> float:
        work()
        measured.append(1)
        return 1.0

    monkeypatch.setattr(TorchLibrary, "is_warmed_up", True)
    monkeypatch.setattr(TorchLibrary, "time", time_work)
    monkeypatch.setattr(
        "clowder_aimage.model.batch_table.measure_table.__defaults__", ((32,), (2,))
    )
    return measured


def test_the_table_is_measured_once_for_a_device(
    blobs: Any, tmp_path: Path, timed: list[int]
) -> None:
    """Kept beside compiled code; a file that is damaged is measured again."""
    counts = []
    for damage in (None, None, b"{", b'{"x": 1}'):
        if damage is not None:
            (file,) = tmp_path.rglob("batches.json")
            file.write_bytes(damage)
        pipeline = load(blobs, compiled=str(tmp_path))
        pipeline.preload(SMALL)
        assert pipeline.library.batches.limits == {32**2: 2}
        counts.append(len(timed))
    assert counts == [2, 2, 4, 6]
    for options in ({"batch": 3}, {"reproducible": True}):
        pipeline = load(blobs, compiled=str(tmp_path), **options)
        pipeline.preload(SMALL)
        assert len(timed) == 6
        assert pipeline.library.batches.largest == options.get("batch", 1)


def test_the_table_is_measured_once_the_code_of_passes_is_compiled(
    blobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[int]
) -> None:
    """Not while some run as they are, and others are compiled beside them."""
    from clowder_aimage.model.torch import compiler, library

    monkeypatch.setattr(library, "check_compiler", lambda _: None)
    monkeypatch.setattr(library, "keep_compiled", lambda *_: None)
    monkeypatch.setattr(compiler.CompiledForm, "_warm", lambda *_: None)
    monkeypatch.setattr(compiler, "_compile", lambda: compiler.call_block)
    pipeline = load(blobs, compiled=str(tmp_path), compile="background")
    pipeline.preload(SMALL)
    form = pipeline.networks.transformer.get().blocks.form
    assert not pipeline.measure_batches() and len(form._begun) == 1
    form._ready |= form._begun
    assert not pipeline.measure_batches() and len(form._begun) == 2
    assert not timed and pipeline.library.batches.largest == 1
    form._ready |= form._begun
    assert pipeline.measure_batches() and not pipeline.measure_batches()
    assert len(timed) == 2 and pipeline.library.batches.limits == {32**2: 2}
    # The same form in another mode, and another form
    for compile_mode, count in (("background", 2), ("now", 2), ("never", 4)):
        pipeline = load(blobs, compiled=str(tmp_path), compile=compile_mode)
        pipeline.preload(SMALL)
        assert len(timed) == count and pipeline.library.batches.limits == {32**2: 2}
        assert not pipeline.measure_batches()


@pytest.mark.parametrize("error", [NoMemoryError("for now"), ModelError("of the device")])
def test_a_measurement_that_fails_is_made_again_at_the_next_load(
    blobs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    timed: list[int],
    error: ModelError,
) -> None:
    def fail(*_: Any) -> float:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("clowder_aimage.model.torch.library.TorchLibrary.time", fail)
        pipeline = load(blobs, compiled=str(tmp_path))
        pipeline.preload(SMALL)
        assert pipeline.library.batches.limits == {} and not timed
    pipeline = load(blobs, compiled=str(tmp_path))
    pipeline.preload(SMALL)
    assert pipeline.library.batches.limits == {32**2: 2}


def test_a_model_whose_networks_are_released_has_no_batches(together: Any) -> None:
    """Until they have room again."""
    together.set_memory("release", None)
    together.preload(SMALL)
    assert together.library.batches.largest == 1
    together.set_memory("auto", None)
    together.preload(SMALL)
    assert together.library.batches.largest == 8
