"""Adapters in a network of PyTorch: applied beside its weights, or in copies of them, and undone.

Changes of low rank are a branch beside a linear layer; all others (rarer) change a copy
of the tensor, by the definition in ``adapter/dense.py``. The tensors of the blobs stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Change, LowRank
from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.adapter.network_adaptation import NetworkAdaptation
from clowder_aimage.errors import ModelError
from clowder_aimage.model.torch.library import TorchLibrary, computing

Changes = Sequence[tuple[Change, float]]


class TorchAdaptation(NetworkAdaptation):
    """The adapters of a network of PyTorch.

    All changes of compiled layers are of tensors, because these do not notice branches.
    """

    def __init__(self, component: str, sanitize: Any, skip: Any, library: TorchLibrary) -> None:
        super().__init__(component, sanitize, skip)
        self._is_compiled = library.tuning.compile
        # Stored here: an offloaded layer is elsewhere while it is idle
        self._target = library.device, library.dtype

    @computing
    def _put(self, uses: Sequence[Use]) -> None:
        changes: dict[str, list[tuple[Change, float]]] = {}
        for adapter, strength in uses:
            for name in self.list_tensors(adapter):
                tensor_changes = adapter.get_changes(f"{self.component}/{name}")
                changes.setdefault(name, []).extend((change, strength) for change in tensor_changes)
        for name, layer_changes in changes.items():
            self._adapt(name, layer_changes)

    def _adapt(self, name: str, changes: Changes) -> None:
        path, _, parameter = self._sanitize(name).rpartition(".")
        layer = self._network.module.get_submodule(path)
        pairs = [(change, t) for change, t in changes if isinstance(change, LowRank)]
        is_linear = isinstance(layer, torch.nn.Linear) and parameter == "weight"
        if is_linear and len(pairs) == len(changes) and not self._is_compiled:
            branch = _Branch(pairs, *self._target)
            self._undoing.append(layer.register_forward_hook(branch.add).remove)
            return
        original = getattr(layer, parameter, None)
        if original is None and (parameter != "bias" or not isinstance(layer, torch.nn.Linear)):
            raise ModelError(f"{self.component}/{name[:200]} cannot be changed by an adapter")
        values = np.zeros(changes[0][0].shape, np.float32)
        like = layer.weight if original is None else original
        if original is not None:
            values = original.detach().to("cpu", torch.float32, copy=True).numpy()
        changed = torch.from_numpy(dense.apply_changes(values, changes))
        changed = changed.to(like.device, self._target[1])
        setattr(layer, parameter, torch.nn.Parameter(changed, requires_grad=False))
        self._undoing.append(lambda: setattr(layer, parameter, original))


class _Branch:
    """Changes of low rank of a linear layer, as one pair of matrices."""

    def __init__(
        self, changes: Sequence[tuple[LowRank, float]], device: str, dtype: torch.dtype
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        downs = np.concatenate([change.down for change, _ in changes])
        ups = np.concatenate([change.up for change, _ in changes], axis=1)
        scales = [np.full(len(change.down), t * change.scale, np.float32) for change, t in changes]
        self._down, self._up = (torch.from_numpy(change).to(**options) for change in (downs, ups))
        self._scales = torch.from_numpy(np.concatenate(scales)).to(**options)

    def add(self, _: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer with the changes; a forward hook."""
        inner = torch.nn.functional.linear(inputs[0], self._down) * self._scales
        return output + torch.nn.functional.linear(inner, self._up)
