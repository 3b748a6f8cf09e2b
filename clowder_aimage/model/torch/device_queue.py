"""The work that a device does after a call has returned: the one place that tells GPUs from a CPU.

A GPU computes what was called later than the calls return, and copies from pinned memory beside its
computations. Tests put a recorded queue in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from clowder_aimage.model.torch.device import CUDA, MPS


def do_nothing() -> None:
    """Wait for nothing: all work is done."""


class CopyStream:
    """Copies and computations beside those of the main thread: on a CPU they are done at once."""

    def follow(self) -> None:
        """Begin after the work that the main thread has called: memory may have been in use."""

    def using(self) -> AbstractContextManager[object]:
        """Return a context in which this thread computes on the stream."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; ``source`` must stay until a later mark has been waited for."""
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for what was called on the stream before."""
        return do_nothing


class DeviceQueue:
    """The queue of a CPU: calls return when their work is done.

    ``has_own_memory``: weights are copied to the device, rather than used where they are mapped.
    """

    has_own_memory = False

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the work that was called before."""
        return do_nothing

    def allocate_host(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of this machine, from which the device copies by itself."""
        return torch.empty(size, dtype=torch.uint8)

    def open_stream(self) -> CopyStream:
        """Return a new stream of copies."""
        return CopyStream()


class _CudaStream(CopyStream):
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def using(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.using():
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        return _record(self._stream)


class _CudaQueue(DeviceQueue):
    has_own_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Callable[[], None]:
        return _record(torch.cuda.current_stream(self._device))

    def allocate_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def open_stream(self) -> CopyStream:
        return _CudaStream(self._device)


def _record(stream: torch.cuda.Stream) -> Callable[[], None]:
    # A wait that spins would take a core from the encoder of pictures
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    wait: Callable[[], None] = event.synchronize
    return wait


class _MpsQueue(DeviceQueue):
    def mark(self) -> Callable[[], None]:
        wait: Callable[[], None] = torch.mps.synchronize
        return wait


def open_queue(device: str) -> DeviceQueue:
    """Return the queue of a device by its name."""
    kind = device.partition(":")[0]
    if kind == CUDA:
        return _CudaQueue(torch.device(device))
    return _MpsQueue() if kind == MPS else DeviceQueue()
