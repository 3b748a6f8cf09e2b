"""Layers and functions of the networks: linear layers that join and branch, norms, rotations.

Parameters are made without values, on the meta device; a load gives them tensors. Shapes do not
depend on values, and nothing is complex, so that all of it can be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

# Cosines and sines: (1, length, 1, channels / 2)
Table = tuple[torch.Tensor, torch.Tensor]


_TENSORS = "weight", "bias"


def build_parameter(*shape: int) -> torch.nn.Parameter:
    """Return a parameter without values."""
    return torch.nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Changes of low rank beside a linear layer: up(down(x)) + shift.

    down: (1, rank, inputs); up: (1, outputs, rank); shift: (1, 1, outputs). The factors of the
    changes are a part of ``up``.
    """

    down: torch.Tensor
    up: torch.Tensor
    shift: torch.Tensor


class Branching(torch.nn.Module):  # type: ignore[misc]
    """A linear function, or several of one input, with an optional branch of adapters.

    ``inputs``: their number; ``sizes``: the outputs of each function.
    """

    inputs: int
    sizes: tuple[int, ...]
    down: Any
    up: Any
    shift: Any

    def __init__(self) -> None:
        super().__init__()
        # Not buffers: the sizes of those are constants of compiled code
        self.set_branch(None)

    def set_branch(self, branch: Branch | None) -> None:
        """Set the changes of adapters, or remove them."""
        self.down = None if branch is None else branch.down
        self.up = None if branch is None else branch.up
        self.shift = None if branch is None else branch.shift

    def compute_change(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the branch adds to the outputs of x: (pictures, length, inputs)."""
        inner = torch.matmul(x, self.down.transpose(1, 2))
        change: torch.Tensor = torch.matmul(inner, self.up.transpose(1, 2)) + self.shift
        return change


class Linear(Branching):
    """A linear layer, alone or in a group."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.sizes = inputs, (outputs,)
        self.weight = build_parameter(outputs, inputs)
        self.register_parameter("bias", build_parameter(outputs) if bias else None)
        # In a tuple: a group is not a part of its members
        self.groups: tuple[LinearGroup, ...] = ()

    @property
    def group(self) -> Branching:
        """Return the layer that computes this one."""
        return self.groups[0] if self.groups else self

    @property
    def joined_group(self) -> LinearGroup | None:
        """Return the group if its tensors are views of those of the group."""
        return next((group for group in self.groups if group.weight is not None), None)

    @property
    def offset(self) -> int:
        """Return the first of its outputs among those of the group."""
        members = self.groups[0].members if self.groups else (self,)
        index = next(index for index, member in enumerate(members) if member is self)
        return sum(member.sizes[0] for member in members[:index])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight, self.bias)
        return y if self.down is None else y + self.compute_change(x)


class LinearGroup(Branching):
    """Linear layers of the same input, computed by one product after ``join``.

    The members are parts of another module, by whose names their tensors are loaded.
    """

    def __init__(self, *members: Linear) -> None:
        super().__init__()
        self.inputs = members[0].inputs
        self.sizes = tuple(member.sizes[0] for member in members)
        # In a tuple: they are parts of the other module alone
        self.members = members
        for member in members:
            member.groups = (self,)
        self.register_buffer("weight", None, persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def join(self) -> None:
        """Copy the tensors of the members into one; theirs become views of it."""
        self.weight = self._join("weight")
        if self.members[0].bias is not None:
            self.bias = self._join("bias")

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the present tensors, of the group and its members."""
        layers: list[Branching] = [self, *self.members]
        kept = [(layer, name, getattr(layer, name)) for layer in layers for name in _TENSORS]

        def restore() -> None:
            for layer, name, value in kept:
                setattr(layer, name, value)

        return restore

    def _join(self, name: str) -> torch.Tensor:
        joined = torch.cat([getattr(member, name) for member in self.members])
        for member, part in zip(self.members, joined.split(self.sizes), strict=True):
            setattr(member, name, torch.nn.Parameter(part, requires_grad=False))
        return joined

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...]
        if self.weight is not None:
            outputs = functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        else:
            outputs = tuple(functional.linear(x, one.weight, one.bias) for one in self.members)
        if self.down is None:
            return outputs
        changes = self.compute_change(x).split(self.sizes, dim=-1)
        return tuple(y + change for y, change in zip(outputs, changes, strict=True))


def join_layers(module: torch.nn.Module) -> bool:
    """Join all groups of linear layers of a network; return True if it has any."""
    groups = [group for group in module.modules() if isinstance(group, LinearGroup)]
    for group in groups:
        group.join()
    return bool(groups)


def iter_branching(module: torch.nn.Module) -> Iterator[Branching]:
    """Yield the linear layers that compute: groups, and those that are in none."""
    for layer in module.modules():
        if isinstance(layer, LinearGroup) or (isinstance(layer, Linear) and layer.group is layer):
            yield layer


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """The last axis over its root mean square, times the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self.shape = build_parameter(width), eps, (width,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.shape, self.weight, self.eps)


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the last axis less its mean, over its standard deviation."""
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


def swiglu(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * x."""
    return functional.silu(gate) * x


def rotate_pairs(x: torch.Tensor, rope: Table) -> torch.Tensor:
    """Rotate channel 2i with 2i + 1, in float32. x: (pictures, length, heads, channels)."""
    cosines, sines = rope
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, rope: Table) -> torch.Tensor:
    """Rotate channel i with channel i + d/2. x: (texts, length, heads, d)."""
    cosines, sines = (table.to(x.dtype) for table in rope)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)


def to_table(arrays: Sequence[npt.NDArray[np.float32]], device: str | torch.device) -> Table:
    """Return cosines and sines (length, channels / 2) as a table."""
    cosines, sines = (torch.from_numpy(array).to(device)[None, :, None] for array in arrays)
    return cosines, sines


def stack_layers(count: int, build: Callable[[], Any]) -> torch.nn.ModuleList:
    """Return a list of equal layers."""
    return torch.nn.ModuleList(build() for _ in range(count))
