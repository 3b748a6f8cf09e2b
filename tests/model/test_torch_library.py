"""PyTorch as the library of networks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import ModelError, NoMemoryError, UsageError
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import GenerateRequest, Image, Step
from tests.adapter.vectors import TINY
from tests.model.model_blobs import import_directory

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
REQUEST = GenerateRequest("a fox", 32, 32, 3)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stored = import_directory(TINY, tmp_path_factory.mktemp("blobs"))
    return load_pipeline(*stored, backend="torch", dtype="float32")


def test_arrays_are_of_the_compute_type_and_integers_stay() -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    library = TorchLibrary("cpu", torch.bfloat16)
    floats = library.array(np.array([1.001, -2], np.float32))
    assert floats.dtype == torch.bfloat16 and library.itemsize == 2
    assert library.floats(floats).dtype == np.float32
    assert library.array(np.array([1 << 40])).tolist() == [1 << 40]
    assert library.colours(torch.tensor([-3.0, 0.0, 3.0])).tolist() == [0, 0.5, 1]


def test_weights_are_the_blobs_themselves_and_stay_unchanged(pipeline: Any) -> None:
    """In the type of the blobs nothing is copied; writes stay in this process."""
    from clowder_aimage.model.torch.library import TorchLibrary

    half = dataclasses.replace(pipeline, library=TorchLibrary("cpu", torch.bfloat16))
    assert half.library.itemsize == 2
    weights = pipeline.weights["transformer"]
    name = "layers.0.attention.to_q.weight"
    one, other = weights.torch(name), weights.torch(name)
    before = other.clone()
    one.add_(1)
    assert torch.equal(other, before)
    parameters = pipeline.transformer.module.parameters()
    assert {one.dtype for one in parameters} == {torch.float32}


def test_nothing_stays_on_the_meta_device(pipeline: Any) -> None:
    networks = pipeline.text_encoder, pipeline.transformer, pipeline.vae
    for network in (*networks, pipeline.picture_encoder().get()):
        state = [*network.module.parameters(), *network.module.buffers()]
        assert state and not any(one.is_meta for one in state)
    assert pipeline.text_encoder.module.rotary_emb.inv_freq.device.type == "cpu"
    assert "vae/encoder.conv_in.weight" in pipeline.skipped


def test_closing_the_generator_cancels(pipeline: Any) -> None:
    events = pipeline.generate(REQUEST)
    assert isinstance(next(events), Step)
    events.close()
    assert isinstance([*pipeline.generate(REQUEST)][-1], Image)


def test_networks_that_were_released_are_read_again(pipeline: Any) -> None:
    expected = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    for module in pipeline.budget.modules:
        module.release()
    assert not any(module.is_loaded for module in pipeline.budget.modules)
    pipeline.set_memory("release", None)
    found = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    assert np.array_equal(found, expected)
    assert [module.is_loaded for module in pipeline.budget.modules].count(True) == 1
    pipeline.set_memory("auto", None)


def test_memory_that_is_insufficient_is_an_error_and_the_model_stays(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    expected = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.transformer.module, "forward", fail)
        with pytest.raises(NoMemoryError, match=r"GPU is insufficient .* use a smaller size"):
            list(pipeline.generate(REQUEST))
    found = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    assert np.array_equal(found, expected)


def test_memory_of_the_machine_that_is_insufficient_is_an_error(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch raises it on a CPU; other errors stay what they are."""

    def fail(*_: object, **__: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(pipeline.transformer.module, "forward", fail)
    with pytest.raises(NoMemoryError, match="the memory is insufficient for this picture"):
        list(pipeline.generate(REQUEST))
    monkeypatch.setattr(pipeline.transformer.module, "forward", lambda *_, **__: torch.empty(-1))
    with pytest.raises(RuntimeError, match="negative dimension"):
        list(pipeline.generate(REQUEST))


def test_a_version_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from clowder_aimage.model.torch import library

    library.device_name.cache_clear()
    monkeypatch.setitem(library.OLDEST, "diffusers", (99, 1))
    with pytest.raises(UsageError, match=r"diffusers \S+ is too old: 99.1 or newer") as refused:
        library.device_name()
    assert refused.value.facts["extra"] == "torch"
    monkeypatch.undo()
    assert library.device_name() in ("cpu", "cuda", "mps")


def test_the_device_is_what_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    from clowder_aimage.model.torch import library

    cuda: Any = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda: "H100",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1000),
    )
    library.device_name.cache_clear()
    monkeypatch.setattr(torch, "cuda", cuda)
    assert library.describe().endswith(" cuda (H100)")
    assert library.dtype_name(None) == "bfloat16"
    assert library.device_memory() == 900
    library.device_name.cache_clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "transformer: missing tensors cap_pad_token"),
        ("config", "transformer/config.json not found"),
    ],
)
def test_models_that_do_not_fit_are_refused(damage: str, message: str, tmp_path: Path) -> None:
    store, aimage = import_directory(TINY, tmp_path)
    layers = list(aimage.layers)
    if damage == "missing":
        layers = [one for one in layers if one.name != "transformer/cap_pad_token"]
    else:
        layers = [one for one in layers if one.name != "transformer/config.json"]
    with pytest.raises(ModelError, match=message):
        load_pipeline(store, dataclasses.replace(aimage, layers=tuple(layers)), backend="torch")
