"""Adapters in a network: applied beside its weights, and undone, without loading it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Change
from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.adapter.network_adaptation import NetworkAdaptation
from clowder_aimage.errors import ModelError
from clowder_aimage.model.adapted_linear import AdaptedLinear, Effect, prepare
from clowder_aimage.model.backend import Linear, mx
from clowder_aimage.model.quantized import QuantizedLinear

_WEIGHT, _BIAS = ".weight", ".bias"


@dataclass(slots=True, eq=False)
class _Layer:
    parent: Any
    step: str | int
    layer: Any

    def put(self, layer: Any) -> None:
        self.parent[self.step] = layer


class Adaptation(NetworkAdaptation):
    """The adapters of a network of MLX, which computes in ``dtype``."""

    def __init__(
        self,
        component: str,
        sanitize: Callable[[str], str],
        skip: Callable[[str], bool],
        dtype: mx.Dtype,
    ) -> None:
        super().__init__(component, sanitize, skip)
        self.dtype = dtype

    def _put(self, uses: Sequence[Use]) -> None:
        layers: dict[str, list[tuple[str, Use]]] = {}
        for use in uses:
            for name in self.tensors(use[0]):
                stem, _, last = name.rpartition(".")
                is_layer = bool(stem) and f".{last}" in (_WEIGHT, _BIAS)
                layers.setdefault(stem if is_layer else name, []).append((name, use))
        for name, named in layers.items():
            self._adapt(name, named)

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
        self._undoing.append(partial(place.put, place.layer))

    def _change_array(self, place: _Layer, uses: Sequence[Use], tensor: str) -> None:
        """Change the values of a parameter: a norm's, a pad token, an embedding."""
        full = f"{self.component}/{tensor}"
        if not isinstance(place.layer, mx.array):
            raise ModelError(f"{uses[0][0].label}: {full[:200]} cannot be changed by an adapter")
        changes = [(change, t) for adapter, t in uses for change in adapter.changes(full)]
        if not mx.issubdtype(place.layer.dtype, mx.floating):
            raise ModelError(f"{uses[0][0].label}: {full[:200]} is quantized and cannot be changed")
        weight = np.array(place.layer.astype(mx.float32))
        place.put(mx.array(dense.apply_changes(weight, changes)).astype(place.layer.dtype))
        self._undoing.append(partial(place.put, place.layer))

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
    return mx.array(dense.apply_changes(base, changes) - base).astype(dtype)
