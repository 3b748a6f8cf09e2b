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
from clowder_aimage.model.torch.tuning import tune
from clowder_aimage.model.weights import ModelWeights

_COUNTERS = ("num_batches_tracked",)  # of the training
_FACTORIES = (torch.empty, torch.ones, torch.zeros)
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
    """A context in which modules are made without values: neither memory nor initial values.

    Their parameters are on the meta device. Tables that modules compute are computed.
    """

    def __torch_function__(
        self, function: Any, _: Any, arguments: Any = (), named: Any = None, /
    ) -> Any:
        named = named or {}
        if function in _FACTORIES:
            return torch.empty(*arguments, **named | {"device": "meta"})
        if getattr(function, "__module__", "") == torch.nn.init.__name__:
            return arguments[0] if arguments else named["tensor"]
        return function(*arguments, **named)


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
            with _Unfilled():
                network: TorchNetwork = make(config, weights.config)
            tune(network.module, self.library.tuning)
            return network

        component, unloaded = weights.component, empty()
        names = [name for name in weights if not unloaded.skip(name)]
        self.skipped.extend(f"{component}/{name}" for name in weights if unloaded.skip(name))
        wanted, count = _check(component, unloaded, weights, names)
        names_of = component, unloaded.sanitize, unloaded.skip
        adaptation = TorchAdaptation(*names_of, is_compiled=self.library.tuning.compile)
        made = [unloaded]  # for the first load

        @computing
        def load() -> TorchNetwork:
            network = made.pop() if made else empty()
            self._fill(network, weights, wanted)
            return network

        used = adaptation if is_adapted else None
        size = count * self.library.itemsize
        return OffloadedModule(config, size, load, used, self.library.memory.clear)

    def _fill(
        self, network: TorchNetwork, weights: ModelWeights, wanted: Mapping[str, str]
    ) -> None:
        """Give a network its tensors, in the compute type, and make again what no file has.

        The names were checked, so that ``load_state_dict`` could only take longer.
        """
        library, module = self.library, network.module
        parts = dict(module.named_modules())
        for name, own in wanted.items():
            read = weights.torch(name)
            if read.dtype not in _FLOATS:  # of a blob that was arriving when it was checked
                raise _type_error(weights.component, name)
            path, _, last = own.rpartition(".")
            value = read.to(library.device, library.dtype)
            if isinstance(getattr(parts[path], last), torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=False)
            setattr(parts[path], last, value)
        module.eval()
        if (rotary := getattr(module, "rotary_emb", None)) is not None:
            rotary.to(library.device)  # its tables, which are in no file


def _check(
    component: str, network: TorchNetwork, weights: ModelWeights, names: list[str]
) -> tuple[dict[str, str], int]:
    """Return the names of parameters by those of all tensors, and the number of their values.

    Raises ModelError: a tensor is missing, unexpected, or has another shape or type.
    """
    known = {
        name: tuple(value.shape)
        for name, value in network.module.state_dict().items()
        if not name.endswith(_COUNTERS)
    }
    wanted = match_tensors(component, network.sanitize, known, names)
    for name, own in wanted.items():
        shape, is_float = weights.stated(name)
        check_shape(component, name, shape, known[own])
        if not is_float:
            raise _type_error(component, name)
    return wanted, sum(map(math.prod, known.values()))


def _type_error(component: str, name: str) -> ModelError:
    return ModelError(f"{component}/{name}: weights that are not floats are not supported")
