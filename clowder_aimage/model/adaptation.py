"""Adapters in a network, applied and undone without loading the weights again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Change
from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.adapter.network_adaptation import NetworkAdaptation, Rows
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
    """The adapters of a network of MLX with the compute type ``dtype``."""

    def __init__(
        self,
        component: str,
        sanitize: Callable[[str], str],
        skip: Callable[[str], bool],
        dtype: mx.Dtype,
    ) -> None:
        super().__init__(component, sanitize, skip)
        self.dtype = dtype

    def _put(self, rows: Rows) -> None:
        (uses,) = rows
        layers: dict[str, list[tuple[str, Use]]] = {}
        for use in uses:
            for name in self.list_tensors(use[0]):
                stem, _, suffix = name.rpartition(".")
                is_layer = bool(stem) and f".{suffix}" in (_WEIGHT, _BIAS)
                layers.setdefault(stem if is_layer else name, []).append((name, use))
        for name, layer_uses in layers.items():
            self._adapt(name, layer_uses)

    def _adapt(self, name: str, uses: list[tuple[str, Use]]) -> None:
        """Change the layer, or the parameter, called ``name``."""
        # Names of tensors are translated, not those of layers: a weight stands for its layer
        path = self._sanitize(f"{name}{_WEIGHT}").removesuffix(_WEIGHT)
        target = self._find(path)
        if not isinstance(target.layer, (Linear, QuantizedLinear)):
            if isinstance(target.layer, mx.array):
                self._change_array(target, [use for _, use in uses], name)
                return
            # A layer of another kind, such as a norm: each of its arrays is a parameter
            for tensor in sorted({tensor for tensor, _ in uses}):
                inside = _Layer(target.layer, tensor.rpartition(".")[2], None)
                tensor_uses = [use for used_tensor, use in uses if used_tensor == tensor]
                values = inside.parent.get(inside.step)
                self._change_array(_Layer(inside.parent, inside.step, values), tensor_uses, tensor)
            return
        effects: list[tuple[Effect, float]] = []
        biases: list[tuple[Change, float]] = []
        for tensor, (adapter, strength) in uses:
            full = f"{self.component}/{tensor}"
            if tensor.endswith(_BIAS):
                biases += [(change, strength) for change in adapter.get_changes(full)]
            else:
                make = partial(prepare, layer=target.layer, dtype=self.dtype)
                layer_effects = adapter.prepare_effects(full, make)
                effects += [(effect, strength) for effect in layer_effects]
        bias = _compute_bias_delta(target.layer, biases, self.dtype) if biases else None
        # Undone by the old layer, whose weights were not changed
        target.put(AdaptedLinear(target.layer, effects, bias))
        self._undoing.append(partial(target.put, target.layer))

    def _change_array(self, target: _Layer, uses: Sequence[Use], tensor: str) -> None:
        """Change the values of a parameter: a norm's, a pad token, an embedding."""
        full = f"{self.component}/{tensor}"
        if not isinstance(target.layer, mx.array):
            raise ModelError(f"{uses[0][0].label}: {full[:200]} cannot be changed by an adapter")
        changes = [(change, t) for adapter, t in uses for change in adapter.get_changes(full)]
        if not mx.issubdtype(target.layer.dtype, mx.floating):
            raise ModelError(f"{uses[0][0].label}: {full[:200]} is quantized and cannot be changed")
        # Computed in float32: sums of small changes would be lost in bfloat16
        weight = np.array(target.layer.astype(mx.float32))
        target.put(mx.array(dense.apply_changes(weight, changes)).astype(target.layer.dtype))
        self._undoing.append(partial(target.put, target.layer))

    def _find(self, path: str) -> _Layer:
        """Return a layer or a parameter, with its parent."""
        parent, current, step = None, self._network, ""
        for step in path.split("."):
            parent = current
            current = current[int(step)] if isinstance(current, list) else current[step]
        return _Layer(parent, int(step) if isinstance(parent, list) else step, current)


def _compute_bias_delta(
    layer: Any, changes: Sequence[tuple[Change, float]], dtype: mx.Dtype
) -> mx.array:
    """Return the bias delta; a layer without a bias counts as one of zeros."""
    bias = layer.get("bias")
    base_bias = None if bias is None else np.array(bias.astype(mx.float32))
    shape = next(change.shape for change, _ in changes)
    base = np.zeros(shape, np.float32) if base_bias is None else base_bias
    return mx.array(dense.apply_changes(base, changes) - base).astype(dtype)
