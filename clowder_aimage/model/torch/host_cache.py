"""Stored bytes of weights that were released, in memory from which a device copies by itself.

A network that is loaded again needs neither its files nor their pages. The memory has a bound, and
is taken in slabs: PyTorch rounds each allocation of pinned memory up to a power of two.
"""

from __future__ import annotations

import threading

import torch

from clowder_aimage.model.stored_tensor import TensorRange
from clowder_aimage.model.torch.device_queue import DeviceQueue

# Bytes of a slab, and the multiple at which arrays begin
SLAB, _ALIGNMENT = 64 << 20, 256
Pieces = tuple[torch.Tensor, ...]


class HostCache:
    """Arrays of blobs by their location; ``room`` bytes at most. Used by several threads."""

    def __init__(self, device_queue: DeviceQueue, slab: int = SLAB) -> None:
        self._queue, self._slab = device_queue, slab
        self._lock = threading.Lock()
        self._arrays: dict[tuple[str, int], Pieces] = {}
        self._current: torch.Tensor | None = None
        self._used = 0
        # Bytes of all slabs
        self.size = 0
        self.room = 0

    def find(self, values: TensorRange) -> Pieces | None:
        """Return the bytes of an array, in their order; None if they are not here."""
        with self._lock:
            return self._arrays.get((values.path, values.start))

    def take(self, values: TensorRange) -> Pieces | None:
        """Return memory for the bytes of an array; None if there is no room."""
        pieces, missing = list[torch.Tensor](), values.nbytes
        with self._lock:
            if self._count_slabs(missing) * self._slab > self.room - self.size:
                return None
            while missing:
                try:
                    slab = self._open_slab()
                except RuntimeError:
                    # The system grants less than it has; what is here stays
                    self.room = self.size
                    return None
                piece = slab[self._used : self._used + missing]
                pieces.append(piece)
                missing -= len(piece)
                self._used += -(-len(piece) // _ALIGNMENT) * _ALIGNMENT
        return tuple(pieces)

    def keep(self, values: TensorRange, pieces: Pieces) -> None:
        """Keep the bytes of an array, which ``pieces`` of ``take`` have now."""
        with self._lock:
            self._arrays[values.path, values.start] = pieces

    def clear(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._arrays.clear()
            self._current, self._used, self.size = None, 0, 0

    def _count_slabs(self, size: int) -> int:
        """Return the number of new slabs for ``size`` bytes."""
        rest = 0 if self._current is None else max(0, self._slab - self._used)
        return -(-max(0, size - rest) // self._slab)

    def _open_slab(self) -> torch.Tensor:
        if self._current is None or self._used >= self._slab:
            self._current, self._used = self._queue.allocate_host(self._slab), 0
            self.size += self._slab
        return self._current
