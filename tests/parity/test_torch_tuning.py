"""Options of PyTorch: compiled layers, and attention backends."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.adapter import Adapter, DenseChange, LowRank
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from tests.adapter.vectors import TINY
from tests.model.model_blobs import import_directory

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from clowder_aimage.model.torch import compiler  # noqa: E402 - after the check of its library
from clowder_aimage.model.torch import library as torch_library  # noqa: E402
from clowder_aimage.model.torch.attention import attend  # noqa: E402
from clowder_aimage.model.torch.graph import PassCache  # noqa: E402
from tests.parity.compiling import compile_with, count_compilations  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
REQUEST = GenerateRequest.of("a fox", width=32, height=32, steps=3)


def load(tmp_path: Path, backend: str = "torch", **options: Any) -> Any:
    stored = import_directory(TINY, tmp_path / "blobs")
    return load_pipeline(*stored, backend=backend, dtype="float32", tuning=TorchTuning(**options))


def pixels(pipeline: Any, request: GenerateRequest = REQUEST) -> np.ndarray:
    *_, last = pipeline.generate(request)
    assert isinstance(last, Image)
    return last.pixels.astype(int)


def adapter(pipeline: Any, scale: float, *, rank: int = 2, layer: int = 0) -> LoadedAdapter:
    name = f"transformer/layers.{layer}.attention.to_v.weight"
    rows, columns = pipeline.shapes[name]
    values = np.random.default_rng(1)
    down, up = values.standard_normal((rank, columns)), values.standard_normal((rows, rank))
    pair = LowRank(down.astype(np.float32), up.astype(np.float32), scale)
    return LoadedAdapter(f"a{scale}", Adapter(f"a{scale}", {name: (pair,)}))


def set_values(pipeline: Any) -> LoadedAdapter:
    """Return an adapter that is not of low rank."""
    name = "transformer/layers.1.attention.to_k.weight"
    values = np.random.default_rng(2).standard_normal(pipeline.shapes[name])
    change = DenseChange(0.1 * values.astype(np.float32))
    return LoadedAdapter("values", Adapter("values", {name: (change,)}))


@pytest.fixture
def counter() -> Iterator[Any]:
    with count_compilations() as counter:
        yield counter


@pytest.fixture
def inductor() -> Iterator[None]:
    """Compile in this process: each of its own for compilation imports PyTorch first."""
    from torch._inductor import config

    with config.patch(compile_threads=1), compile_with("inductor"):
        yield


def compare(found: Any, exact: Any, request: GenerateRequest) -> np.ndarray:
    expected = pixels(exact, request)
    assert np.abs(pixels(found, request) - expected).max() <= 1
    return expected


@pytest.mark.no_cover  # which would double the time of the compiler, a program in Python
def test_compiled_blocks_make_the_same_pictures_and_are_compiled_once(
    tmp_path: Path, counter: Any
) -> None:
    """One code for all layers, lengths and adapters."""
    exact, compiled = load(tmp_path), load(tmp_path, compile="now")
    compiled.networks.vae = exact.networks.vae
    compiled.networks.transformer.get()
    assert counter.frame_count == 1
    plain = compare(compiled, exact, REQUEST)
    other = GenerateRequest.of("a fox " * 9, width=64, height=96, steps=2)
    compare(compiled, exact, other)
    compare(compiled, exact, REQUEST.change(steps=5, cache_threshold=10.0))
    assert counter.frame_count == 1
    seen, counts = [plain], []
    uses: list[list[tuple[Any, float]]] = [
        [(adapter(exact, 0.2), 1.0)],
        [(adapter(exact, 0.2), -0.5)],
        [(adapter(exact, 0.3, rank=33, layer=1), 1.0)],
        [(adapter(exact, 0.2), 1.0), (adapter(exact, 0.3), 1.0), (set_values(exact), 1.0)],
        [],
    ]
    for adapters in uses:
        for one in (exact, compiled):
            one.use_adapters(adapters)
        seen.append(compare(compiled, exact, REQUEST))
        counts.append(counter.frame_count)
    # Branches are other code; other adapters are other values of its inputs
    assert counts == [2] * len(uses)
    assert all(np.abs(one - other).max() > 1 for one, other in itertools.pairwise(seen))
    assert np.array_equal(seen[-1], plain)


@pytest.mark.no_cover
def test_blocks_that_are_compiled_in_a_thread_are_used_when_they_are_ready(
    tmp_path: Path, counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    form = compiler.CompiledForm
    monkeypatch.setattr(form.__init__, "__defaults__", (begun.append,))
    exact, compiled = load(tmp_path), load(tmp_path, compile="background")
    compare(compiled, exact, REQUEST)
    assert counter.frame_count == 0 and len(begun) == 2
    for function in begun:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert counter.frame_count == 2
    networks = compiled.networks
    blocks = networks.transformer.get().blocks
    assert blocks.form.is_ready(blocks.find_variant())
    latents = np.zeros((networks.vae.config.latent_channels, 36, 44), np.float32)
    assert np.abs(networks.decode(latents) - exact.networks.decode(latents).astype(int)).max() <= 1
    compare(compiled, exact, REQUEST)
    # The code of the decoder is not for such a small picture
    before = counter.frame_count
    for one in (exact, compiled):
        one.use_adapters([(adapter(one, 0.2), 1.0)])
    compare(compiled, exact, REQUEST)
    assert counter.frame_count == before and len(begun) == 3


def test_pictures_state_the_form_in_which_they_were_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are copied to the device one by one are not compiled, whatever was asked for."""
    # In place of compiled code, and another function than that of blocks as they are
    monkeypatch.setattr(compiler, "_compile", lambda: functools.partial(compiler.call_block))
    monkeypatch.setattr(torch_library, "check_compiler", lambda _: None)
    pipeline = load(tmp_path, compile="now")

    def find_form() -> str:
        *_, image = pipeline.generate(REQUEST)
        return image.forward

    assert find_form() == "compiled"
    pipeline.networks.transformer.get().blocks.use_layers()
    # The decoder is compiled
    assert find_form() == "mixed"
    assert load(tmp_path).networks.library.forms == set()


def test_blocks_that_cannot_be_compiled_are_called_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    form = compiler.CompiledForm("background", lambda function: function())
    assert form.select("a", fail) is compiler.call_block
    assert form.select("a", fail) is compiler.call_block
    (record,) = caplog.records
    assert record.getMessage() == "blocks stay uncompiled"
    assert vars(record)["error"] == "RuntimeError: no compiler"
    assert form.select("b", lambda _: None) is not compiler.call_block
    assert compiler.CompiledForm("never").select("a", fail) is compiler.call_block


def test_each_thread_that_compiles_or_calls_has_as_many_variants() -> None:
    """A new thread has the default of PyTorch, beyond which blocks would not be compiled."""
    limits: list[int] = []
    form = compiler.CompiledForm("now")

    def note(_: Any) -> None:
        limits.append(torch._dynamo.config.recompile_limit)

    def call() -> None:
        # It is compiled by the other thread
        note(form.select("a", note))

    for function in (lambda: form.select("a", note), call):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    assert limits == [64, 64]


def test_a_network_that_is_released_while_it_is_compiled_frees_its_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has the network until it ends, which it does before it compiles more."""
    begun: list[Any] = []
    form = compiler.CompiledForm
    monkeypatch.setattr(form.__init__, "__defaults__", (begun.append,))
    monkeypatch.setattr(compiler, "_compile", lambda: compiler.call_block)
    pipeline = load(tmp_path, compile="background")
    expected, networks = pixels(pipeline), pipeline.networks
    held = [module.get() for module in (networks.transformer, networks.vae)]
    assert len(begun) == len(held)
    tensors = [weakref.ref(value) for one in held for value in one.module.parameters()]
    pipeline.sleep()
    assert tensors and not any(tensor() is not None for tensor in tensors)
    caplog.set_level(logging.DEBUG, compiler.__name__)
    caplog.clear()
    for function in begun:
        function()
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * len(begun)
    assert np.array_equal(pixels(pipeline), expected)


def test_blocks_that_become_ready_after_they_were_selected_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of blocks that are not compiled would be replayed from then on."""
    begun: list[Any] = []
    form = compiler.CompiledForm
    monkeypatch.setattr(form.__init__, "__defaults__", (begun.append,))
    monkeypatch.setattr(compiler, "_compile", lambda: None)
    blocks = load(tmp_path, compile="background").networks.transformer.get().blocks
    blocks.select()
    monkeypatch.setattr(type(blocks.passes), "run", lambda *_: pytest.fail("recorded"))
    select = blocks.select

    def select_before(variant: Any) -> Any:
        run = select(variant)
        blocks.form._ready.add(blocks.find_variant())
        return run

    monkeypatch.setattr(blocks, "select", select_before)
    assert blocks.run(lambda run, x: (run, x), 5) == (compiler.call_block, 5)


@pytest.mark.no_cover
def test_recorded_passes_replay_compiled_blocks_until_tensors_change(
    tmp_path: Path, counter: Any
) -> None:
    exact, compiled = load(tmp_path), load(tmp_path, compile="now")
    compiled.networks.vae = exact.networks.vae
    network = compiled.networks.transformer.get()
    recorded: list[Any] = []

    class Recorded:
        """A pass of a device that reads the same memory at each replay."""

        size = 1

        def __init__(self, function: Any, inputs: Any) -> None:
            recorded.append(self)
            self.function, self.inputs = function, [value.clone() for value in inputs]

        def replay(self, inputs: Any) -> Any:
            for fixed, value in zip(self.inputs, inputs, strict=True):
                fixed.copy_(value)
            return self.function(self.inputs)

    network.blocks.passes = PassCache(Recorded, 3)
    compare(compiled, exact, REQUEST.change(n=2))
    assert len(recorded) == 1
    for one in (exact, compiled):
        one.use_adapters([(adapter(one, 0.2), 1.0)])
    compare(compiled, exact, REQUEST)
    assert len(recorded) == 2 and network.blocks.passes.size == 1
    compare(compiled, exact, REQUEST.change(cache_threshold=10.0))
    assert len(recorded) == 2 and counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.usefixtures("inductor")
def test_compiled_code_makes_the_same_pictures(tmp_path: Path) -> None:
    """Inductor, the default, compiles C++ for a minute."""
    exact, compiled = load(tmp_path), load(tmp_path, compile="now")
    compare(compiled, exact, REQUEST)
    compare(compiled, exact, GenerateRequest.of("a fox " * 9, width=64, height=96, steps=2))
    for one in (exact, compiled):
        one.use_adapters([(adapter(one, 0.2), 1.0), (set_values(one), 1.0)])
    compare(compiled, exact, REQUEST)


def test_a_machine_without_a_compiler_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clowder_aimage.model.torch.compiler import check_compiler

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin a trace")

    check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UsageError, match=r"cannot compile on this machine .*No working") as refused:
        load(tmp_path, compile="now")
    assert "trace" not in refused.value.message and "g++" in str(refused.value.hint)
    check_compiler.cache_clear()


@pytest.mark.parametrize("name", ["native", "_native_math"])
def test_an_attention_backend_is_used(tmp_path: Path, name: str) -> None:
    pipeline = load(tmp_path, attention=name)
    assert pipeline.library.attention is not attend
    assert np.abs(pixels(pipeline) - pixels(load(tmp_path))).max() <= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "unknown attention backend 'fast': use flash, .*native"),
        ("flash", "the attention backend flash cannot be used: .*flash-attn"),
        ("flash_hub", "unknown attention backend 'flash_hub'"),  # it would be downloaded
    ],
)
def test_an_attention_backend_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, attention=name)


def test_a_backend_that_lacks_a_kernel_for_the_device_is_an_error(tmp_path: Path) -> None:
    pipeline = load(tmp_path, attention="_native_cudnn")
    with pytest.raises(Exception, match="attention backend cannot compute") as failed:
        pixels(pipeline)
    assert type(failed.value).__name__ == "ModelError"
