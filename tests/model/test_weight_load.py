"""Weights that threads copy to a device: bytes, order, memory and errors, with a CPU as device."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import AImageError, ModelError, StoreError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image
from clowder_aimage.model.stored_tensor import StoredTensor, TensorRange
from clowder_aimage.tensor import Quantization
from tests.adapter.vectors import TINY
from tests.model.model_blobs import import_directory

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

from clowder_aimage.model.torch import weight_load  # noqa: E402 - needs torch
from clowder_aimage.model.torch.device_queue import CopyStream, DeviceQueue  # noqa: E402
from clowder_aimage.model.torch.host_cache import HostCache  # noqa: E402
from clowder_aimage.model.torch.weight_load import StagedLoad, begin_load  # noqa: E402

CHUNK = 64
TYPES = {"float32": "F32", "float16": "F16", "uint8": "U8", "uint32": "U32"}


class RecordedQueue(DeviceQueue):
    """A device whose copies end when they are waited for, as those of a GPU may."""

    has_own_memory = True

    def __init__(self) -> None:
        self.hosts: list[Any] = []
        self.streams: list[LateStream] = []
        self._lock = threading.Lock()

    def allocate_host(self, size: int) -> Any:
        host = super().allocate_host(size)
        with self._lock:
            self.hosts.append(host)
        return host

    def open_stream(self) -> CopyStream:
        stream = LateStream()
        with self._lock:
            self.streams.append(stream)
        return stream


class LateStream(CopyStream):
    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any]] = []
        self._done = 0
        self.most = 0

    @property
    def is_idle(self) -> bool:
        return self._done == len(self._copies)

    def using(self) -> Any:
        # What is computed on the stream comes after its copies
        self.mark()()
        return super().using()

    def copy(self, target: Any, source: Any) -> None:
        self._copies.append((target, source))
        self.most = max(self.most, len(self._copies) - self._done)

    def mark(self) -> Any:
        count = len(self._copies)

        def wait() -> None:
            for target, source in self._copies[self._done : count]:
                target.copy_(source)
            self._done = max(self._done, count)

        return wait


def write(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Write arrays one after another, unaligned; return their ranges."""
    ranges, data = {}, b"header."
    for name, array in arrays.items():
        kind = TYPES[str(array.dtype)]
        ranges[name] = TensorRange(str(path), name, kind, array.shape, len(data), array.nbytes)
        data += array.tobytes()
    path.write_bytes(data)
    return ranges


def load_all(tensors: list[StoredTensor], dtype: Any, device_queue: Any, threads: int = 3) -> Any:
    cache = HostCache(device_queue)
    load = StagedLoad("cpu", dtype, device_queue, cache, threads=threads, chunk=CHUNK)
    try:
        values = [load.read(tensor) for tensor in tensors]
        load.finish()
    except StoreError:
        load.cancel()
        raise
    return values


def test_bytes_are_those_of_the_blobs(tmp_path: Path) -> None:
    """In the type of the blob and in others, of one buffer and of many, empty or a scalar."""
    draw = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {
        f"{count}": draw.normal(size=count).astype(np.float32) for count in (1, 15, 16, 17, 500)
    }
    arrays |= {"none": np.empty((0, 3), np.float32), "scalar": np.array(4, np.float32)}
    arrays["half"] = draw.normal(size=(7, 9)).astype(np.float16)
    ranges = write(tmp_path / "it", arrays)
    tensors = [StoredTensor(name, one.dtype, one.shape, one) for name, one in ranges.items()]
    for dtype in (torch.float32, torch.bfloat16):
        device = RecordedQueue()
        for found, expected in zip(load_all(tensors, dtype, device), arrays.values(), strict=True):
            assert torch.equal(found, torch.from_numpy(np.array(expected)).to(dtype))
            assert found.shape == expected.shape
        # Two buffers for each thread, of which one is filled while the other is copied
        assert len(device.hosts) == 6 and {len(host) for host in device.hosts} == {CHUNK}
        assert max(stream.most for stream in device.streams) == 2


@pytest.mark.parametrize(
    ("kind", "group"),
    [("int4", 32), ("int8", 64), ("mxfp4", None), ("mxfp8", None), ("nvfp4", None)],
)
@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 64)])
def test_codes_are_dequantized_on_the_device(
    tmp_path: Path, kind: str, group: int | None, shape: tuple[int, ...]
) -> None:
    """Bit for bit as without it, for every code, in slabs of rows."""
    from clowder_aimage.model.tensor_view import read_torch_tensor
    from clowder_aimage.model.torch import dequantize

    quantization = Quantization.parse(kind, group)
    draw, scales = np.random.default_rng(3), quantization.compute_scales_shape(shape)
    words = quantization.compute_codes_shape(shape)
    arrays = {"": draw.integers(0, 1 << 32, words, dtype=np.uint32)}
    if quantization.type.has_bias:
        for name in (".scale", ".bias"):
            arrays[name] = draw.normal(size=scales).astype(np.float16)
    else:
        # Scales whose products are finite
        arrays[".scale"] = draw.integers(100, 120, scales).astype(np.uint8)
    if kind == "nvfp4":
        arrays[".global_scale"] = draw.normal(size=shape[:-1]).astype(np.float32)
    ranges = write(tmp_path / "it", arrays)
    parts = {name: part for name, part in ranges.items() if name}
    tensor = StoredTensor("it", kind, shape, ranges[""], quantization, parts)
    expected = read_torch_tensor(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize.dequantize_into, "__defaults__", (2 * shape[-1],))
        for dtype in (torch.float32, torch.bfloat16):
            (found,) = load_all([tensor], dtype, RecordedQueue())
            same = (found == expected.to(dtype)) | (found.isnan() & expected.isnan())
            assert same.all() and found.dtype == dtype


def test_tensors_are_read_in_the_order_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {str(number): np.full(40, number, np.float32) for number in range(20)}
    ranges = write(tmp_path / "it", arrays)
    starts: list[int] = []
    read_into = weight_load._read_into

    def note(handle: int, buffer: Any, start: int, path: str) -> None:
        starts.append(start)
        read_into(handle, buffer, start, path)

    monkeypatch.setattr(weight_load, "_read_into", note)
    tensors = [StoredTensor(name, one.dtype, one.shape, one) for name, one in ranges.items()]
    load_all(tensors, torch.float32, RecordedQueue(), threads=1)
    assert starts == sorted(starts) and len(starts) == 20 * 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [("truncated", "was truncated after its header was read"), ("missing", "cannot be read: No")],
)
def test_an_error_in_a_thread_ends_the_load(tmp_path: Path, damage: str, message: str) -> None:
    arrays = {str(number): np.full(40, number, np.float32) for number in range(20)}
    ranges = write(tmp_path / "it", arrays)
    tensors = [StoredTensor(name, one.dtype, one.shape, one) for name, one in ranges.items()]
    if damage == "truncated":
        os.truncate(tmp_path / "it", 1000)
    else:
        (tmp_path / "it").unlink()
    before = threading.active_count()
    device = RecordedQueue()
    with pytest.raises(StoreError, match=message):
        load_all(tensors, torch.float32, device)
    assert threading.active_count() == before
    # Copies that were called before have ended: their memory is released now
    assert all(stream.is_idle for stream in device.streams)


def test_an_error_of_the_main_thread_ends_the_others(tmp_path: Path) -> None:
    (one,) = write(tmp_path / "it", {"0": np.zeros(4, np.float32)}).values()
    tensor = StoredTensor("0", "F32", one.shape, one)
    before = threading.active_count()
    device = RecordedQueue()
    begin = partial(begin_load, "cpu", torch.float32, device, HostCache(device))
    with pytest.raises(ModelError, match="no such"), begin() as load:
        load.read(tensor)
        raise ModelError("no such layer")
    wrong = TensorRange(one.path, "0", "F8_E5M2", (4,), one.start, 4)
    with pytest.raises(ModelError, match="cannot read F8_E5M2"), begin() as load:
        load.read(StoredTensor("0", "F8_E5M2", (4,), wrong))
    assert threading.active_count() == before


def test_a_model_that_is_copied_makes_the_same_picture(copied: Any, tmp_path: Path) -> None:
    mapped = open_tiny(tmp_path / "mapped")
    mapped.library._queue = DeviceQueue()
    assert np.array_equal(render(copied), render(mapped))
    assert copied.library._queue.hosts


def test_the_memory_of_joined_weights_is_returned_before_blocks_are_compiled(
    copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device keeps what is freed, in pieces that are too small for the arrays of a picture."""
    from clowder_aimage.model.torch import network
    from clowder_aimage.model.torch.operation import join_layers

    done: list[str] = []

    def join(module: Any) -> bool:
        is_joined = join_layers(module)
        done.append("join")
        return is_joined

    monkeypatch.setattr(network, "join_layers", join)
    monkeypatch.setattr(network.TorchNetwork, "compile", lambda _: done.append("compile"))
    monkeypatch.setattr(type(copied.library.memory), "clear", lambda _: done.append("clear"))
    copied.networks.transformer.get()
    assert done == ["join", "clear", "compile"]


def test_a_damaged_model_is_named(copied: Any) -> None:
    """A blob that shrank after the check ends the load with the sentence of the thread."""
    weights = copied.networks.weights["transformer"]
    damaged = Path(weights.find("layers.0.attention.to_q.weight").values.path)
    damaged.chmod(0o600)
    os.truncate(damaged, damaged.stat().st_size - 1)
    with pytest.raises(AImageError, match="was truncated after its header was read"):
        copied.networks.transformer.get()
    assert not copied.networks.transformer.is_loaded


# -- the memory of the machine


def test_what_is_loaded_again_comes_from_the_hosts_memory(tmp_path: Path) -> None:
    """Of several slabs; tensors without room come from their files."""
    draw = np.random.default_rng(5)
    arrays = {str(count): draw.normal(size=count).astype(np.float32) for count in (300, 5, 400)}
    ranges = write(tmp_path / "it", arrays)
    tensors = [StoredTensor(name, one.dtype, one.shape, one) for name, one in ranges.items()]
    device = RecordedQueue()
    cache = HostCache(device, slab=512)
    cache.room = 3 * 512 + 100

    def load(*, keeps: bool) -> list[Any]:
        staged = StagedLoad(
            "cpu", torch.float32, device, cache, keeps=keeps, threads=1, chunk=CHUNK
        )
        values = [staged.read(tensor) for tensor in tensors]
        staged.finish()
        return values

    load(keeps=False)
    assert cache.size == 0
    load(keeps=True)
    assert cache.size == 3 * 512 <= cache.room
    found = [cache.find(one) is not None for one in ranges.values()]
    assert found == [True, True, False]
    # Those in memory are not read from the file again
    (tmp_path / "it").write_bytes(b"\0" * ranges["400"].start + arrays["400"].tobytes())
    for value, expected in zip(load(keeps=True), arrays.values(), strict=True):
        assert torch.equal(value, torch.from_numpy(expected))
    cache.clear()
    assert cache.size == 0 and cache.find(ranges["5"]) is None


def test_memory_that_the_system_refuses_is_no_error(tmp_path: Path) -> None:
    class Refusing(RecordedQueue):
        def allocate_host(self, size: int) -> Any:
            raise RuntimeError("out of pinned memory")

    ranges = write(tmp_path / "it", {"0": np.zeros(4, np.float32)})
    cache = HostCache(Refusing())
    cache.room = 1 << 30
    assert cache.take(ranges["0"]) is None and cache.room == 0


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the tiny model on a device with memory of its own."""
    from clowder_aimage.model.torch import library

    monkeypatch.setattr(library, "open_queue", lambda _: RecordedQueue())
    return open_tiny(tmp_path)


def open_tiny(blobs: Path) -> Any:
    # Also where PyTorch sees a GPU
    tuning = TorchTuning(device="cpu")
    source = import_directory(TINY, blobs)
    return load_pipeline(*source, backend="torch", dtype="float32", tuning=tuning)


def render(pipeline: Any) -> Any:
    request = GenerateRequest.of("a fox", width=32, height=32, steps=2)
    return [one.pixels for one in pipeline.generate(request) if isinstance(one, Image)]


def test_a_model_that_slept_is_loaded_without_its_files(
    copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device is empty meanwhile; without room, its files are read again."""
    expected = render(copied)
    copied.sleep()
    modules = copied.networks.budget.modules
    assert not copied.state.captions and not any(one.is_loaded for one in modules)
    assert np.array_equal(render(copied), expected)
    copied.sleep()
    copied.copy_to_host(1 << 30, lambda: False)
    assert 0 < copied.library.host.size <= copied.library.host_room
    read: list[Any] = []
    monkeypatch.setattr(weight_load, "_read_into", lambda *arguments: read.append(arguments))
    assert np.array_equal(render(copied), expected) and not read


def test_a_copy_to_the_host_ends_when_a_command_comes(copied: Any) -> None:
    answers = iter([False] * 3)
    copied.copy_to_host(1 << 30, lambda: next(answers, True))
    assert len(copied.library.host._arrays) == 3
