"""Adapters in a network of PyTorch: applied beside its weights, or in place of them, and undone.

Changes of low rank are a branch beside a linear layer; all others (rarer) change the values of a
tensor, by the definition in ``adapter/dense.py``. The blobs stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import Change, LowRank
from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.adapter.network_adaptation import NetworkAdaptation
from clowder_aimage.errors import ModelError
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.operation import Branch, Branching, Linear

Changes = Sequence[tuple[Change, float]]
# Ranks of branches in compiled blocks are multiples of it: kernels prefer such sizes
_MULTIPLE = 16


@dataclass(slots=True)
class _BranchChanges:
    """The changes of a layer's branch: pairs of matrices, and values that are added.

    Each has the first of the outputs that it changes.
    """

    pairs: list[tuple[int, LowRank, float]] = field(default_factory=list)
    shifts: list[tuple[int, Any]] = field(default_factory=list)


class TorchAdaptation(NetworkAdaptation):
    """The adapters of a network of PyTorch."""

    def __init__(self, component: str, sanitize: Any, skip: Any, library: TorchLibrary) -> None:
        super().__init__(component, sanitize, skip)
        # Stored here: an offloaded layer is elsewhere while it is idle
        self._target: dict[str, Any] = {"device": library.device, "dtype": library.dtype}

    @computing
    def _put(self, uses: Sequence[Use]) -> None:
        changes: dict[str, list[tuple[Change, float]]] = {}
        for adapter, strength in uses:
            for name in self.list_tensors(adapter):
                tensor_changes = adapter.get_changes(f"{self.component}/{name}")
                changes.setdefault(name, []).extend((change, strength) for change in tensor_changes)
        branches: dict[Branching, _BranchChanges] = {}
        self._forget()
        for name, named_changes in changes.items():
            self._adapt(name, named_changes, branches)
        blocks = self._network.blocks
        compiled = set(blocks.iter_branching()) if blocks and blocks.is_compiled else set()
        if branches:
            # All layers of compiled blocks have a branch: their code is the same
            for layer in compiled - branches.keys():
                branches[layer] = _BranchChanges()
        for layer, layer_changes in branches.items():
            self._undoing.append(partial(layer.set_branch, None))
            layer.set_branch(self._build_branch(layer, layer_changes, is_equal=layer in compiled))

    def _undo(self) -> None:
        if self._undoing:
            self._forget()
        super()._undo()

    def _forget(self) -> None:
        """Drop recorded passes, which read the tensors of this moment."""
        if self._network.blocks is not None:
            self._network.blocks.passes.clear()

    def _adapt(
        self, name: str, changes: Changes, branches: dict[Branching, _BranchChanges]
    ) -> None:
        path, _, parameter = self._sanitize(name).rpartition(".")
        layer = self._network.module.get_submodule(path)
        original = getattr(layer, parameter, None)
        if isinstance(layer, Linear):
            pairs = [(change, t) for change, t in changes if isinstance(change, LowRank)]
            if parameter == "weight" and len(pairs) == len(changes):
                branch = branches.setdefault(layer.group, _BranchChanges())
                branch.pairs.extend((layer.offset, change, t) for change, t in pairs)
                return
            if parameter == "bias" and original is None:
                zeros = np.zeros(changes[0][0].shape, np.float32)
                branch = branches.setdefault(layer.group, _BranchChanges())
                branch.shifts.append((layer.offset, dense.apply_changes(zeros, changes)))
                return
        if original is None:
            raise ModelError(f"{self.component}/{name[:200]} cannot be changed by an adapter")
        values = original.detach().to("cpu", torch.float32, copy=True).numpy()
        changed = torch.from_numpy(dense.apply_changes(values, changes))
        changed = changed.to(original.device, self._target["dtype"])
        group = layer.joined_group if isinstance(layer, Linear) else None
        if group is not None:
            self._undoing.append(group.keep())
        else:
            self._undoing.append(partial(setattr, layer, parameter, original))
        setattr(layer, parameter, torch.nn.Parameter(changed, requires_grad=False))
        if group is not None:
            # Its product reads the tensor of the group
            group.join()

    def _build_branch(self, layer: Branching, changes: _BranchChanges, *, is_equal: bool) -> Branch:
        """Return the branch of a layer; ``is_equal``: its rank fits compiled code."""
        rank = sum(len(change.down) for _, change, _ in changes.pairs)
        if is_equal:
            rank = max(1, -(-rank // _MULTIPLE)) * _MULTIPLE
        down = np.zeros((1, rank, layer.inputs), np.float32)
        up = np.zeros((1, sum(layer.sizes), rank), np.float32)
        shift = np.zeros((1, 1, sum(layer.sizes)), np.float32)
        start = 0
        for offset, change, strength in changes.pairs:
            end, scale = start + len(change.down), np.float32(strength * change.scale)
            down[0, start:end] = change.down
            up[0, offset : offset + len(change.up), start:end] = change.up * scale
            start = end
        for offset, values in changes.shifts:
            shift[0, 0, offset : offset + len(values)] += values
        return Branch(*(torch.from_numpy(one).to(**self._target) for one in (down, up, shift)))
