"""PyTorch as the library of networks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.errors import ModelError, NoMemoryError, UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, Step
from tests.adapter.vectors import TINY, vectors
from tests.model.model_blobs import import_directory

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
REQUEST = GenerateRequest.of("a fox", width=32, height=32, steps=3)


def open_tiny(blobs: Path) -> Any:
    # Also where PyTorch sees a GPU
    tuning = TorchTuning(device="cpu")
    source = import_directory(TINY, blobs)
    return load_pipeline(*source, backend="torch", dtype="float32", tuning=tuning)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tiny(tmp_path_factory.mktemp("blobs"))


def test_arrays_are_of_the_compute_type_and_integers_stay() -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    library = TorchLibrary("cpu", torch.bfloat16)
    floats = library.to_array(np.array([1.001, -2], np.float32))
    assert floats.dtype == torch.bfloat16 and library.itemsize == 2
    assert library.to_floats(floats).dtype == np.float32
    assert library.to_array(np.array([1 << 40])).tolist() == [1 << 40]
    assert library.to_pixels(torch.tensor([-3.0, 0.0, 3.0])).tolist() == [0, 128, 255]
    held = library.hold(floats)
    assert held.dtype == torch.float32 and library.hold(held) is held
    with pytest.raises(ModelError, match="NaN"):
        library.to_pixels(torch.tensor([0.0, float("nan")]))


def test_arrays_are_copied_to_a_gpu_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    library, waits = TorchLibrary("cpu", torch.float32), list[bool]()
    copy = torch.Tensor.to

    def note(self: Any, *target: Any, non_blocking: bool = False) -> Any:
        waits.append(not non_blocking)
        return copy(self, *target)

    monkeypatch.setattr(torch.Tensor, "to", note)
    for kind in ("cpu", "cuda"):
        library.memory.kind = kind
        library._copy(np.zeros(3, np.float32))
    assert waits == [True, False]


def test_pixels_are_those_of_numpy() -> None:
    """The bytes are made on the device: rounded as numpy rounds them."""
    from clowder_aimage.model.flow.pixels import to_pixels
    from clowder_aimage.model.torch.library import TorchLibrary

    values = np.random.default_rng(7).normal(0, 1, (64, 64, 3)).astype(np.float32)
    values[0, :, 0] = (np.arange(64) + 0.5) / 127.5 - 1
    for dtype in (torch.float32, torch.bfloat16):
        array = torch.from_numpy(values).to(dtype)
        colours = (array * 0.5 + 0.5).clamp(0, 1).float().numpy()
        assert np.array_equal(TorchLibrary("cpu", dtype).to_pixels(array), to_pixels(colours))


def test_held_numbers_are_limited_as_with_numpy() -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    library = TorchLibrary("cpu", torch.float32)
    values = library.hold(np.array([3, 4], np.float32))
    assert float(library.measure(values)) == 5
    assert library.limit_length(values, torch.tensor(10.0)).tolist() == [3, 4]
    assert library.limit_length(values, torch.tensor(2.5)).tolist() == [1.5, 2]
    assert library.limit_length(values * 0, torch.tensor(0.0)).tolist() == [0, 0]


def test_nothing_is_copied_from_the_device_between_steps(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents, noise and guidance stay there; the worker follows one step behind the device."""
    library, seen = pipeline.library, list[str]()

    class Queue:
        def mark(self) -> Callable[[], None]:
            number = sum(one.startswith("mark") for one in seen)
            seen.append(f"mark {number}")
            return lambda: seen.append(f"wait {number}")

    def refuse(*_: object) -> None:
        raise AssertionError("a copy from the device")

    expected = [one for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    monkeypatch.setattr(library, "_queue", Queue())
    monkeypatch.setattr(library, "to_floats", refuse)
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setattr(torch.Tensor, "item", refuse)
    for event in pipeline.generate(request := REQUEST.change(guidance=2.0)):
        assert isinstance(event, Step)
        seen.append(f"step {event.index}")
        if event.index == request.sampling.steps:
            break
    monkeypatch.undo()
    marks = ["mark 0", "step 1", "mark 1", "wait 0", "step 2", "mark 2", "wait 1", "step 3"]
    assert seen == marks
    (picture,) = [one for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    assert np.array_equal(picture.pixels, expected[0].pixels)


def test_weights_are_the_blobs_themselves_and_stay_unchanged(pipeline: Any) -> None:
    """In the type of the blobs nothing is copied; writes stay in this process."""
    weights = pipeline.networks.weights["transformer"]
    name = "layers.0.attention.to_q.weight"
    one, other = weights.read_torch(name), weights.read_torch(name)
    before = other.clone()
    one.add_(1)
    assert torch.equal(other, before)
    parameters = pipeline.networks.transformer.get().module.parameters()
    assert {one.dtype for one in parameters} == {torch.float32}


def test_nothing_stays_on_the_meta_device(pipeline: Any) -> None:
    networks = pipeline.networks
    halves = networks.vae, networks.picture_encoder
    for network in (networks.text_encoder, networks.transformer, *halves):
        module = network.get().module
        state = [*module.parameters(), *module.buffers()]
        assert state and not any(one.is_meta for one in state)
    assert "vae/encoder.conv_in.weight" in networks.skipped


def test_closing_the_generator_cancels(pipeline: Any) -> None:
    events = pipeline.generate(REQUEST)
    assert isinstance(next(events), Step)
    events.close()
    assert isinstance([*pipeline.generate(REQUEST)][-1], Image)


def test_networks_that_were_released_are_read_again(pipeline: Any) -> None:
    expected = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    for module in pipeline.networks.budget.modules:
        module.release()
    assert not any(module.is_loaded for module in pipeline.networks.budget.modules)
    pipeline.set_memory("release", None)
    found = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    assert np.array_equal(found, expected)
    assert [module.is_loaded for module in pipeline.networks.budget.modules].count(True) == 1
    pipeline.set_memory("auto", None)


def pictures(pipeline: Any) -> list[np.ndarray]:
    return [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]


def test_a_gpu_makes_a_picture_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts slowly; a CPU does not."""
    from clowder_aimage.model.torch.library import TorchLibrary

    pipeline = open_tiny(tmp_path)
    for is_warmed_up in (False, True):
        monkeypatch.setattr(TorchLibrary, "is_warmed_up", is_warmed_up)
        assert "all networks stay" in pipeline.preload(REQUEST)
        assert bool(pipeline.state.captions) == is_warmed_up


def squeeze(pipeline: Any) -> int:
    """Leave the memory for one layer of each network; return it."""
    pipeline.set_memory("auto", 1)
    stages, own = pipeline.list_stages(REQUEST), pipeline.networks.budget._base_memory
    least, whole = (max(getattr(one, name) for one in stages) for name in ("least", "size"))
    assert least < whole
    pipeline.networks.budget.memory = pipeline.networks.budget.limit = own + int(least) + 1
    return int(own + least)


def test_layers_are_loaded_one_by_one_where_memory_is_short(tmp_path: Path) -> None:
    """Blobs in bfloat16 are values in float32 while their layer runs, and mapped otherwise."""
    pipeline = open_tiny(tmp_path)
    expected, states = pictures(pipeline), []
    assert "all networks stay" in pipeline.networks.budget.describe(pipeline.list_stages(REQUEST))
    least = squeeze(pipeline)
    assert np.array_equal(pictures(pipeline), expected)
    assert "one by one" in pipeline.networks.budget.describe(pipeline.list_stages(REQUEST))
    pipeline.networks.budget.use(
        pipeline.list_stages(REQUEST)[1]
    )  # it was released for the decoder
    module = pipeline.networks.transformer.get().module

    def find_on_device() -> list[bool]:
        layers = [*module.noise_refiner, *module.context_refiner, *module.layers]
        return [one.feed_forward.w1.weight.dtype == torch.float32 for one in layers]

    def note(*_: Any) -> None:
        states.append(find_on_device())

    hooks = [one.register_forward_pre_hook(note) for one in module.layers]
    for event in pipeline.generate(REQUEST):
        if isinstance(event, Step):
            assert not any(find_on_device())
            assert module.x_pad_token.dtype == torch.float32
    assert len(states) == REQUEST.sampling.steps * len(hooks) and {sum(one) for one in states} == {
        1
    }
    pipeline.networks.budget.limit = least - 1
    with pytest.raises(UsageError, match="of memory are insufficient for this model"):
        pipeline.generate(REQUEST)
    pipeline.set_memory("auto", None)
    assert np.array_equal(pictures(pipeline), expected)
    assert all(
        one.dtype == torch.float32
        for one in pipeline.networks.transformer.get().module.parameters()
    )


@pytest.mark.parametrize("name", ["ai-toolkit-alpha", "diff"])
def test_adapters_change_layers_that_are_loaded_one_by_one(tmp_path: Path, name: str) -> None:
    """Branches beside layers, and changed tensors."""
    pipeline = open_tiny(tmp_path)
    vector = next(one for one in vectors() if one.name == name)
    adapter = read_adapter(vector.write(tmp_path), pipeline.shapes, label="it", base="tiny")
    uses = [(LoadedAdapter("it", adapter), 0.7)]
    plain = pictures(pipeline)
    pipeline.use_adapters(uses)
    expected = pictures(pipeline)
    squeeze(pipeline)
    assert np.array_equal(pictures(pipeline), expected)
    pipeline.use_adapters([])
    assert np.array_equal(pictures(pipeline), plain)
    assert not np.array_equal(expected, plain)


def test_a_layer_that_fails_is_idle_afterwards(tmp_path: Path) -> None:
    pipeline = open_tiny(tmp_path)
    squeeze(pipeline)
    expected = pictures(pipeline)
    pipeline.networks.budget.use(pipeline.list_stages(REQUEST)[1])
    layer = pipeline.networks.transformer.get().module.layers[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.feed_forward.w2, "forward", lambda _: torch.empty(1 << 60))
        with pytest.raises(NoMemoryError):
            pictures(pipeline)
    assert layer.feed_forward.w1.weight.dtype == torch.bfloat16
    assert np.array_equal(pictures(pipeline), expected)


def test_what_can_be_loaded_layer_by_layer() -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    for device, dtype, types, expected in (
        ("cpu", torch.float32, {"BF16"}, True),
        ("cpu", torch.float32, {"BF16", "F32"}, True),
        ("cpu", torch.float32, {"F32"}, False),  # nothing is copied
        ("cpu", torch.float32, {"BF16", None}, False),
        ("cuda", torch.bfloat16, {"BF16", None}, True),
    ):
        assert TorchLibrary(device, dtype).can_offload(types) == expected


def test_memory_that_is_insufficient_is_an_error_and_the_model_stays(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    expected = [one.pixels for one in pipeline.generate(REQUEST) if isinstance(one, Image)]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.networks.transformer.get().module, "forward", fail)
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

    monkeypatch.setattr(pipeline.networks.transformer.get().module, "forward", fail)
    with pytest.raises(NoMemoryError, match="the memory is insufficient for this picture"):
        list(pipeline.generate(REQUEST))
    monkeypatch.setattr(
        pipeline.networks.transformer.get().module, "forward", lambda *_, **__: torch.empty(-1)
    )
    with pytest.raises(RuntimeError, match="negative dimension"):
        list(pipeline.generate(REQUEST))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)"),
        RuntimeError("Invalid buffer size: 24.00 GB"),  # of MPS too
    ],
)
def test_adapters_and_copies_of_arrays_can_lack_memory_too(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    vector = next(one for one in vectors() if one.name == "ai-toolkit-alpha")
    adapter = read_adapter(vector.write(tmp_path), pipeline.shapes, label="it", base="tiny")
    plain, lacking = pictures(pipeline), SimpleNamespace(to=fail)
    pipeline.use_adapters([(LoadedAdapter("it", adapter), 0.7)])
    library = pipeline.library
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_numpy", fail)
        for use, given in (
            (pipeline.networks.transformer.get, ()),
            (library.to_array, (np.zeros(1, np.float32),)),
            (library.to_floats, (lacking,)),
        ):
            with pytest.raises(NoMemoryError, match="the memory of the GPU is insufficient"):
                use(*given)
    pipeline.use_adapters([])
    assert np.array_equal(pictures(pipeline), plain)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that sets the devices that work, and why others do not."""
    from clowder_aimage.model.torch import device as torch_device

    def of(*names: str, why: str = "no driver") -> Any:
        cuda: Any = SimpleNamespace(
            device_count=lambda: sum(name.startswith("cuda:") for name in names),
            get_device_name=lambda one: f"H{one.index or 0}",
            get_device_properties=lambda one: SimpleNamespace(total_memory=1000 + (one.index or 0)),
        )
        monkeypatch.setattr(torch, "cuda", cuda)
        found = {"cpu", *names, *(name.partition(":")[0] for name in names)}
        monkeypatch.setattr(
            torch_device, "find_failure", lambda name: None if name in found else why
        )
        return torch_device

    return of


def test_the_device_is_the_first_that_works_or_the_named_one(gpus: Any) -> None:
    from clowder_aimage.model.torch.library import TorchLibrary, is_on_gpu

    assert gpus().select_device() == "cpu" and not is_on_gpu()
    assert gpus("mps").select_device() == "mps" and is_on_gpu()
    module = gpus("cuda:0", "cuda:1")
    assert module.list_devices() == ["cuda:0", "cuda:1", "cpu"]
    library = TorchLibrary.create(None)
    assert library.describe().endswith(" cuda (H0)") and library.memory.total == 900
    assert library.dtype_name == "bfloat16" and not library.memory.is_shared
    assert library.memory.is_discrete
    library = TorchLibrary.create(None, TorchTuning(device="cuda:1"))
    assert library.describe().endswith(" cuda:1 (H1)") and library.memory.total == 900
    library = TorchLibrary.create(None, TorchTuning(device="cpu"))
    assert library.describe().endswith(" cpu") and library.memory.total is None
    assert library.dtype_name == "float32" and library.warning is None


@pytest.mark.parametrize(
    ("asked", "device", "allowed"),
    [("", "cuda", False), ("1", "cuda", True), ("0", "cuda:1", False), ("", "cpu", True)],
)
def test_float32_on_a_gpu_is_float32_unless_tf32_is_asked_for(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, asked: str, device: str, allowed: bool
) -> None:
    from clowder_aimage.model.torch.library import TorchLibrary

    gpus("cuda:0", "cuda:1")
    settings = [SimpleNamespace(allow_tf32=True) for _ in range(2)]
    monkeypatch.setattr(torch.backends, "cudnn", settings[0])
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings[1])
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", asked)
    TorchLibrary.create("float32", TorchTuning(device=device))
    assert [setting.allow_tf32 for setting in settings] == [allowed] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:2", "PyTorch cannot compute on the device cuda:2: invalid ordinal"),
        ("gpu", "unknown device 'gpu': use cuda, cuda:1 and so on, mps or cpu"),
        ("cuda:-1", "unknown device 'cuda:-1'"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(gpus: Any, name: str, message: str) -> None:
    module = gpus("cuda:0", why="invalid ordinal")
    with pytest.raises(UsageError, match=message) as refused:
        module.select_device(name)
    assert refused.value.facts == {"devices": "cuda:0, cpu"}
    assert refused.value.hint == "the devices that PyTorch sees: cuda:0, cpu"


def test_why_pytorch_cannot_compute_is_what_it_says() -> None:
    from clowder_aimage.model.torch.device import find_failure

    assert find_failure("cpu") is None
    assert "Apple silicon" in str(find_failure("mps")) or find_failure("mps") is None
    assert "\n" not in str(find_failure("cuda:99")) and find_failure("cuda:99")


def test_a_gpu_that_cannot_be_used_is_a_warning(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from clowder_aimage.model import library_choice

    module, driver = gpus(why="the driver is too old"), tmp_path / "nvidia0"
    monkeypatch.setattr(library_choice, "_GPUS", (str(driver),))
    assert module.describe_unused_device(None) is None
    driver.touch()
    said = "PyTorch computes on the CPU, although this machine has a GPU .*nvidia0.: the driver is"
    assert re.match(said, module.describe_unused_device(None))
    assert module.describe_unused_device("cpu") is None
    assert gpus("cuda:0").describe_unused_device(None) is None


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
