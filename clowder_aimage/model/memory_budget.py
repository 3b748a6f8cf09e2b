"""Memory of networks: a budget, and a module that can be released and reloaded.

A text encoder is as large as the other networks, and is only needed for new texts. If the networks
do not all fit, it is released after a text is encoded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from clowder_aimage.model.backend import Network, mx, on_gpu, tree_flatten
from clowder_aimage.model.pipeline import Arrays

AUTO, KEEP, RELEASE = "auto", "keep", "release"
# Memory to decode a picture, in values of the widest layer at full size: MLX unfolds the 3 by 3
# neighbourhood of every pixel in memory on a CPU, but not on a GPU
_ON_CPU, _ON_GPU = 28, 8
_UNFOLDED = 9  # values of an unfolded pixel, 3 by 3
# The limit of MLX's matrix multiplication on a CPU (0.32.4, measured): attention with more scores
# computes wrong numbers with one head, and crashes the process with several
_MAX_NUMBERS = (1 << 31) - 1
_FUSED = (64, 80, 128)  # head dimensions for which a GPU stores no scores

N = TypeVar("N", bound=Network)


class OffloadedModule(Generic[N]):
    """A network that ``load`` loads: at once, and again when it is needed after ``release``.

    Raises the errors of ``load``.
    """

    def __init__(self, load: Callable[[], N]) -> None:
        self._load = load
        self._network: N | None = load()
        self.size = size_of(self._network)

    @property
    def is_loaded(self) -> bool:
        return self._network is not None

    def get(self) -> N:
        if self._network is None:
            self._network = self._load()
        return self._network

    def release(self) -> None:
        """Release the network. Arrays computed with it must be evaluated before."""
        self._network = None
        mx.clear_cache()


class MemoryBudget:
    """The memory for networks and pictures: estimated before the first picture, then measured.

    ``policy``: KEEP, RELEASE, or AUTO to keep networks that fit into ``memory`` bytes (None: all
    fit). ``total``: memory of the device in bytes (None: unknown), an upper bound for any array.
    """

    def __init__(self, policy: str = KEEP, memory: int | None = None) -> None:
        self.policy, self.memory = policy, memory
        self.total = device_memory() or machine_memory()
        self._peaks: dict[int, int] = {}  # bytes, by the pixels of a picture
        self._active = 0

    @property
    def arrays(self) -> Arrays:
        """Return the limit of arrays. MLX ends the process if an allocation fails."""
        return Arrays(self.total, None if on_gpu() else _MAX_NUMBERS)

    def fits(self, networks: int, pixels: int, guess: float) -> bool:
        """Return whether networks of this size in bytes can stay in memory while a picture is made.

        ``guess`` is the estimated bytes per pixel until a picture has been measured.
        """
        if self.policy != AUTO or self.memory is None:
            return self.policy != RELEASE
        return networks + self._needed(pixels, guess) <= self.memory

    def _needed(self, pixels: int, guess: float) -> float:
        """Return the peak of the next larger picture, else an extrapolation from the largest."""
        if not self._peaks:
            return pixels * guess
        larger = [size for size in self._peaks if size >= pixels]
        if larger:
            return self._peaks[min(larger)]
        largest = max(self._peaks)
        return self._peaks[largest] * pixels / largest

    def begin(self) -> None:
        """Start to measure a picture."""
        self._active = mx.get_active_memory()
        mx.reset_peak_memory()

    def end(self, pixels: int) -> None:
        """Record the peak of the picture."""
        peak = max(0, mx.get_peak_memory() - self._active)
        self._peaks[pixels] = max(peak, self._peaks.get(pixels, 0))


def size_of(network: Any) -> int:
    """Return the bytes of a network's weights."""
    weights: Any = tree_flatten(network.parameters())
    return sum(value.nbytes for _, value in weights)


def decoding(width: int, dtype: mx.Dtype) -> float:
    """Estimate the bytes per pixel while layers of ``width`` channels decode a picture."""
    return width * dtype.size * (_ON_GPU if on_gpu() else _ON_CPU)


def unfolded(width: int, pixels: int, dtype: mx.Dtype) -> int:
    """Return the bytes of the largest array in which a CPU unfolds pixels of ``width`` channels."""
    return 0 if on_gpu() else pixels * width * _UNFOLDED * dtype.size


def scores(heads: int, channels: int, length: int) -> int:
    """Return the number of attention scores between ``length`` tokens."""
    return 0 if on_gpu() and channels in _FUSED else heads * length * length


def machine_memory() -> int | None:
    """Return the memory of the machine in bytes, or None if it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def device_memory() -> int | None:
    """Return the usable memory of the GPU in bytes, or None if unknown or without a GPU.

    Source: MLX, ``device_info``: Metal reports a recommended size, CUDA the total.
    """
    if not on_gpu():
        return None
    info = mx.device_info()
    if advised := int(info.get("max_recommended_working_set_size", 0)):
        return advised
    total = int(info.get("total_memory", 0) or info.get("memory_size", 0))
    return total * 9 // 10 or None
