"""The components of a model as networks of diffusers and transformers.

A network is made on PyTorch's meta device, without values; its parameters become tensors over the
blobs, mapped copy-on-write, or copies of them in the compute type on the device. No network is
asked for anything.
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
from clowder_aimage.model.flow.memory_budget import Module, OffloadedModule
from clowder_aimage.model.parameter_names import check_shape, match_tensors
from clowder_aimage.model.torch.adapted_network import TorchAdaptation
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.weights import ModelWeights

_COUNTERS = ("num_batches_tracked",)  # of the training


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


class _Uninitialized(TorchFunctionMode):  # type: ignore[misc]
    """A context in which modules do not draw initial values, a fifth of a load."""

    def __torch_function__(
        self, function: Any, _: Any, arguments: Any = (), named: Any = None, /
    ) -> Any:
        if getattr(function, "__module__", "") == torch.nn.init.__name__:
            return named["tensor"] if named else arguments[0]
        return function(*arguments, **(named or {}))


@dataclass(frozen=True, slots=True, eq=False)
class TorchComponents(ModelComponents):
    """Networks of PyTorch: ``make`` makes one from its parsed config and the fields of its file."""

    library: TorchLibrary

    def module(
        self,
        weights: ModelWeights,
        config: Any,
        make: Callable[..., Any],
        *,
        is_adapted: bool = True,
    ) -> Module:
        def empty() -> TorchNetwork:
            with torch.device("meta"), _Uninitialized():
                network: TorchNetwork = make(config, weights.config)
            return network

        component, unloaded = weights.component, empty()
        names = [name for name in weights if not unloaded.skip(name)]
        self.skipped.extend(f"{component}/{name}" for name in weights if unloaded.skip(name))
        wanted = _check(component, unloaded, weights, names)
        sizes = (math.prod(one.shape) for one in unloaded.module.state_dict().values())
        adaptation = TorchAdaptation(component, unloaded.sanitize, unloaded.skip)
        made = [unloaded]  # for the first load

        @computing
        def load() -> TorchNetwork:
            network = made.pop() if made else empty()
            self._fill(network, weights, wanted)
            return network

        used = adaptation if is_adapted else None
        size = sum(sizes) * self.library.itemsize
        return OffloadedModule(config, size, load, used, self.library.memory.clear)

    def _fill(
        self, network: TorchNetwork, weights: ModelWeights, wanted: Mapping[str, str]
    ) -> None:
        """Give a network its tensors, in the compute type, and make again what no file has."""
        library, module = self.library, network.module
        tensors = {}
        for name, own in wanted.items():
            tensors[own] = weights.torch(name).to(library.device, library.dtype)
            _check_type(weights.component, weights, name)
        module.load_state_dict(tensors, strict=False, assign=True)  # the names were checked
        module.requires_grad_(False).eval()
        for part in module.modules():
            if (rotary := getattr(part, "rotary_emb", None)) is not None:
                part.rotary_emb = type(rotary)(part.config).to(library.device)


def _check(
    component: str, network: TorchNetwork, weights: ModelWeights, names: list[str]
) -> dict[str, str]:
    """Return the names of parameters by those of all tensors.

    Raises ModelError: a tensor is missing, unexpected, or has another shape or type.
    """
    known = {
        name: tuple(value.shape)
        for name, value in network.module.state_dict().items()
        if not name.endswith(_COUNTERS)
    }
    wanted = match_tensors(component, network.sanitize, known, names)
    shapes = weights.shapes()
    for name, own in wanted.items():
        check_shape(component, name, shapes[name], known[own])
        _check_type(component, weights, name)
    return wanted


def _check_type(component: str, weights: ModelWeights, name: str) -> None:
    if not weights.is_float(name):
        raise ModelError(f"{component}/{name}: weights that are not floats are not supported")
