"""Memory for networks: one that can go and come back, and whether it has to.

A text encoder is as large as what makes the picture, and is needed for new texts alone. Where all
does not fit, it goes when a text is encoded: what follows, above all the decoding of a large
picture, has its memory then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from clowder_aimage.model.backend import Network, mx, on_gpu, tree_flatten
from clowder_aimage.model.pipeline import Arrays

AUTO, KEEP, RELEASE = "auto", "keep", "release"
# Bytes while a picture is decoded, in values as wide as the widest layer at full size: on a CPU
# MLX lays the 3 by 3 surroundings of every pixel out in memory, on a GPU it does not
_ON_CPU, _ON_GPU = 28, 8
_SURROUNDINGS = 9  # of them, the 3 by 3 pixels are this many in one array
# MLX's multiplication on a CPU counts so far (0.32.4, seen): attention with more scores than that
# gives wrong numbers with one head, and ends the process with several
_COUNTS_TO = (1 << 31) - 1
_FUSED = (64, 80, 128)  # channels of a head with which a GPU keeps no scores

N = TypeVar("N", bound=Network)


class OffloadedModule(Generic[N]):
    """A network that is loaded by ``load``: now, and again whenever it is asked for and not here.

    Raises what ``load`` raises.
    """

    def __init__(self, load: Callable[[], N]) -> None:
        self._load = load
        self._network: N | None = load()
        self.size = size_of(self._network)

    @property
    def is_here(self) -> bool:
        return self._network is not None

    def get(self) -> N:
        if self._network is None:
            self._network = self._load()
        return self._network

    def release(self) -> None:
        """Let it go. What was computed with it must have been evaluated."""
        self._network = None
        mx.clear_cache()


class MemoryBudget:
    """How much memory there is, and how much a picture takes beside the networks: first a guess,
    then what pictures took.

    ``wish``: KEEP, RELEASE, or AUTO for what fits into ``memory`` bytes (None: all fits).
    ``whole``: bytes that there are at all (None: nobody says), which no array may exceed.
    """

    def __init__(self, wish: str = KEEP, memory: int | None = None) -> None:
        self.wish, self.memory = wish, memory
        self.whole = device_memory() or machine_memory()
        self._took: dict[int, int] = {}  # bytes, by the pixels of a picture
        self._begun = 0

    @property
    def most(self) -> Arrays:
        """How large arrays may be. MLX asks no system whether it got memory: without, it ends."""
        return Arrays(self.whole, None if on_gpu() else _COUNTS_TO)

    def has_room(self, networks: int, pixels: int, guess: float) -> bool:
        """Whether networks of so many bytes can all stay while a picture is made. ``guess``: bytes
        for each pixel, for as long as none was made."""
        if self.wish != AUTO or self.memory is None:
            return self.wish != RELEASE
        return networks + self._needs(pixels, guess) <= self.memory

    def _needs(self, pixels: int, guess: float) -> float:
        """What such a picture took, or the next larger one; else in proportion to the largest."""
        if not self._took:
            return pixels * guess
        larger = [size for size in self._took if size >= pixels]
        if larger:
            return self._took[min(larger)]
        largest = max(self._took)
        return self._took[largest] * pixels / largest

    def begin(self) -> None:
        """A picture is about to be made, with what is in memory now."""
        self._begun = mx.get_active_memory()
        mx.reset_peak_memory()

    def end(self, pixels: int) -> None:
        """The picture is made."""
        took = max(0, mx.get_peak_memory() - self._begun)
        self._took[pixels] = max(took, self._took.get(pixels, 0))


def size_of(network: Any) -> int:
    """Bytes of a network's weights."""
    weights: Any = tree_flatten(network.parameters())
    return sum(value.nbytes for _, value in weights)


def decoding(width: int, dtype: mx.Dtype) -> float:
    """Bytes for each pixel of a picture that is decoded by layers of ``width`` channels, about."""
    return width * dtype.size * (_ON_GPU if on_gpu() else _ON_CPU)


def surroundings(width: int, pixels: int, dtype: mx.Dtype) -> int:
    """Bytes of the largest array in which a CPU lays out so many pixels of ``width`` channels."""
    return 0 if on_gpu() else pixels * width * _SURROUNDINGS * dtype.size


def scores(heads: int, channels: int, length: int) -> int:
    """How many there are while every one of ``length`` tokens attends to every other one."""
    return 0 if on_gpu() and channels in _FUSED else heads * length * length


def machine_memory() -> int | None:
    """Bytes of memory that the machine has; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def device_memory() -> int | None:
    """Bytes of the GPU that may be used; None where MLX computes in the machine's own memory, or
    does not say. (MLX, ``device_info``: Metal names what it recommends, CUDA the whole.)"""
    if not on_gpu():
        return None
    info = mx.device_info()
    if advised := int(info.get("max_recommended_working_set_size", 0)):
        return advised
    whole = int(info.get("total_memory", 0) or info.get("memory_size", 0))
    return whole * 9 // 10 or None
