"""Adapters in a network: applied beside its weights, and undone, without loading it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Change
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use
from clowder_aimage.errors import ModelError
from clowder_aimage.model.adapted_linear import AdaptedLinear, Effect, prepare
from clowder_aimage.model.backend import Linear, mx
from clowder_aimage.model.quantized import QuantizedLinear

_WEIGHT, _BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    parent: Any
    step: str | int
    layer: Any

    def put(self, layer: Any) -> None:
        self.parent[self.step] = layer


class Adaptation:
    """The adapters of one network, whose tensors are called ``component/name``.

    ``sanitize`` returns the name of the parameter of a tensor, ``skip`` whether the network does
    not have it.
    """

    def __init__(
        self,
        component: str,
        sanitize: Callable[[str], str],
        skip: Callable[[str], bool],
        dtype: mx.Dtype,
    ) -> None:
        self.component, self.dtype = component, dtype
        self._sanitize, self._skip = sanitize, skip
        self._uses: tuple[Use, ...] = ()
        self._network: Any = None
        self._applied: tuple[Use, ...] = ()
        self._replaced: list[_Layer] = []

    def use(self, uses: Sequence[Use]) -> None:
        """Set the adapters of the network; ``apply`` puts them in."""
        self._uses = tuple(use for use in uses if use[1] and self.tensors(use[0]))

    def tensors(self, adapter: LoadedAdapter) -> list[str]:
        """Return the names of the tensors of the network that an adapter changes."""
        prefix = f"{self.component}/"
        names = (name.removeprefix(prefix) for name in adapter.tensors if name.startswith(prefix))
        return sorted(name for name in names if not self._skip(name))

    def release(self) -> None:
        """Forget the network."""
        self._network, self._applied, self._replaced = None, (), []

    def apply(self, network: Any) -> None:
        """Put the adapters into ``network``, in place of those that were there.

        Raises:
            ModelError: An adapter changes a tensor that the network does not have as values.
        """
        if network is not self._network:
            self.release()
            self._network = network
        if self._applied == self._uses:
            return
        self._undo()
        layers: dict[str, list[tuple[str, Use]]] = {}
        for use in self._uses:
            for name in self.tensors(use[0]):
                stem, _, last = name.rpartition(".")
                is_layer = bool(stem) and f".{last}" in (_WEIGHT, _BIAS)
                layers.setdefault(stem if is_layer else name, []).append((name, use))
        try:
            for name, uses in layers.items():
                self._adapt(name, uses)
        except BaseException:
            self._undo()  # the next request may have no adapters
            raise
        self._applied = self._uses

    def _undo(self) -> None:
        """Put back what was replaced."""
        for one in self._replaced:
            one.put(one.layer)
        self._replaced, self._applied = [], ()

    def _adapt(self, name: str, uses: list[tuple[str, Use]]) -> None:
        """Change the layer, or the parameter, called ``name``."""
        own = self._sanitize(f"{name}{_WEIGHT}").removesuffix(_WEIGHT)
        place = self._find(own)
        if not isinstance(place.layer, (Linear, QuantizedLinear)):
            if isinstance(place.layer, mx.array):
                self._change_array(place, [use for _, use in uses], name)
                return
            for tensor in sorted({tensor for tensor, _ in uses}):
                inside = _Layer(place.layer, tensor.rpartition(".")[2], None)
                named = [use for other, use in uses if other == tensor]
                values = inside.parent.get(inside.step)
                self._change_array(_Layer(inside.parent, inside.step, values), named, tensor)
            return
        effects: list[tuple[Effect, float]] = []
        biases: list[tuple[Change, float]] = []
        for tensor, (adapter, strength) in uses:
            full = f"{self.component}/{tensor}"
            if tensor.endswith(_BIAS):
                biases += [(change, strength) for change in adapter.changes(full)]
            else:
                make = partial(prepare, layer=place.layer, dtype=self.dtype)
                found = adapter.effects(full, make)
                effects += [(effect, strength) for effect in found]
        bias = _extra_bias(place.layer, biases, self.dtype) if biases else None
        place.put(AdaptedLinear(place.layer, effects, bias))
        self._replaced.append(place)

    def _change_array(self, place: _Layer, uses: Sequence[Use], tensor: str) -> None:
        """Change the values of a parameter: a norm's, a pad token, an embedding."""
        full = f"{self.component}/{tensor}"
        if not isinstance(place.layer, mx.array):
            raise ModelError(f"{uses[0][0].what}: {full[:200]} cannot be changed by an adapter")
        changes = [(change, t) for adapter, t in uses for change in adapter.changes(full)]
        if not mx.issubdtype(place.layer.dtype, mx.floating):
            raise ModelError(f"{uses[0][0].what}: {full[:200]} is quantized and cannot be changed")
        weight = np.array(place.layer.astype(mx.float32))
        place.put(mx.array(dense.changed(weight, changes)).astype(place.layer.dtype))
        self._replaced.append(place)

    def _find(self, own: str) -> _Layer:
        """Return the place of a layer or a parameter in the network."""
        parent, found, step = None, self._network, ""
        for step in own.split("."):
            parent = found
            found = found[int(step)] if isinstance(found, list) else found[step]
        return _Layer(parent, int(step) if isinstance(parent, list) else step, found)


def _extra_bias(layer: Any, changes: Sequence[tuple[Change, float]], dtype: mx.Dtype) -> mx.array:
    """Return what is added to the layer's bias, or to none."""
    bias = layer.get("bias")
    own = None if bias is None else np.array(bias.astype(mx.float32))
    shape = next(change.shape for change, _ in changes)
    base = np.zeros(shape, np.float32) if own is None else own
    return mx.array(dense.changed(base, changes) - base).astype(dtype)
