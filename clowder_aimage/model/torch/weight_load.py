"""Weights from blobs to a device: mapped where they are used, or copied by several threads.

A device with memory of its own gets the stored bytes by way of pinned buffers, two for each thread,
so that one is filled from the file while the other is copied. It casts and dequantizes them itself.
Tensors are taken in the order of their use; a blob that is still arriving is waited for. What is
loaded again comes from the host's memory, if there is room (``host_cache.py``).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from clowder_aimage.errors import ModelError, StoreError
from clowder_aimage.model.stored_tensor import StoredTensor, TensorRange
from clowder_aimage.model.tensor_view import read_torch_tensor
from clowder_aimage.model.torch.dequantize import dequantize_into, read_parts
from clowder_aimage.model.torch.device_queue import CopyStream, DeviceQueue, do_nothing
from clowder_aimage.model.torch.host_cache import HostCache, Pieces

# Of an H100 with PCIe 5, 8 threads copied 21 GB/s, 4 threads 12, and one from mapped files 5
THREADS = 8
# Bytes of a buffer; a pinned one takes as much of the machine's memory
CHUNK = 8 << 20
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    # Codes, four bytes a word
    "U32": torch.uint8,
}


class WeightLoad(Protocol):
    """A load of several tensors; all are filled when its context ends."""

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the values of a tensor in the compute type on the device.

        Raises ModelError, StoreError: it cannot be read, or one before it.
        """
        ...


class MappedLoad:
    """Tensors over the blobs; those of another type, and quantized ones, are copies."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._target: tuple[str, torch.dtype] = device, dtype

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        device, dtype = self._target
        if tensor.quantization is not None:
            target = torch.empty(tensor.shape, dtype=dtype, device=device)
            dequantize_into(target, tensor.quantization, read_parts(tensor, device))
            return target
        values: torch.Tensor = read_torch_tensor(tensor).to(device, dtype)
        return values


class StagedLoad:
    """Copies of tensors on a device, made by threads; ``keeps``: their bytes stay in the cache."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        device_queue: DeviceQueue,
        cache: HostCache,
        *,
        keeps: bool = False,
        threads: int = THREADS,
        chunk: int = CHUNK,
    ) -> None:
        self._device, self._dtype, self._queue = device, dtype, device_queue
        self._cache, self._keeps, self._chunk = cache, keeps, chunk
        self._jobs: queue.SimpleQueue[tuple[StoredTensor, torch.Tensor] | None]
        self._jobs = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        for part in tensor.ranges:
            if part.dtype not in _TYPES:
                raise ModelError(f"{part.key}: PyTorch cannot read {part.dtype}")
        self._check()
        # Of the main thread: a stream does not own what outlives it
        target = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        if target.numel():
            self._jobs.put((tensor, target))
        return target

    def finish(self) -> None:
        """Wait for all tensors. Raises the first error of a thread."""
        self._stop()
        self._check()

    def cancel(self) -> None:
        """Leave out the tensors that wait."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._stop()

    def _stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                stage = _Stage(self._queue, self._cache, keeps=self._keeps, chunk=self._chunk)
                try:
                    while (job := self._jobs.get()) is not None:
                        # After an error the rest is left out
                        if self._error is None:
                            self._fill(stage, *job)
                finally:
                    # Memory that is still written to must not be released
                    stage.wait()
        except BaseException as error:
            # Raised on the main thread
            self._error = self._error or error

    def _fill(self, stage: _Stage, tensor: StoredTensor, target: torch.Tensor) -> None:
        stage.stream.follow()
        if tensor.quantization is None:
            values = tensor.values
            if _TYPES[values.dtype] == target.dtype:
                stage.copy(values, target.reshape(-1).view(torch.uint8))
                return
            raw = self._read(stage, values)
            with stage.stream.using():
                target.copy_(raw)
            return
        parts = {"": self._read(stage, tensor.values)}
        parts |= {suffix: self._read(stage, part) for suffix, part in tensor.parts.items()}
        with stage.stream.using():
            dequantize_into(target, tensor.quantization, parts)

    def _read(self, stage: _Stage, values: TensorRange) -> torch.Tensor:
        """Return an array as stored, on the device; codes are bytes."""
        dtype = _TYPES[values.dtype]
        with stage.stream.using():
            raw = torch.empty(values.nbytes, dtype=torch.uint8, device=self._device)
        stage.copy(values, raw)
        shape: tuple[int, ...] = values.shape
        if values.dtype == "U32":
            shape = (*shape[:-1], 4 * shape[-1])
        return raw.view(dtype).reshape(shape)


class _Stage:
    """The two buffers of a thread, and its stream."""

    def __init__(
        self, device_queue: DeviceQueue, cache: HostCache, *, keeps: bool, chunk: int
    ) -> None:
        self.stream: CopyStream = device_queue.open_stream()
        self._cache, self._keeps = cache, keeps
        self._buffers = [device_queue.allocate_host(chunk) for _ in range(2)]
        self._bytes = [buffer.numpy() for buffer in self._buffers]
        # Wait until a buffer has been copied
        self._waits = [do_nothing, do_nothing]
        self._turn = 0

    def copy(self, values: TensorRange, target: torch.Tensor) -> None:
        """Copy the bytes of an array to a flat tensor of bytes. Raises StoreError."""
        pieces = self._cache.find(values)
        if pieces is None and self._keeps:
            pieces = keep_on_host(values, self._cache)
        if pieces is not None:
            for piece in pieces:
                self.stream.copy(target[: len(piece)], piece)
                target = target[len(piece) :]
            return
        size, chunk = values.nbytes, len(self._buffers[0])
        with _open(values.path) as handle:
            for first in range(0, size, chunk):
                turn, self._turn = self._turn, 1 - self._turn
                self._waits[turn]()
                count = min(chunk, size - first)
                _read_into(handle, self._bytes[turn][:count], values.start + first, values.path)
                self.stream.copy(target[first : first + count], self._buffers[turn][:count])
                self._waits[turn] = self.stream.mark()

    def wait(self) -> None:
        """Wait for all that was called on the stream."""
        self.stream.mark()()


def keep_on_host(values: TensorRange, cache: HostCache) -> Pieces | None:
    """Read an array to the cache; return None if there is no room. Raises StoreError."""
    if (pieces := cache.take(values)) is not None:
        start = values.start
        with _open(values.path) as handle:
            for piece in pieces:
                _read_into(handle, piece.numpy(), start, values.path)
                start += len(piece)
        cache.keep(values, pieces)
    return pieces


@contextmanager
def _open(path: str) -> Iterator[int]:
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        yield handle
    finally:
        os.close(handle)


def _read_into(handle: int, buffer: Any, start: int, path: str) -> None:
    """Fill a buffer from a file; its file system may not map files."""
    view, offset = memoryview(buffer), 0
    while offset < len(view):
        try:
            count = os.preadv(handle, [view[offset:]], start + offset)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
        if not count:
            raise StoreError(f"{path} was truncated after its header was read")
        offset += count


@contextmanager
def begin_load(
    device: str,
    dtype: torch.dtype,
    device_queue: DeviceQueue,
    cache: HostCache,
    *,
    keeps: bool = False,
) -> Iterator[WeightLoad]:
    """Load tensors: when the context ends, all are filled. Raises as ``WeightLoad.read``.

    ``keeps``: the next load of the same tensors needs no files, if the cache has room.
    """
    if not device_queue.has_own_memory:
        yield MappedLoad(device, dtype)
        return
    load = StagedLoad(device, dtype, device_queue, cache, keeps=keeps)
    try:
        yield load
    except BaseException:
        load.cancel()
        raise
    load.finish()
