"""MLX as the library of networks: its memory, and the components of a model as its networks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.adaptation import Adaptation
from clowder_aimage.model.backend import STRIP, Network, describe, get_device_memory, is_on_gpu, mx
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.compute.attention import MAX_SCORES
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.component import ModelComponents
from clowder_aimage.model.flow.memory_budget import Module, OffloadedModule
from clowder_aimage.model.flow.pixels import to_pixels
from clowder_aimage.model.flow.step_cache import StepCache
from clowder_aimage.model.library_choice import describe_unused_gpu
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor.blas import is_fast

_OTHER = "PyTorch, of the extra [torch], can use GPUs of NVIDIA and AMD"


class MlxMemory:
    """The memory of MLX's default device, without that of numpy's arrays on a CPU."""

    @property
    def is_shared(self) -> bool:
        return not is_on_gpu()

    @property
    def is_discrete(self) -> bool:
        return is_on_gpu() and sys.platform != "darwin"

    @property
    def occupied(self) -> int:
        return int(mx.get_active_memory() + mx.get_cache_memory())

    @property
    def total(self) -> int | None:
        return get_device_memory()

    @property
    def active(self) -> int:
        return int(mx.get_active_memory())

    def begin(self) -> None:
        mx.reset_peak_memory()

    @property
    def peak(self) -> int | None:
        return int(mx.get_peak_memory())

    def clear(self) -> None:
        mx.clear_cache()


class MlxLibrary:
    """MLX with a compute type."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype, self.itemsize = dtype, int(dtype.size)
        self.memory = MlxMemory()
        # Its arrays are loaded from files again
        self.host_room = 0
        self.batches, self.forms = BatchTable(), set[str]()
        self.warning = None if is_on_gpu() else describe_unused_gpu("MLX", _OTHER)

    @property
    def is_warmed_up(self) -> bool:
        return False

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("mlx.core.")

    def describe(self) -> str:
        return describe()

    def to_array(self, values: npt.NDArray[Any]) -> mx.array:
        array = mx.array(values)
        return array.astype(self.dtype) if np.issubdtype(values.dtype, np.floating) else array

    def to_floats(self, array: mx.array | Floats) -> Floats:
        return array if isinstance(array, np.ndarray) else np.array(array.astype(mx.float32))

    def hold(self, values: mx.array | Floats) -> Floats:
        return self.to_floats(values)

    def measure(self, values: Floats) -> float:
        return float(np.linalg.norm(values))

    def limit_length(self, values: Floats, length: float) -> Floats:
        own = self.measure(values)
        return values * np.float32(length / own) if own > length else values

    def time(self, work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def load_batches(
        self,
        model: object,  # noqa: ARG002 - pictures are computed one after another
        time_passes: Callable[[int, int], float] | None = None,  # noqa: ARG002
    ) -> bool:
        return True

    def pace(self) -> None:
        """Do nothing: numbers that are held have been computed."""

    def to_pixels(self, array: mx.array) -> npt.NDArray[np.uint8]:
        return to_pixels(self.to_floats(mx.clip(array * 0.5 + 0.5, 0, 1)))

    def evaluate(self, *arrays: Any) -> None:
        mx.eval(*arrays)

    def step_cache(self, threshold: float) -> StepCache:
        return StepCache(threshold)

    def estimate_decoding_memory(self, width: int, pixels: int) -> float:
        layer = pixels * width * self.itemsize
        # MLX computes whole layers in float32 too
        if self.dtype != mx.float32 and not is_on_gpu():
            return 12 * layer + 4 * STRIP
        # Such layers exist at the same time
        full = 3 if is_fast() and not is_on_gpu() else 5
        # A convolution copies the 3 by 3 neighbours of each pixel
        return full * layer + min(2 * STRIP, 10 * layer)

    def estimate_layer_memory(self, width: int, hidden: int, heads: int, length: int) -> float:
        attention = min(2 * heads * length**2 * self.itemsize, MAX_SCORES)
        return length * (8 * width + 3 * hidden) * self.itemsize + attention


@dataclass(frozen=True, slots=True, eq=False)
class MlxComponents(ModelComponents):
    """Networks of MLX, made by ``make`` from their config.

    ``keep_quantized`` is as in ``ModelWeights.apply``.
    """

    library: MlxLibrary
    keep_quantized: bool | None = None

    def build_module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        dtype = self.library.dtype
        options: dict[str, Any] = {"dtype": dtype, "keep_quantized": self.keep_quantized}

        def load() -> Network:
            network: Network = make(config)
            weights.apply(network, skip=network.skip, **options)
            # Reset: the lazy keys of initial values would grow with each load
            mx.random.seed(0)
            return network

        # Only shapes are read; its arrays are lazy and never computed
        unloaded = make(config)
        size, left_out = weights.check(unloaded, skip=unloaded.skip, **options)
        skipped = tuple(f"{weights.component}/{name}" for name in left_out)
        adaptation = Adaptation(weights.component, unloaded.sanitize, unloaded.skip, dtype)
        request_adaptation = adaptation if is_adapted else None
        return OffloadedModule(
            config, size, load, request_adaptation, self.library.memory.clear, skipped
        )
