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
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use
from clowder_aimage.adapter.network_adaptation import NetworkAdaptation, Rows
from clowder_aimage.errors import ModelError
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.operation import Branch, Branching, Linear

Changes = Sequence[tuple[Change, float]]
# Ranks of branches in compiled blocks are multiples of it: kernels prefer such sizes
_MULTIPLE = 16
# Adapters of which it is remembered if they have branches only, and sets of them with branches
_RECENT, _KEPT = 100, 4


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
        self._library = library
        # Stored here: an offloaded layer is elsewhere while it is idle
        self._target: dict[str, Any] = {"device": library.device, "dtype": library.dtype}
        # The branches in use, and recent ones of batches; adapters of branches only, by their keys
        self._built: dict[tuple[Use, ...], dict[Branching, Branch]] = {}
        self._mixable: dict[str, bool] = {}

    def can_mix(self, uses: Sequence[Use]) -> bool:
        """Return True if all changes are branches. The network has to be loaded."""
        return all(self._is_of_branches(adapter) for adapter, strength in uses if strength)

    def _is_of_branches(self, adapter: LoadedAdapter) -> bool:
        if (known := self._mixable.get(adapter.key)) is None:
            known = all(
                self._find_branching(name, adapter.get_changes(f"{self.component}/{name}"))
                for name in self.list_tensors(adapter)
            )
            while len(self._mixable) >= _RECENT:
                del self._mixable[next(iter(self._mixable))]
            self._mixable[adapter.key] = known
        return known

    @computing
    def _put(self, rows: Rows) -> None:
        self._forget()
        blocks = self._network.blocks
        compiled = set(blocks.iter_branching()) if blocks and blocks.is_compiled else set()
        for uses in dict.fromkeys(rows):
            # The last ones are the most recently used
            self._built[uses] = self._built.pop(uses, {}) or self._build(uses, compiled)
        kept = _KEPT if self._library.batches.largest > 1 else 1
        while len(self._built) > max(len(rows), kept):
            del self._built[next(iter(self._built))]
        # All layers of compiled blocks have a branch: their code is the same
        layers = {layer for uses in rows for layer in self._built[uses]}
        layers |= compiled if layers else set()
        for layer in layers:
            branches = [self._built[uses].get(layer) for uses in rows]
            self._undoing.append(partial(layer.set_branch, None))
            layer.set_branch(self._stack(layer, branches, is_equal=layer in compiled))
        if len(rows) == 1 and not self.can_mix(rows[0]):
            # Their changes of weights are made again
            del self._built[rows[0]]

    def _build(self, uses: Sequence[Use], compiled: set[Branching]) -> dict[Branching, Branch]:
        """Return the branches of adapters; change the values of other tensors."""
        changes: dict[str, list[tuple[Change, float]]] = {}
        for adapter, strength in uses:
            for name in self.list_tensors(adapter):
                tensor_changes = adapter.get_changes(f"{self.component}/{name}")
                changes.setdefault(name, []).extend((change, strength) for change in tensor_changes)
        branches: dict[Branching, _BranchChanges] = {}
        for name, named_changes in changes.items():
            self._adapt(name, named_changes, branches)
        return {
            layer: self._build_branch(layer, layer_changes, is_equal=layer in compiled)
            for layer, layer_changes in branches.items()
        }

    def _stack(
        self, layer: Branching, branches: Sequence[Branch | None], *, is_equal: bool
    ) -> Branch:
        """Return the branches of pictures as one, with zeros up to the largest rank."""
        known = [branch for branch in branches if branch is not None]
        if len(branches) == len(known) == 1:
            return known[0]
        if len(known) < len(branches):
            known.append(self._build_branch(layer, _BranchChanges(), is_equal=is_equal))
        each = [branch or known[-1] for branch in branches]
        rank = max(branch.down.shape[1] for branch in each)
        down = [_pad(branch.down, 1, rank) for branch in each]
        up = [_pad(branch.up, 2, rank) for branch in each]
        return Branch(torch.cat(down), torch.cat(up), torch.cat([one.shift for one in each]))

    def release(self) -> None:
        self._built, self._mixable = {}, {}
        super().release()

    def _undo(self) -> None:
        if self._undoing:
            self._forget()
        super()._undo()

    def _forget(self) -> None:
        """Drop recorded passes, which read the tensors of this moment."""
        if self._network.blocks is not None:
            self._network.blocks.passes.clear()

    def _find_branching(self, name: str, changes: Sequence[Change]) -> Linear | None:
        """Return the linear layer whose branch has the changes of a tensor; None without any."""
        path, _, parameter = self._sanitize(name).rpartition(".")
        layer = self._network.module.get_submodule(path)
        if not isinstance(layer, Linear):
            return None
        if parameter == "weight":
            return layer if all(isinstance(change, LowRank) for change in changes) else None
        return layer if parameter == "bias" and layer.bias is None else None

    def _adapt(
        self, name: str, changes: Changes, branches: dict[Branching, _BranchChanges]
    ) -> None:
        path, _, parameter = self._sanitize(name).rpartition(".")
        if (linear := self._find_branching(name, [change for change, _ in changes])) is not None:
            branch = branches.setdefault(linear.group, _BranchChanges())
            if parameter == "weight":
                branch.pairs.extend(
                    (linear.offset, change, t)
                    for change, t in changes
                    if isinstance(change, LowRank)
                )
            else:
                zeros = np.zeros(changes[0][0].shape, np.float32)
                branch.shifts.append((linear.offset, dense.apply_changes(zeros, changes)))
            return
        layer = self._network.module.get_submodule(path)
        original = getattr(layer, parameter, None)
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


def _pad(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return a tensor with zeros at the end of an axis."""
    if (missing := size - tensor.shape[axis]) == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=axis)
