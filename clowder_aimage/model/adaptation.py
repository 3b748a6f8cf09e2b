"""Adapters in a network: applied beside its weights, and undone, without loading it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Adapter, Change
from clowder_aimage.errors import ModelError
from clowder_aimage.model.adapted_linear import AdaptedLinear, Effect, prepare, size_of
from clowder_aimage.model.backend import Linear, mx
from clowder_aimage.model.quantized import QuantizedLinear

_WEIGHT, _BIAS = ".weight", ".bias"


class LoadedAdapter:
    """An adapter of one model: its changes, which become effects when they are used first.

    ``key`` identifies its content. Used on the thread of the model.
    """

    def __init__(self, key: str, adapter: Adapter) -> None:
        self.key, self.what = key, adapter.what
        self.tensors = frozenset(adapter.changes)
        self._changes = {name: list(changes) for name, changes in adapter.changes.items()}
        self._effects: dict[str, list[Effect]] = {}

    @property
    def nbytes(self) -> int:
        """The memory of the changes and effects that are kept."""
        changes = {name: tuple(found) for name, found in self._changes.items()}
        effects = (effect for found in self._effects.values() for effect in found)
        return Adapter(self.what, changes).nbytes + sum(map(size_of, effects))

    def touches(self, prefixes: tuple[str, ...]) -> bool:
        """Return whether a changed tensor's ``component/name`` begins with one of ``prefixes``."""
        return any(name.startswith(prefixes) for name in self.tensors)

    def changes(self, name: str) -> list[Change]:
        """Return the changes of the tensor ``component/name`` that is not a linear layer's."""
        return self._changes[name]

    def effects(self, name: str, layer: Any, dtype: mx.Dtype) -> list[Effect]:
        """Return the effects on a linear layer; the changes are then no longer kept."""
        if name not in self._effects:
            found = [prepare(change, layer, dtype) for change in self._changes[name]]
            self._effects[name] = found
            del self._changes[name]
        return self._effects[name]


Use = tuple[LoadedAdapter, float]


class AdapterCache:
    """The most recently used adapters of a model, up to ``limit`` bytes of values."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, LoadedAdapter] = OrderedDict()

    def get(self, key: str, read: Callable[[], Adapter]) -> LoadedAdapter:
        """Return the adapter with ``key``, from ``read`` if it is not here."""
        found = self._kept.pop(key, None) or LoadedAdapter(key, read())
        self._kept[key] = found
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        return found


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
                found = adapter.effects(full, place.layer, self.dtype)
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
