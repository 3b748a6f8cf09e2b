"""Forward passes that were recorded on a device once, and are replayed: CUDA graphs.

A replay starts all kernels of a pass at once. A recorded pass holds the memory of its arrays, so
that the least recently used ones are dropped beyond a bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

Pass = Callable[[Sequence[torch.Tensor]], torch.Tensor]
# Of the usable memory of a GPU, for recorded passes
SHARE = 20
_log = logging.getLogger(__name__)


class RecordedPass(Protocol):
    """A pass that was recorded; ``size``: its bytes on the device."""

    size: int

    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output for other inputs of the same shapes."""
        ...


Record = Callable[[Pass, Sequence[torch.Tensor]], RecordedPass]


class PassCache:
    """The recorded passes of a network, by a key of their shapes, up to ``limit`` bytes.

    record: None on a device without recorded passes.
    """

    def __init__(self, record: Record | None = None, limit: int = 0) -> None:
        self._record, self._limit = record, limit
        # The first is the least recently used
        self._passes: dict[Hashable, RecordedPass] = {}
        # Keys that ran once; and those that are too large, or cannot be recorded
        self._run_once: set[Hashable] = set()
        self._large: set[Hashable] = set()

    @property
    def size(self) -> int:
        """Return the bytes of all recorded passes."""
        return sum(recorded.size for recorded in self._passes.values())

    def run(self, key: Hashable, function: Pass, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output of a pass, recorded when a key is used for the second time.

        The first pass also starts what a device starts once, which cannot be recorded.
        """
        if self._record is None or key in self._large:
            return function(inputs)
        recorded = self._passes.pop(key, None)
        if recorded is None:
            if key not in self._run_once:
                self._run_once.add(key)
                return function(inputs)
            recorded = self._try_to_record(self._record, key, function, inputs)
            if recorded is None:
                return function(inputs)
        output = recorded.replay(inputs)
        if recorded.size > self._limit:
            self._large.add(key)
            return output
        while self.size + recorded.size > self._limit:
            del self._passes[next(iter(self._passes))]
        self._passes[key] = recorded
        return output

    def _try_to_record(
        self, record: Record, key: Hashable, function: Pass, inputs: Sequence[torch.Tensor]
    ) -> RecordedPass | None:
        """Return a recorded pass; None if it cannot be recorded, which is not tried again.

        Its memory, and that of its error, is free when this returns.
        """
        try:
            return record(function, inputs)
        except RuntimeError as error:
            # A recording needs memory of its own, and may not wait for the device
            self._large.add(key)
            _log.debug("a forward pass is not recorded", extra={"error": str(error)[:200]})
        return None

    def clear(self) -> None:
        """Drop all passes: tensors that they read are replaced, or the network is released."""
        self._passes.clear()
        self._run_once.clear()
        self._large.clear()


class CudaPass:
    """A pass as a CUDA graph: it reads and writes the same memory at each replay."""

    def __init__(self, function: Pass, inputs: Sequence[torch.Tensor]) -> None:
        device = inputs[0].device
        # A recording does so too: memory that is freed then is not a part of the pass
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        self._inputs = [value.clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile
        options = {"capture_error_mode": "thread_local"}
        stream = torch.cuda.current_stream(device)
        try:
            with torch.cuda.device(device), torch.cuda.graph(self._graph, **options):
                self._output = function(self._inputs)
        except BaseException:
            # The end of a recording that failed leaves its stream as the current one
            torch.cuda.set_stream(stream)
            raise
        self.size = max(0, torch.cuda.memory_reserved(device) - before)

    def replay(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        for fixed, value in zip(self._inputs, inputs, strict=True):
            fixed.copy_(value)
        self._graph.replay()
        # The next replay writes to the same memory
        return self._output.clone()
