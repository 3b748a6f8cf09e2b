"""The blocks of a network in forward passes: as they are, compiled, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from clowder_aimage.model.library_choice import NEVER
from clowder_aimage.model.torch.compiler import CompiledForm, Run, call_block, mark_variable
from clowder_aimage.model.torch.graph import PassCache
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.operation import Branch, Branching, iter_branching

# Of the inputs that are compiled first: any other length or rank is a value of the same variables
LENGTH, RANK = 64, 16
# The axis of the length in arrays of (1, length, ...)
_LENGTH = 1


class BlockRunner:
    """The blocks of a network, with their compiled form and the recorded passes.

    The code with branches of adapters is another one: a variant. build_arguments: return arguments
    of a block, of any values.
    """

    def __init__(
        self,
        library: TorchLibrary,
        list_blocks: Callable[[], Iterator[torch.nn.Module]],
        build_arguments: Callable[[torch.nn.Module], Sequence[Any]],
    ) -> None:
        self._list_blocks, self._build_arguments = list_blocks, build_arguments
        self._library = library
        self.form = CompiledForm(library.compile_mode)
        self.passes = PassCache(*library.recorder)

    @property
    def is_compiled(self) -> bool:
        """Return True if blocks are compiled, now or later."""
        return self.form.mode != NEVER

    def use_layers(self) -> None:
        """Call blocks as they are: their tensors are on the device only while they run."""
        self.form = CompiledForm(NEVER)

    def close(self) -> None:
        """Drop what was recorded: the tensors of the blocks are about to be released."""
        self.form.close()
        self.passes.clear()

    @property
    def has_branches(self) -> bool:
        """Return True if adapters have branches in the blocks."""
        return any(layer.down is not None for layer in self.iter_branching())

    def iter_branching(self) -> Iterator[Branching]:
        """Yield the linear layers of the blocks."""
        for block in self._list_blocks():
            yield from iter_branching(block)

    def select(self) -> Run:
        """Return the function that calls blocks."""
        has_branches = self.has_branches
        return self.form.select(has_branches, partial(self._warm, has_branches))

    def run(
        self, compute: Callable[..., torch.Tensor], *inputs: Any, constant: int = 0
    ) -> torch.Tensor:
        """Return ``compute(run, *inputs)``, replayed if the blocks are compiled.

        inputs: tensors in tuples and dictionaries. ``run`` calls a block. constant: a number that
        ``compute`` depends on, beside the shapes of the inputs.
        """
        run, has_branches = self.select(), self.has_branches
        # Blocks may have become ready since they were selected
        if run is call_block or not self.form.is_ready(has_branches):
            return compute(run, *inputs)
        tensors, tree = pytree.tree_flatten(inputs)

        def compute_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return compute(run, *pytree.tree_unflatten(list(tensors), tree))

        key = has_branches, constant, tuple(tensor.shape for tensor in tensors), str(tree)
        return self.passes.run(key, compute_tensors, tensors)

    def _warm(self, has_branches: bool, run: Run) -> None:
        """Call all blocks with values of no meaning; their own branches are not used."""
        for block in self._list_blocks():
            copied = copy_module(block)
            for layer in iter_branching(copied):
                layer.set_branch(self._build_branch(layer) if has_branches else None)
            run(copied, *self._build_arguments(block))

    def _build_branch(self, layer: Branching) -> Branch:
        outputs = sum(layer.sizes)
        down, up = self.build_tensor(1, RANK, layer.inputs), self.build_tensor(1, outputs, RANK)
        mark_variable(down, 1)
        mark_variable(up, 2)
        return Branch(down, up, self.build_tensor(1, 1, outputs))

    def build_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros on the device, in the compute type or another one."""
        library = self._library
        return torch.zeros(shape, device=library.device, dtype=dtype or library.dtype)

    def build_length(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros (1, length, ...) whose length is a variable."""
        tensor = self.build_tensor(*shape, dtype=dtype)
        mark_variable(tensor, _LENGTH)
        return tensor


def copy_module(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a network; values, and objects that are not modules, stay those of ``module``."""
    copy = object.__new__(type(module))
    attributes: dict[str, Any] = {
        name: value.copy() if isinstance(value, (dict, set)) else value
        for name, value in vars(module).items()
    }
    for name, child in attributes["_modules"].items():
        attributes["_modules"][name] = None if child is None else copy_module(child)
    vars(copy).update(attributes)
    return copy
