"""The components of a model as networks of diffusers and transformers.

A network is made on PyTorch's meta device, without values; its parameters become tensors over the
blobs, mapped copy-on-write, or copies of them in the compute type on the device. Nothing is
downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from clowder_aimage.errors import ModelError
from clowder_aimage.model.flow.component import ModelComponents
from clowder_aimage.model.flow.memory_budget import LayeredModule, Module
from clowder_aimage.model.parameter_names import FLOATS, check_shape, match_tensors
from clowder_aimage.model.torch.adapted_network import TorchAdaptation
from clowder_aimage.model.torch.layer_offload import LayerOffload, compute_least_count, iter_layers
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.row_scaled_weights import RowScaledWeights
from clowder_aimage.model.torch.tuning import tune
from clowder_aimage.model.weights import ModelWeights

# A counter of the training, without a parameter here
_COUNTERS = ("num_batches_tracked",)
_FACTORIES = (torch.empty, torch.ones, torch.zeros)
# The functions of torch.nn.init that fill parameters
_FILLING = (torch.Tensor.fill_, torch.Tensor.zero_)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TorchNetwork(Protocol):
    """A network that is called with arrays of the library; ``module`` has its parameters."""

    module: Any

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor."""
        ...

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used."""
        ...


class _Unfilled(TorchFunctionMode):  # type: ignore[misc]
    """A context that makes modules without values: neither memory nor initial values.

    Their parameters are on the meta device. Tables that modules compute are computed.
    """

    def __torch_function__(
        self, function: Any, _: Any, arguments: Any = (), keywords: Any = None, /
    ) -> Any:
        keywords = keywords or {}
        if function in _FACTORIES:
            return torch.empty(*arguments, **keywords | {"device": "meta"})
        if function in _FILLING and arguments[0].is_meta:
            return arguments[0]
        if getattr(function, "__module__", "") == torch.nn.init.__name__:
            return arguments[0] if arguments else keywords["tensor"]
        return function(*arguments, **keywords)


@dataclass(frozen=True, slots=True, eq=False)
class TorchComponents(ModelComponents):
    """Networks of PyTorch: ``make`` makes one from its parsed config and the fields of its file."""

    library: TorchLibrary

    def build_module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        def build_empty() -> TorchNetwork:
            with _Unfilled():
                network: TorchNetwork = make(config, weights.config)
            tune(network.module, self.library.tuning)
            return network

        library, component, network = self.library, weights.component, build_empty()
        names = [name for name in weights if not network.skip(name)]
        skipped = tuple(f"{component}/{name}" for name in weights if network.skip(name))
        parameters, counts, types = _check(component, network, weights, names)
        adaptation = TorchAdaptation(component, network.sanitize, network.skip, library)
        loader = _NetworkLoader(library, weights, parameters, build_empty, network)
        load, size = loader.load, loader.compute_size(counts)
        least = size
        if library.can_offload(types):
            least = compute_least_count(network.module, counts) * library.itemsize
        request_adaptation = adaptation if is_adapted else None
        sizes = size, least
        return LayeredModule(config, sizes, load, request_adaptation, library.memory.clear, skipped)


class _NetworkLoader:
    """The loads of a network: the first one fills the network that was ``checked``.

    parameters: their names, by those of the tensors. make: return another network, without values.
    """

    def __init__(
        self,
        library: TorchLibrary,
        weights: ModelWeights,
        parameters: Mapping[str, str],
        make: Callable[[], TorchNetwork],
        checked: TorchNetwork,
    ) -> None:
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
        network = self._checked or self._make()
        self._checked = None
        self._fill(network, in_layers=in_layers)
        return network

    def _fill(self, network: TorchNetwork, *, in_layers: bool) -> None:
        """Give a network its tensors, in the compute type, and recompute tables that no file has.

        ``in_layers``: tensors of layers stay as they are until the layer runs. The names were
        checked, so that ``load_state_dict`` could only take longer.
        """
        library, module = self._library, network.module
        modules, layers = dict(module.named_modules()), {}
        if in_layers:
            layers = dict(iter_layers(module))
        for name, parameter in self._parameters.items():
            path, _, key = parameter.rpartition(".")
            is_later = ".".join(parameter.split(".", 2)[:2]) in layers
            value: torch.Tensor | None = self._row_scaled.read(name)
            if value is None:
                stored = self._weights.read_torch(name)
                # A blob that was still arriving at the check has its type verified here
                if stored.dtype not in _FLOATS:
                    raise _build_type_error(self._weights.component, name)
                value = stored if is_later else stored.to(library.device, library.dtype)
            kind = "_parameters" if key in vars(modules[path])["_parameters"] else "_buffers"
            if kind == "_parameters":
                value = torch.nn.Parameter(value, requires_grad=False)
            # ``setattr`` takes several times as long
            vars(modules[path])[kind][key] = value
        for layer in layers.values():
            LayerOffload(layer, library.device, library.dtype)
        module.eval()
        if (rotary := getattr(module, "rotary_emb", None)) is not None:
            # The tables of rotary positions are computed, not stored
            rotary.to(library.device)


def _check(
    component: str, network: TorchNetwork, weights: ModelWeights, names: list[str]
) -> tuple[dict[str, str], dict[str, int], set[str | None]]:
    """Return the names of parameters by those of all tensors, their numbers of values, and types.

    Raises ModelError: a tensor is missing, unexpected, or has another shape or type.
    """
    parameter_shapes = {
        name: tuple(value.shape)
        for name, value in network.module.state_dict().items()
        if not name.endswith(_COUNTERS)
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
