"""The interface of libraries that compute networks: MLX, or PyTorch.

Between the steps of a picture, latents, noise and masks are held by the library (``hold``), in
float32: on a GPU nothing of a step is copied from it. Otherwise arrays between networks are
those of numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.batch_table import BatchTable

Floats = npt.NDArray[np.float32]
MIB = 1 << 20


class DeviceMemory(Protocol):
    """The memory of a library's device; all numbers are bytes."""

    @property
    def is_shared(self) -> bool:
        """Return True if the device uses the memory of this process."""
        ...

    @property
    def is_discrete(self) -> bool:
        """Return True if the device has memory of its own, beside that of the machine."""
        ...

    @property
    def total(self) -> int | None:
        """Return the usable memory of a GPU; None if unknown, or on a CPU."""
        ...

    @property
    def occupied(self) -> int:
        """Return the memory that this process takes from other processes, at least."""
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
    # Bytes of this machine's memory for weights that are not on the device
    host_room: int
    # A warning about the device
    warning: str | None
    # How many passes are computed at once
    batches: BatchTable
    # Those in which layers were computed since it was cleared, of ``rounding``
    forms: set[str]

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
        """Return the values of an array, or of numbers that are held, in float32."""
        ...

    def hold(self, values: Any) -> Any:
        """Return numbers of numpy or of an array in float32, where they stay between steps.

        They are numpy's with MLX, and on the device with PyTorch. Both have the operators of
        arithmetic, between each other and with Python's numbers, and round alike.
        """
        ...

    def limit_length(self, values: Any, length: Any) -> Any:
        """Return held numbers, scaled down if their norm exceeds ``length``, one of ``measure``."""
        ...

    def measure(self, values: Any) -> Any:
        """Return the norm of held numbers: a number, or one on the device."""
        ...

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device needs for work, after it was done once."""
        ...

    def load_batches(
        self, model: object, time_passes: Callable[[int, int], float] | None = None
    ) -> bool:
        """Set ``batches`` for a model, by an earlier measurement, else by ``time_passes``.

        model: what tells models of other shapes or types apart. time_passes: as of
        ``measure_table``. Returns False if they have yet to be measured.
        """
        ...

    def pace(self) -> None:
        """Wait until the device is at most one step behind; called after each step.

        So a step is prepared while the previous one is computed, and a request is cancelled soon.
        """
        ...

    def to_pixels(self, array: Any) -> npt.NDArray[np.uint8]:
        """Return values from -1 to 1 as bytes, clipped, scaled to 0 to 1 in their own type.

        Raises ModelError: a value is NaN.
        """
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
