"""Memory of networks: a budget, and modules that are loaded when they are used.

A picture needs the text encoder, the transformer and the decoder, one after another. If the memory
is too small for all of them, unused ones are released, and loaded again when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from clowder_aimage.adapter.network_adaptation import NetworkAdaptation
from clowder_aimage.errors import UsageError
from clowder_aimage.model.flow.array_library import MIB, DeviceMemory
from clowder_aimage.model.hardware import get_machine_memory
from clowder_aimage.model.process_memory import read_resident_memory

AUTO, KEEP, RELEASE = "auto", "keep", "release"
# BLAS and the system's allocator take these bytes when they compute
_LIBRARIES = 64 * MIB
# The least memory that is recommended has a margin: libraries differ between runs
_MARGIN = 1.05

N = TypeVar("N")
C = TypeVar("C")


class OffloadedModule(Generic[N, C]):
    """A network of ``size`` bytes, loaded by ``load`` on use, and again after ``release``.

    ``adaptation`` has the adapters of the network; ``clear`` is called after a release; ``skipped``
    names the skipped tensors.
    """

    def __init__(
        self,
        config: C,
        size: int,
        load: Callable[[], N],
        adaptation: NetworkAdaptation | None = None,
        clear: Callable[[], None] = lambda: None,
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.config, self.size, self.adaptation, self.skipped = config, size, adaptation, skipped
        self._load, self._clear = load, clear
        self._network: N | None = None
        # Copies the weights to the memory of this machine, until the argument is true
        self.keep: Callable[[Callable[[], bool]], None] = lambda _: None

    @property
    def is_loaded(self) -> bool:
        return self._network is not None

    @property
    def least(self) -> int:
        """Return the least bytes for its use."""
        return self.size

    def use(self, *, in_layers: bool) -> None:  # noqa: ARG002 - whole networks of MLX
        """Load the network if necessary. Raises as ``get``.

        ``in_layers`` requests the form with the least memory.
        """
        self.get()

    def get(self) -> N:
        """Return the network, with its adapters. Raises the errors of ``load`` and ``apply``."""
        if self._network is None:
            self._network = self._load()
        if self.adaptation is not None:
            self.adaptation.apply(self._network)
        return self._network

    def release(self) -> None:
        """Release the network. Arrays computed with it must be evaluated before."""
        network, self._network = self._network, None
        # A thread may still have it
        if network is not None and hasattr(network, "close"):
            network.close()
        del network
        if self.adaptation is not None:
            self.adaptation.release()
        self._clear()


class LayeredModule(OffloadedModule[N, C]):
    """A network with layers in memory one by one, loaded by ``load(in_layers=True)``.

    ``sizes``: the bytes of all layers, and the least.
    """

    def __init__(
        self, config: C, sizes: tuple[int, int], load: Callable[..., N], *options: Any
    ) -> None:
        super().__init__(config, sizes[0], self._load_network, *options)
        self._least, self._make, self._is_in_layers = sizes[1], load, False

    @property
    def least(self) -> int:
        return self._least

    def _load_network(self) -> N:
        return self._make(in_layers=self._is_in_layers)

    def use(self, *, in_layers: bool) -> None:
        in_layers = in_layers and self._least < self.size
        if self.is_loaded and in_layers != self._is_in_layers:
            self.release()
        self._is_in_layers = in_layers
        self.get()

    def release(self) -> None:
        super().release()
        self._is_in_layers = False


Module = OffloadedModule[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of a generation: its modules, and its memory besides them in bytes."""

    name: str
    modules: tuple[Module, ...]
    work: float

    @property
    def size(self) -> float:
        """Return the memory with only these modules."""
        return self.work + sum(module.size for module in self.modules)

    @property
    def least(self) -> float:
        """Return the memory with layers loaded one by one, if possible."""
        return self.work + sum(module.least for module in self.modules)


class MemoryBudget:
    """The memory for modules and pictures: estimated before the first picture, then measured.

    modules: in the order of their release when memory is short; others come first once they
    are used. memory: bytes for the process (None: sufficient). limit: requests that need more bytes
    are refused. is_last: no further request follows. total: memory of the device in bytes, for
    the arrays of a picture (None: unknown).
    """

    def __init__(self, device: DeviceMemory, *modules: Module) -> None:
        self.modules, self.device = modules, device
        self.memory: int | None = None
        self.limit: int | None = None
        self.is_last = False
        self.total = device.total or get_machine_memory()
        self._policy, self._policies = AUTO, dict[Module, str]()
        self._base_memory = 0
        # By stage: bytes by the pixels of a picture
        self._peaks: dict[str, dict[int, int]] = {}

    def set_memory(
        self, memory: int | None, *, limit: int | None = None, is_last: bool = False
    ) -> None:
        """Set the memory for this process, including the interpreter and libraries."""
        if self.device.is_shared:
            self._base_memory = max(0, read_resident_memory() - self.device.active) + _LIBRARIES
        self.memory, self.limit, self.is_last = memory, limit, is_last

    def set_policies(self, policy: str, exceptions: Mapping[Module, str]) -> None:
        """Set the policy of all modules but ``exceptions``.

        It is KEEP, RELEASE, or AUTO to release a module if memory is short.
        """
        self._policy, self._policies = policy, dict(exceptions)

    def get_policy(self, module: Module) -> str:
        """Return the policy of a module."""
        return self._policies.get(module, self._policy)

    def forget(self, module: Module) -> None:
        """Release a module and stop tracking it."""
        self.modules = tuple(
            kept_module for kept_module in self.modules if kept_module is not module
        )
        module.release()

    def use(self, stage: Stage) -> None:
        """Load the modules of a stage; release others first, if memory is short.

        If the memory is too short for the stage alone, layers are loaded one by one.
        """
        new = [module for module in stage.modules if module not in self.modules]
        self.modules = *new, *self.modules
        for module in self.modules:
            if (
                module.is_loaded
                and module not in stage.modules
                and self._must_release(module, stage)
            ):
                module.release()
        for module in stage.modules:
            module.use(in_layers=not self._has_room(stage.size))

    def _must_release(self, module: Module, stage: Stage) -> bool:
        if (policy := self.get_policy(module)) != AUTO:
            return policy == RELEASE
        loaded = [
            loaded_module
            for loaded_module in self.modules
            if loaded_module.is_loaded and loaded_module not in stage.modules
        ]
        return not self._has_room(stage.size + sum(loaded_module.size for loaded_module in loaded))

    def _has_room(self, size: float) -> bool:
        return self.memory is None or self._base_memory + size <= self.memory

    def has_work(self, stage: Stage, pixels: int, count: int) -> bool:
        """Return True if there is room for the work of ``count`` pictures, beside all networks."""
        loaded = sum(module.size for module in self.modules if module.is_loaded)
        work = self.estimate_work(stage.name, count * pixels, count * stage.work)
        return self._has_room(loaded + work)

    def keeps(self, stages: Sequence[Stage]) -> bool:
        """Return True if the modules of all stages can stay in memory."""
        modules = {module for stage in stages for module in stage.modules}
        policies = {self.get_policy(module) for module in modules}
        if RELEASE in policies:
            return False
        if policies == {KEEP}:
            return True
        work = max(stage.work for stage in stages)
        return self._has_room(work + sum(module.size for module in modules))

    def finish(self, *modules: Module) -> None:
        """Release modules after their last use in a request, if no request follows."""
        for module in modules if self.is_last else ():
            module.release()

    def check(self, stages: Sequence[Stage]) -> None:
        """Refuse a request that exceeds a limit. Raises UsageError with the least memory."""
        least = self._base_memory + max(stage.least for stage in stages)
        if self.limit is not None and least > self.limit:
            raise UsageError(
                f"{self.limit // MIB} MiB of memory are insufficient for this model and size: "
                f"{math.ceil(least * _MARGIN / MIB)} MiB are required"
            )

    def describe(self, stages: Sequence[Stage]) -> str:
        """Describe the networks that stay in memory, and estimate the peak."""
        modules = {module for stage in stages for module in stage.modules}
        sizes = [
            planned.size if self._has_room(planned.size) else planned.least for planned in stages
        ]
        size = max(sizes)
        if sizes != [planned.size for planned in stages]:
            text = "layers of networks are loaded one by one"
        elif self.is_last:
            text = "each network is released after its last use"
        elif self.keeps(stages):
            text = "all networks stay in memory"
            size = sum(module.size for module in modules) + max(stage.work for stage in stages)
        else:
            text = "networks that are not in use are released"
        limit = "" if self.memory is None else f" of {self.memory // MIB} MiB"
        return f"{text}, about {math.ceil((self._base_memory + size) / MIB)} MiB{limit}"

    def estimate_work(self, stage: str, pixels: int, guess: float) -> float:
        """Return the memory of a stage besides its modules, for a picture of this size.

        It is the measured peak of the next larger picture, else extrapolated from the largest, else
        ``guess``.
        """
        if not (peaks := self._peaks.get(stage)):
            return guess
        larger = [size for size in peaks if size >= pixels]
        if larger:
            return peaks[min(larger)]
        largest = max(peaks)
        return peaks[largest] * pixels / largest

    @contextmanager
    def measure(self, stage: Stage, pixels: int) -> Iterator[None]:
        """Record the peak of a stage, unless it fails. Its modules must be loaded before."""
        # Arrays of other stages are active too: only the difference is the work of this one
        active = self.device.active
        self.device.begin()
        yield
        if (peak := self.device.peak) is not None:
            peaks = self._peaks.setdefault(stage.name, {})
            peaks[pixels] = max(0, peak - active, peaks.get(pixels, 0))
