"""Options of PyTorch: compiled layers, and attention backends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.adapter import Adapter, LowRank
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
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
REQUEST = GenerateRequest.of("a fox", width=32, height=32, steps=3)


def load(tmp_path: Path, backend: str = "torch", **options: Any) -> Any:
    stored = import_directory(TINY, tmp_path / "blobs")
    return load_pipeline(*stored, backend=backend, dtype="float32", tuning=TorchTuning(**options))


def pixels(pipeline: Any, request: GenerateRequest = REQUEST) -> np.ndarray:
    *_, last = pipeline.generate(request)
    assert isinstance(last, Image)
    return last.pixels.astype(int)


def adapter(pipeline: Any, scale: float) -> LoadedAdapter:
    name = "transformer/layers.0.attention.to_v.weight"
    rows, columns = pipeline.shapes[name]
    values = np.random.default_rng(1)
    down, up = values.standard_normal((2, columns)), values.standard_normal((rows, 2))
    pair = LowRank(down.astype(np.float32), up.astype(np.float32), scale)
    return LoadedAdapter(f"a{scale}", Adapter(f"a{scale}", {name: (pair,)}))


@pytest.fixture
def compiling_here() -> Iterator[None]:
    """Compile in this process: each of its own for compilation imports PyTorch first."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


@pytest.mark.usefixtures("compiling_here")
@pytest.mark.parametrize(
    ("backend", "uses"),
    [
        ("eager", [[], [(0.2, 1.0)]]),
        *(
            pytest.param(name, [[], [(0.2, 1.0)], [(0.2, -1.0)], []], marks=pytest.mark.slow)
            for name in ("eager", "inductor")
        ),
    ],
)
@pytest.mark.no_cover  # which would double the time of the compiler, a program in Python
def test_compiled_layers_make_the_same_pictures_and_notice_adapters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    uses: list[list[tuple[float, float]]],
) -> None:
    """Compiled layers share code, which ignores branches: tensors are changed.

    Inductor, the default, compiles C++ for a minute; eager runs the same traced graphs.
    """
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: compile_module(module, **options | {"backend": backend}),
    )
    exact, compiled = load(tmp_path), load(tmp_path, compile=True)
    blocks = compiled.networks.transformer.get().module.layers
    assert all(block._compiled_call_impl is not None for block in blocks)
    seen = []
    for adapters in uses:
        for one in (exact, compiled):
            one.use_adapters([(adapter(one, scale), strength) for scale, strength in adapters])
        found, expected = pixels(compiled), pixels(exact)
        assert np.abs(found - expected).max() <= 1
        seen.append(expected)
    assert all(np.abs(one - other).max() > 1 for one, other in itertools.pairwise(seen))
    if len(uses) == 2:  # a cache compiles half of the layers again
        return
    cached = REQUEST.change(steps=5, cache_threshold=10.0)
    assert np.abs(pixels(compiled, cached) - pixels(exact, cached)).max() <= 1


def test_a_machine_without_a_compiler_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clowder_aimage.model.torch.tuning import check_compiler

    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nin a trace")

    check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UsageError, match=r"cannot compile on this machine .*No working") as refused:
        load(tmp_path, compile=True)
    assert "trace" not in refused.value.message and "g++" in str(refused.value.hint)
    check_compiler.cache_clear()


@pytest.mark.parametrize("name", ["native", "_native_math"])
def test_an_attention_backend_is_used(tmp_path: Path, name: str) -> None:
    pipeline = load(tmp_path, attention=name)
    layer = pipeline.networks.transformer.get().module.layers[0].attention
    assert layer.processor._attention_backend == name
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
