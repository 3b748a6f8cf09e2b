"""Recorded forward passes: when a pass is recorded, and which are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@dataclass
class FakeDevice:
    """Records passes of a size; notes what it records and replays."""

    sizes: dict[int, int]
    recorded: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def record(self, function: Any, inputs: Sequence[Any]) -> Any:
        length = len(inputs[0])
        self.recorded.append(length)
        return FakePass(self, length, function)

    def compute(self, inputs: Sequence[Any]) -> Any:
        self.computed.append(len(inputs[0]))
        return inputs[0] + 1


@dataclass
class FakePass:
    device: FakeDevice
    length: int
    function: Any

    @property
    def size(self) -> int:
        return self.device.sizes[self.length]

    def replay(self, inputs: Sequence[Any]) -> Any:
        self.device.replayed.append(self.length)
        return inputs[0] + 1


def run(cache: Any, device: FakeDevice, *lengths: int) -> None:
    for length in lengths:
        output = cache.run(length, device.compute, [torch.full((length,), 2.0)])
        assert output.tolist() == [3.0] * length


def test_a_pass_is_recorded_when_its_shapes_are_used_again() -> None:
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({1: 5, 2: 5})
    cache = PassCache(device.record, 10)
    run(cache, device, 1, 1, 1, 2, 1)
    assert device.computed == [1, 2] and device.recorded == [1]
    assert device.replayed == [1, 1, 1] and cache.size == 5


def test_the_least_recently_used_passes_are_dropped_beyond_the_limit() -> None:
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({1: 4, 2: 4, 3: 6})
    cache = PassCache(device.record, 10)
    run(cache, device, 1, 1, 2, 2, 1, 3, 3)
    assert cache.size == 10 and device.recorded == [1, 2, 3]
    # The second was dropped, and not the first, which was used after it
    run(cache, device, 1, 3)
    assert device.recorded == [1, 2, 3]
    run(cache, device, 2)
    assert device.recorded == [1, 2, 3, 2] and cache.size == 10


def test_a_pass_that_exceeds_the_limit_is_not_recorded_again() -> None:
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({1: 4, 2: 11})
    cache = PassCache(device.record, 10)
    run(cache, device, 1, 1, 2, 2, 2, 2)
    assert device.recorded == [1, 2] and device.computed == [1, 2, 2, 2] and cache.size == 4


def test_a_pass_that_cannot_be_recorded_is_computed() -> None:
    """Its request is served, and no later one tries again."""
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({1: 4})

    def record(function: Any, inputs: Sequence[Any]) -> Any:
        device.record(function, inputs)
        if len(inputs[0]) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return FakePass(device, len(inputs[0]), function)

    cache = PassCache(record, 10)
    run(cache, device, 2, 2, 2, 1, 1)
    assert device.recorded == [2, 1] and device.computed == [2, 2, 2, 1]
    assert device.replayed == [1] and cache.size == 4


def test_replaced_tensors_drop_all_passes() -> None:
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({1: 4})
    cache = PassCache(device.record, 10)
    run(cache, device, 1, 1)
    cache.clear()
    run(cache, device, 1, 1)
    assert device.recorded == [1, 1] and device.computed == [1, 1]


def test_a_device_without_recorded_passes_computes() -> None:
    from clowder_aimage.model.torch.graph import PassCache

    device = FakeDevice({})
    run(PassCache(), device, 1, 1, 1)
    assert device.computed == [1, 1, 1]


def test_a_pass_of_cuda_has_inputs_and_outputs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interface of CUDA graphs: a replay computes again from the same memory."""
    from contextlib import contextmanager, nullcontext
    from types import SimpleNamespace

    from clowder_aimage.model.torch.graph import CudaPass

    reserved, seen = iter((100, 164)), []

    class FakeGraph:
        def replay(self) -> None:
            # The memory that the recording wrote to
            recorded._output.copy_(compute(recorded._inputs))

    @contextmanager
    def record(graph: Any, **options: Any) -> Any:
        seen.append((type(graph), options))
        yield

    fake = SimpleNamespace(
        memory_reserved=lambda _: next(reserved),
        empty_cache=lambda: None,
        CUDAGraph=FakeGraph,
        graph=record,
        device=lambda _: nullcontext(),
        current_stream=lambda _: "own",
        set_stream=seen.append,
    )
    monkeypatch.setattr(torch, "cuda", fake)

    def compute(inputs: Sequence[Any]) -> Any:
        return inputs[0] * 2 + inputs[1]

    first = [torch.ones(3), torch.zeros(3)]
    recorded = CudaPass(compute, first)
    assert recorded.size == 64 and seen == [(FakeGraph, {"capture_error_mode": "thread_local"})]
    one = recorded.replay([torch.full((3,), 5.0), torch.ones(3)])
    other = recorded.replay([torch.full((3,), 7.0), torch.ones(3)])
    assert one.tolist() == [11.0] * 3 and other.tolist() == [15.0] * 3
    assert first[0].tolist() == [1.0] * 3


def test_a_recording_of_cuda_that_fails_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interface of CUDA graphs: their context raises before it leaves the stream."""
    from contextlib import contextmanager, nullcontext
    from types import SimpleNamespace

    from clowder_aimage.model.torch.graph import CudaPass

    streams = ["own"]

    @contextmanager
    def record(*_: Any, **__: Any) -> Any:
        streams.append("recording")
        yield

    def compute(_: Sequence[Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake = SimpleNamespace(
        memory_reserved=lambda _: 0,
        empty_cache=lambda: None,
        CUDAGraph=SimpleNamespace,
        graph=record,
        device=lambda _: nullcontext(),
        current_stream=lambda _: streams[-1],
        set_stream=streams.append,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    with pytest.raises(torch.OutOfMemoryError):
        CudaPass(compute, [torch.ones(3)])
    assert streams == ["own", "recording", "own"]
