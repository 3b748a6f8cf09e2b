"""The interface of libraries that compute networks: MLX, or PyTorch.

Latents, noise, masks and pixels between networks are arrays of numpy, in float32.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
MIB = 1 << 20


class DeviceMemory(Protocol):
    """The memory of a library's device; all numbers are bytes."""

    @property
    def is_shared(self) -> bool:
        """Return True if the device uses the memory of this process."""
        ...

    @property
    def total(self) -> int | None:
        """Return the usable memory of a GPU; None if unknown, or on a CPU."""
        ...

    @property
    def active(self) -> int:
        """Return the present memory of arrays."""
        ...

    def begin(self) -> None:
        """Begin to measure a peak."""
        ...

    @property
    def peak(self) -> int | None:
        """Return the peak since ``begin``, or None if it is not measured."""
        ...

    def clear(self) -> None:
        """Return the memory of released arrays to the system."""
        ...


class ArrayLibrary(Protocol):
    """A library on a device, with one compute type of ``itemsize`` bytes."""

    itemsize: int
    # A warning about the device
    warning: str | None

    @property
    def is_warmed_up(self) -> bool:
        """Return True if a picture is made before the first request: the device starts slowly."""
        ...

    @property
    def dtype_name(self) -> str:
        """Return the name of the compute type: float32 or bfloat16."""
        ...

    def describe(self) -> str:
        """Return the device, with the version of PyTorch or the BLAS of MLX on a CPU."""
        ...

    @property
    def memory(self) -> DeviceMemory:
        """Return the memory of the device."""
        ...

    def to_array(self, values: npt.NDArray[Any]) -> Any:
        """Return an array on the device: floats in the compute type, integers as they are."""
        ...

    def to_floats(self, array: Any) -> Floats:
        """Return the values of an array, in float32."""
        ...

    def to_colours(self, array: Any) -> Floats:
        """Return values from -1 to 1 as values from 0 to 1, clipped, scaled in their own type."""
        ...

    def evaluate(self, *arrays: Any) -> None:
        """Compute arrays that are lazy."""
        ...

    def step_cache(self, threshold: float) -> Any:
        """Return a cache of steps, for one caption and one picture."""
        ...

    def estimate_decoding_memory(self, width: int, pixels: int) -> float:
        """Estimate the bytes to decode a picture with layers of ``width`` channels at full size."""
        ...

    def estimate_layer_memory(self, width: int, hidden: int, heads: int, length: int) -> float:
        """Estimate the bytes to compute a layer of a transformer for ``length`` tokens."""
        ...
