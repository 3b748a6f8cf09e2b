"""The components of a model as networks of PyTorch.

A network is made on PyTorch's meta device, without values; its parameters become tensors over the
blobs, mapped copy-on-write, or copies of them in the compute type on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clowder_aimage.errors import ModelError
from clowder_aimage.model.flow.component import ModelComponents
from clowder_aimage.model.flow.memory_budget import LayeredModule, Module
from clowder_aimage.model.parameter_names import FLOATS, check_shape, match_tensors
from clowder_aimage.model.torch.adapted_network import TorchAdaptation
from clowder_aimage.model.torch.layer_offload import LayerOffload, compute_least_count, iter_layers
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.row_scaled_weights import RowScaledWeights
from clowder_aimage.model.torch.weight_load import keep_on_host
from clowder_aimage.model.weights import ModelWeights


@dataclass(frozen=True, slots=True, eq=False)
class TorchComponents(ModelComponents):
    """Networks of PyTorch: ``make`` makes one from its parsed config and the library."""

    library: TorchLibrary

    def build_module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        library, component = self.library, weights.component

        def build_empty() -> TorchNetwork:
            network: TorchNetwork = make(config, library)
            return network

        network = build_empty()
        names = [name for name in weights if not network.skip(name)]
        skipped = tuple(f"{component}/{name}" for name in weights if network.skip(name))
        parameters, counts, types = _check(component, network, weights, names)
        adaptation = TorchAdaptation(component, network.sanitize, network.skip, library)
        loader = _NetworkLoader(
            library, weights, parameters, build_empty, network, is_copied=library.must_copy(types)
        )
        size = least = loader.compute_size(counts)
        if library.can_offload(types):
            least = compute_least_count(network.module, counts) * library.itemsize
        request_adaptation = adaptation if is_adapted else None
        module: Module = LayeredModule(
            config, (size, least), loader.load, request_adaptation, library.memory.clear, skipped
        )
        module.keep = loader.keep
        return module


class _NetworkLoader:
    """The loads of a network: the first one fills the network that was ``checked``.

    parameters: their names, by those of the tensors. make: return another network, without values.
    is_copied: tensors are copied from those of the blobs.
    """

    def __init__(
        self,
        library: TorchLibrary,
        weights: ModelWeights,
        parameters: Mapping[str, str],
        make: Callable[[], TorchNetwork],
        checked: TorchNetwork,
        *,
        is_copied: bool,
    ) -> None:
        self._is_copied = is_copied
        self._library, self._weights, self._parameters = library, weights, parameters
        self._row_scaled = RowScaledWeights(library, weights)
        self._make = make
        self._checked: TorchNetwork | None = checked

    def compute_size(self, counts: Mapping[str, int]) -> int:
        """Return the bytes of the network on the device, by the ``counts`` of parameters."""
        codes = (name for name in self._parameters if self._row_scaled.has(name))
        code_count = sum(counts[self._parameters[name]] for name in codes)
        return (sum(counts.values()) - code_count) * self._library.itemsize + code_count

    @computing
    def load(self, *, in_layers: bool) -> TorchNetwork:
        """Return the network with its tensors; ``in_layers`` as of ``_fill``."""
        network, is_again = self._checked or self._make(), self._checked is None
        self._checked = None
        self._fill(network, in_layers=in_layers, is_again=is_again)
        clear = self._library.memory.clear
        network.finish(in_layers=in_layers, is_copied=self._is_copied, clear=clear)
        return network

    def keep(self, is_stopped: Callable[[], bool]) -> None:
        """Copy the weights to the memory of this machine, for the next load, if there is room.

        Those that are computed in fp8 are always read from their files. Raises StoreError.
        """
        cache = self._library.host
        for name in self._parameters:
            if self._row_scaled.has(name):
                continue
            for values in self._weights.find(name).ranges:
                if is_stopped():
                    return
                if cache.find(values) is None and keep_on_host(values, cache) is None:
                    return

    def _fill(self, network: TorchNetwork, *, in_layers: bool, is_again: bool) -> None:
        """Give a network its tensors, in the compute type.

        ``in_layers``: tensors of layers stay as they are until the layer runs. The names were
        checked, so that ``load_state_dict`` could only take longer.
        """
        library, module = self._library, network.module
        modules, layers = dict(module.named_modules()), {}
        if in_layers:
            layers = dict(iter_layers(module))
        with library.begin_load(is_again=is_again) as load:
            for name, parameter in self._parameters.items():
                tensor = self._weights.find(name)
                # A blob that was still arriving at the check has its type verified here
                if tensor.quantization is None and tensor.dtype not in FLOATS:
                    raise _build_type_error(self._weights.component, name)
                path, _, key = parameter.rpartition(".")
                is_later = ".".join(parameter.split(".", 2)[:2]) in layers
                value: torch.Tensor | None = self._row_scaled.read(name)
                if value is None:
                    value = self._weights.read_torch(name) if is_later else load.read(tensor)
                # ``setattr`` takes several times as long
                parameters = vars(modules[path])["_parameters"]
                parameters[key] = torch.nn.Parameter(value, requires_grad=False)
        for layer in layers.values():
            LayerOffload(layer, library.device, library.dtype)


def _check(
    component: str, network: TorchNetwork, weights: ModelWeights, names: list[str]
) -> tuple[dict[str, str], dict[str, int], set[str | None]]:
    """Return the names of parameters by those of all tensors, their numbers of values, and types.

    Raises ModelError: a tensor is missing, unexpected, or has another shape or type.
    """
    parameter_shapes = {
        name: tuple(value.shape) for name, value in network.module.state_dict().items()
    }
    matches = match_tensors(component, network.sanitize, parameter_shapes, names)
    types: set[str | None] = set()
    for name, parameter in matches.items():
        shape, kind = weights.get_shape_and_dtype(name)
        check_shape(component, name, shape, parameter_shapes[parameter])
        if kind not in (None, *FLOATS):
            raise _build_type_error(component, name)
        types.add(kind)
    return matches, {name: math.prod(shape) for name, shape in parameter_shapes.items()}, types


def _build_type_error(component: str, name: str) -> ModelError:
    return ModelError(f"{component}/{name}: weights that are not floats are not supported")
