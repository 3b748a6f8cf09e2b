"""PyTorch as the library of networks: its device, its compute type, and its memory."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from clowder_aimage.errors import ModelError, NoMemoryError
from clowder_aimage.model.batch_table import BatchTable, measure_table
from clowder_aimage.model.flow.array_library import MIB, Floats
from clowder_aimage.model.flow.pixels import check_numbers
from clowder_aimage.model.library_choice import (
    BACKGROUND,
    NEVER,
    TorchTuning,
    choose_dtype_name,
)
from clowder_aimage.model.rounding import COMPILED, EAGER
from clowder_aimage.model.torch.attention import Attention, select_attention
from clowder_aimage.model.torch.batch_file import BatchFile
from clowder_aimage.model.torch.compile_cache import keep_compiled, name_surroundings
from clowder_aimage.model.torch.compiler import check_compiler
from clowder_aimage.model.torch.device import (
    CPU,
    CUDA,
    MPS,
    compute_exactly,
    describe_unused_device,
    select_device,
)
from clowder_aimage.model.torch.device_queue import do_nothing, open_queue
from clowder_aimage.model.torch.graph import SHARE, CudaPass, Record
from clowder_aimage.model.torch.host_cache import HostCache
from clowder_aimage.model.torch.row_scaled import check_fp8
from clowder_aimage.model.torch.step_cache import TorchStepCache
from clowder_aimage.model.torch.weight_load import WeightLoad, begin_load

# Bytes of attention scores at a time
_SCORES = 256 * MIB
_SMALLER = "is insufficient for this picture: use a smaller size, or end other programs"
_NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
# Of errors that are a RuntimeError
_NO_MEMORY = "DefaultCPUAllocator: "
_NO_GPU_MEMORY = ("MPS backend out of memory", "Invalid buffer size: ")
# Types of tensors in blobs
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
# Tenths of a GPU's memory that are used; the driver and other programs need some
_GRANTED = 9
# Bytes of a process on a GPU of NVIDIA, before it computes
_CONTEXT = 512 * MIB
# Of a measurement, after the first one
_TIMES = 2
F = TypeVar("F", bound=Callable[..., Any])


def is_on_gpu() -> bool:
    """Return True if PyTorch computes on a GPU by default."""
    return select_device() != CPU


class TorchMemory:
    """The memory of a device of PyTorch."""

    def __init__(self, device: str) -> None:
        self.kind, self.is_shared = device.partition(":")[0], device == CPU
        self._device = torch.device(device)

    @property
    def is_discrete(self) -> bool:
        if self.kind != CUDA:
            return False
        properties = torch.cuda.get_device_properties(self._device)
        return not getattr(properties, "is_integrated", False)

    @property
    def occupied(self) -> int:
        """The memory that PyTorch has reserved, and that of a context of CUDA."""
        if self.kind == CUDA:
            return int(torch.cuda.memory_reserved(self._device)) + _CONTEXT
        return self.active

    @property
    def total(self) -> int | None:
        """The usable memory of the GPU in bytes, or None on a CPU."""
        if self.kind == CUDA:
            properties = torch.cuda.get_device_properties(self._device)
            return int(properties.total_memory) * _GRANTED // 10
        return int(torch.mps.recommended_max_memory()) if self.kind == MPS else None

    @property
    def active(self) -> int:
        if self.kind == CUDA:
            return int(torch.cuda.memory_allocated(self._device))
        return int(torch.mps.current_allocated_memory()) if self.kind == MPS else 0

    def begin(self) -> None:
        if self.kind == CUDA:
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int | None:
        if self.kind != CUDA:
            return None
        return int(torch.cuda.max_memory_allocated(self._device))

    def clear(self) -> None:
        # The layers of a network refer to each other
        gc.collect()
        if self.kind == CUDA:
            torch.cuda.empty_cache()
        elif self.kind == MPS:
            torch.mps.empty_cache()


def computing(function: F) -> F:
    """Decorate a method that uses a device: without gradients, and with errors of memory.

    The method raises NoMemoryError if the device has too little memory.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            with torch.inference_mode():
                return function(*arguments, **keywords)
        except NotImplementedError as error:
            # MPS lacks some operations
            raise ModelError(
                "PyTorch lacks an operation of this model on this device",
                hint="compute on another device, such as the CPU, or with MLX",
            ) from error
        except RuntimeError as error:
            raise _explain(error) from error

    return call  # type: ignore[return-value]


def _explain(error: RuntimeError) -> Exception:
    """Return an error with an explanation of PyTorch's error, else the error itself."""
    text = str(error)
    is_of_mps = any(words in text for words in _NO_GPU_MEMORY)
    if is_of_mps or isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return NoMemoryError(f"the memory of the GPU {_SMALLER}")
    if _NO_MEMORY in text:
        return NoMemoryError(f"the memory {_SMALLER}")
    if any(words in text for words in _NO_KERNEL):
        return ModelError(
            "the attention backend cannot compute this model on this device",
            hint="use another one, such as native, the default",
        )
    return error


class TorchLibrary:
    """PyTorch on a device, with a compute type and options."""

    def __init__(self, device: str, dtype: torch.dtype, tuning: TorchTuning | None = None) -> None:
        self.device, self.dtype, self.itemsize = device, dtype, int(dtype.itemsize)
        self.memory, self.tuning = TorchMemory(device), tuning or TorchTuning()
        self.attention: Attention = select_attention(self.tuning.attention)
        self.warning: str | None = None
        self._queue = open_queue(device)
        self.batches = BatchTable.of_count(self.tuning.batch or 1)
        self.forms: set[str] = set()
        self.host = HostCache(self._queue)
        # Waits for the last step
        self._last_step = do_nothing

    @classmethod
    def create(cls, dtype: str | None, tuning: TorchTuning | None = None) -> TorchLibrary:
        """Return the library for the name of a compute type.

        Raises UsageError: PyTorch cannot compile here; and as ``select_device`` and ``type_name``.
        """
        tuning = tuning or TorchTuning()
        device = select_device(tuning.device)
        compute_exactly(device, is_reproducible=tuning.reproducible)
        library = cls(
            device, getattr(torch, choose_dtype_name(dtype, is_gpu=device != CPU)), tuning
        )
        library.warning = describe_unused_device(tuning.device)
        if library.compile_mode != NEVER and tuning.compiled is not None:
            keep_compiled(Path(tuning.compiled), device)
        if tuning.compile not in (None, NEVER):
            check_compiler(device)
        if tuning.compute:
            check_fp8(device)
        return library

    @property
    def host_room(self) -> int:
        """The bytes of this machine's memory for weights that are not on the device."""
        return self.host.room

    @host_room.setter
    def host_room(self, size: int) -> None:
        self.host.room = size

    @property
    def compile_mode(self) -> str:
        """When blocks are compiled: ``never`` on a CPU and ``background`` on CUDA by default."""
        if self.tuning.reproducible:
            return NEVER
        return self.tuning.compile or (BACKGROUND if self.memory.kind == CUDA else NEVER)

    @property
    def recorder(self) -> tuple[Record | None, int]:
        """The function that records forward passes, if the device can, and the bytes for them."""
        if self.memory.kind != CUDA:
            return None, 0
        return CudaPass, (self.memory.total or 0) // SHARE

    @property
    def is_warmed_up(self) -> bool:
        return self.memory.kind == CUDA

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self) -> str:
        """Return PyTorch's version and device, such as ``torch 2.13.0 cpu`` or ``..., fp8``."""
        kind = ""
        if self.memory.kind == CUDA:
            kind = f" ({torch.cuda.get_device_name(torch.device(self.device))})"
        product = f", {self.tuning.compute}" if self.tuning.compute else ""
        return f"torch {torch.__version__.partition('+')[0]} {self.device}{kind}{product}"

    def can_offload(self, types: Collection[str | None]) -> bool:
        """Return True if layers can be on the device one by one, for the types of their tensors.

        They are not compiled then; matrices of fp8 cannot. On a CPU only tensors that are converted
        take memory at all, and quantized ones (None) would take it too.
        """
        if self.tuning.compute:
            return False
        return self.must_copy(types) and (self.device != CPU or None not in types)

    def must_copy(self, types: Collection[str | None]) -> bool:
        """Return True unless tensors of all these types are mapped; that of quantized is None."""
        return self.device != CPU or {*types} != {_TYPES[self.dtype]}

    def begin_load(self, *, is_again: bool = False) -> AbstractContextManager[WeightLoad]:
        """Return a context that loads tensors to the device in the compute type.

        ``is_again``: they were released before, and may be loaded once more.
        """
        return begin_load(self.device, self.dtype, self._queue, self.host, keeps=is_again)

    @computing
    def to_array(self, values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
        tensor = self._copy(values)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _copy(self, values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """Return values on the device."""
        if isinstance(values, torch.Tensor):
            return values
        # A copy that blocks would wait for all that a GPU has to do before it
        is_queued = self.memory.kind == CUDA
        return torch.from_numpy(np.ascontiguousarray(values)).to(
            self.device, non_blocking=is_queued
        )

    @computing
    def to_floats(self, array: torch.Tensor) -> Floats:
        values: Floats = array.to(CPU, torch.float32).numpy()
        return values

    @computing
    def hold(self, values: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
        return self._copy(values).to(torch.float32)

    @computing
    def measure(self, values: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(values)

    @computing
    def limit_length(self, values: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        # A comparison would wait for the device; the quotient of zeros is NaN
        return values * (length / self.measure(values)).nan_to_num(1.0).clamp(max=1)

    @computing
    def time(self, work: Callable[[], object]) -> float:
        # The first time also starts what a device starts once
        work()
        seconds = []
        for _ in range(_TIMES):
            self._queue.mark()()
            begun = time.perf_counter()
            work()
            self._queue.mark()()
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    def load_batches(
        self, model: object, time_passes: Callable[[int, int], float] | None = None
    ) -> bool:
        # Without room for its networks, there were none
        self.batches = BatchTable.of_count(self.tuning.batch or 1)
        if self.tuning.batch is not None or self.tuning.reproducible:
            return True
        file = None
        if self.tuning.compiled is not None:
            file = BatchFile(Path(self.tuning.compiled) / name_surroundings(self.device))
        # What else the times depend on
        form = EAGER if self.compile_mode == NEVER else COMPILED
        tuning = replace(self.tuning, compile=None, compiled=None)
        key = f"{model} {self.dtype_name} {form} {tuning}"
        known = None if file is None else file.read(key)
        if known is not None:
            self.batches = known
        elif time_passes is not None:
            self.batches, is_final = measure_table(time_passes)
            if file is not None and is_final:
                file.write(key, self.batches)
        return known is not None or time_passes is not None

    def pace(self) -> None:
        previous, self._last_step = self._last_step, self._queue.mark()
        previous()

    @computing
    def to_pixels(self, array: torch.Tensor) -> npt.NDArray[np.uint8]:
        colours = (array * 0.5 + 0.5).clamp(0, 1).to(torch.float32)
        # Clipping does not remove NaN, and a cast to bytes would hide it in a black picture
        is_finite = torch.isfinite(colours).all()
        pixels: npt.NDArray[np.uint8] = self._to_bytes(colours).to(CPU).numpy()
        check_numbers(is_finite=bool(is_finite))
        return pixels

    @staticmethod
    def _to_bytes(colours: torch.Tensor) -> torch.Tensor:
        """Return values from 0 to 1 as bytes on their device, rounded half to even."""
        return (colours * 255).round().to(torch.uint8).contiguous()

    def evaluate(self, *arrays: Any) -> None:  # noqa: ARG002 - nothing is lazy
        return

    def step_cache(self, threshold: float) -> TorchStepCache:
        return TorchStepCache(threshold)

    def estimate_decoding_memory(self, width: int, pixels: int) -> float:
        return 5 * pixels * width * self.itemsize

    def estimate_layer_memory(self, width: int, hidden: int, heads: int, length: int) -> float:
        scores = min(2 * heads * length**2 * self.itemsize, _SCORES)
        return length * (8 * width + 3 * hidden) * self.itemsize + scores
