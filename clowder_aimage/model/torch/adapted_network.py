"""Adapters in a network of PyTorch: applied beside its weights, or in copies of them, and undone.

Changes of low rank are a branch beside a linear layer; all others, which are rarer, change a copy
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
        self._place = library.device, library.dtype  # a layer may have others while it is idle

    @computing
    def _put(self, uses: Sequence[Use]) -> None:
        changes: dict[str, list[tuple[Change, float]]] = {}
        for adapter, strength in uses:
            for name in self.tensors(adapter):
                found = adapter.changes(f"{self.component}/{name}")
                changes.setdefault(name, []).extend((change, strength) for change in found)
        for name, named in changes.items():
            self._adapt(name, named)

    def _adapt(self, name: str, changes: Changes) -> None:
        path, _, last = self._sanitize(name).rpartition(".")
        layer = self._network.module.get_submodule(path)
        pairs = [(one, t) for one, t in changes if isinstance(one, LowRank)]
        is_linear = isinstance(layer, torch.nn.Linear) and last == "weight"
        if is_linear and len(pairs) == len(changes) and not self._is_compiled:
            branch = _Branch(pairs, *self._place)
            self._undoing.append(layer.register_forward_hook(branch.add).remove)
            return
        own = getattr(layer, last, None)
        if own is None and (last != "bias" or not isinstance(layer, torch.nn.Linear)):
            raise ModelError(f"{self.component}/{name[:200]} cannot be changed by an adapter")
        values = np.zeros(changes[0][0].shape, np.float32)
        like = layer.weight if own is None else own
        if own is not None:
            values = own.detach().to("cpu", torch.float32, copy=True).numpy()
        changed = torch.from_numpy(dense.apply_changes(values, changes))
        changed = changed.to(like.device, self._place[1])
        setattr(layer, last, torch.nn.Parameter(changed, requires_grad=False))
        self._undoing.append(lambda: setattr(layer, last, own))


class _Branch:
    """Changes of low rank of a linear layer, as one pair of matrices."""

    def __init__(
        self, changes: Sequence[tuple[LowRank, float]], device: str, dtype: torch.dtype
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        downs = np.concatenate([one.down for one, _ in changes])
        ups = np.concatenate([one.up for one, _ in changes], axis=1)
        scales = [np.full(len(one.down), t * one.scale, np.float32) for one, t in changes]
        self._down, self._up = (torch.from_numpy(one).to(**place) for one in (downs, ups))
        self._scales = torch.from_numpy(np.concatenate(scales)).to(**place)

    def add(self, _: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer with the changes; a forward hook."""
        inner = torch.nn.functional.linear(given[0], self._down) * self._scales
        return output + torch.nn.functional.linear(inner, self._up)
