"""PyTorch as the library of networks: its device, its compute type, and its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from clowder_aimage.errors import ModelError, NoMemoryError, UsageError
from clowder_aimage.model.flow.array_library import MIB, Floats
from clowder_aimage.model.library_choice import TorchTuning, type_name
from clowder_aimage.model.torch.tuning import check_compiler

OLDEST = {"torch": (2, 6), "diffusers": (0, 42), "transformers": (5, 0)}
CUDA, MPS, CPU = "cuda", "mps", "cpu"
_SCORES = 256 * MIB  # of attention at a time
_SMALLER = "is insufficient for this picture: use a smaller size, or end other programs"
_NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
_NO_MEMORY = "DefaultCPUAllocator: "  # of a RuntimeError
_GRANTED = 9  # tenths of a GPU's memory
F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def device_name() -> str:
    """Return the device that PyTorch sees: cuda (also ROCm), mps, or cpu.

    Raises UsageError: PyTorch, or a library of its networks, is too old.
    """
    from importlib.metadata import version

    for name, oldest in OLDEST.items():
        found = version(name)
        if tuple(int(part) for part in found.split(".")[:2]) < oldest:
            needed = ".".join(map(str, oldest))
            message = f"{name} {found} is too old: {needed} or newer is required"
            raise UsageError(message, remedy="install_extra", extra="torch")
    if torch.cuda.is_available():
        return CUDA
    return MPS if torch.backends.mps.is_available() else CPU


def on_gpu() -> bool:
    """Return whether PyTorch computes on a GPU."""
    return device_name() != CPU


def dtype_name(name: str | None) -> str:
    """Return the full name of the compute type. Raises as ``type_name``."""
    return type_name(name, is_gpu=on_gpu())


def device_memory() -> int | None:
    """Return the usable memory of the GPU in bytes, or None."""
    return TorchMemory(device_name()).total


def describe() -> str:
    """Return PyTorch's version and device, such as ``torch 2.13.0 cpu``."""
    device = device_name()
    kind = f" ({torch.cuda.get_device_name()})" if device == CUDA else ""
    return f"torch {torch.__version__.partition('+')[0]} {device}{kind}"


class TorchMemory:
    """The memory of a device of PyTorch."""

    def __init__(self, device: str) -> None:
        self.device, self.is_shared = device, device == CPU

    @property
    def total(self) -> int | None:
        """The usable memory of the GPU in bytes, or None on a CPU."""
        if self.device == CUDA:
            return int(torch.cuda.get_device_properties(0).total_memory) * _GRANTED // 10
        return int(torch.mps.recommended_max_memory()) if self.device == MPS else None

    @property
    def active(self) -> int:
        if self.device == CUDA:
            return int(torch.cuda.memory_allocated())
        return int(torch.mps.current_allocated_memory()) if self.device == MPS else 0

    def begin(self) -> None:
        if self.device == CUDA:
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> int | None:
        return int(torch.cuda.max_memory_allocated()) if self.device == CUDA else None

    def clear(self) -> None:
        if self.device == CUDA:
            torch.cuda.empty_cache()
        elif self.device == MPS:
            torch.mps.empty_cache()


class TorchLibrary:
    """PyTorch on a device, with a compute type and options."""

    def __init__(self, device: str, dtype: torch.dtype, tuning: TorchTuning | None = None) -> None:
        self.device, self.dtype, self.itemsize = device, dtype, int(dtype.itemsize)
        self.memory, self.tuning = TorchMemory(device), tuning or TorchTuning()

    @classmethod
    def create(cls, dtype: str | None, tuning: TorchTuning | None = None) -> TorchLibrary:
        """Return the library on the best device, for the name of a compute type.

        Raises UsageError: PyTorch cannot compile here; and as ``device_name`` and ``dtype_name``.
        """
        library = cls(device_name(), getattr(torch, dtype_name(dtype)), tuning)
        if library.tuning.compile:
            check_compiler(library.device)
        return library

    def array(self, values: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def floats(self, array: torch.Tensor) -> Floats:
        found: Floats = array.to(CPU, torch.float32).numpy()
        return found

    def colours(self, array: torch.Tensor) -> Floats:
        return self.floats((array * 0.5 + 0.5).clamp(0, 1))

    def evaluate(self, *arrays: Any) -> None:  # noqa: ARG002 - nothing is lazy
        return

    def decoding(self, width: int, pixels: int) -> float:
        return 5 * pixels * width * self.itemsize

    def transforming(self, width: int, hidden: int, heads: int, length: int) -> float:
        scores = min(2 * heads * length**2 * self.itemsize, _SCORES)
        return length * (8 * width + 3 * hidden) * self.itemsize + scores


def computing(function: F) -> F:
    """Decorate a method that computes networks: without gradients, and with errors of memory.

    The method raises NoMemoryError if the device has too little memory.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            with torch.inference_mode():
                return function(*arguments, **named)
        except NotImplementedError as error:  # of an operation on mps
            raise ModelError("PyTorch lacks an operation of this model on this device") from error
        except RuntimeError as error:
            raise _explained(error) from error

    return wrapped  # type: ignore[return-value]


def _explained(error: RuntimeError) -> Exception:
    """Return the error that explains one of PyTorch, or that itself."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return NoMemoryError(f"the memory of the GPU {_SMALLER}")
    if _NO_MEMORY in text:
        return NoMemoryError(f"the memory {_SMALLER}")
    if any(words in text for words in _NO_KERNEL):
        return ModelError("the backend of attention cannot compute this model on this device")
    return error
