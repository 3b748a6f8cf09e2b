"""The blocks of a network in forward passes: as they are, compiled, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from clowder_aimage.model.library_choice import NEVER
from clowder_aimage.model.torch.compiler import CompiledForm, Run, mark_variable
from clowder_aimage.model.torch.graph import PassCache
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.operation import Branch, Branching, iter_branching

# Lengths of the inputs that are compiled first: any other is a value of the same variables
LENGTH, RANK = 64, 16
# Where the length is, in arrays of (pictures, length, ...)
_PICTURES, _LENGTH = 0, 1


class Variant(NamedTuple):
    """Inputs of blocks that share their compiled code.

    branches: 0 without adapters, 1 with the same for all pictures, 2 with those of each.
    """

    is_batch: bool = False
    branches: int = 0
    has_mask: bool = False

    @property
    def pictures(self) -> int:
        """Return the number of pictures to compile for; in a batch it is a variable."""
        return 2 if self.is_batch else 1


# The arguments of a block for a variant
BuildArguments = Callable[[torch.nn.Module, Variant], Sequence[Any]]


class BlockRunner:
    """The blocks of a network, with their compiled form and the recorded passes.

    build_arguments: return arguments of a block for a variant, of any values.
    """

    def __init__(
        self,
        library: TorchLibrary,
        list_blocks: Callable[[], Iterator[torch.nn.Module]],
        build_arguments: BuildArguments,
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

    def find_variant(self, pictures: int, *, has_mask: bool = False) -> Variant:
        """Return the variant of the inputs with the branches that the blocks have now."""
        downs = [layer.down for layer in self.iter_branching() if layer.down is not None]
        branches = 0 if not downs else 1 + (max(len(down) for down in downs) > 1)
        return Variant(pictures > 1, branches, has_mask)

    def iter_branching(self) -> Iterator[Branching]:
        """Yield the linear layers of the blocks."""
        for block in self._list_blocks():
            yield from iter_branching(block)

    def select(self, variant: Variant) -> Run:
        """Return the function that calls blocks."""
        return self.form.select(variant, partial(self._warm, variant))

    def run(
        self, variant: Variant, compute: Callable[..., torch.Tensor], *inputs: Any
    ) -> torch.Tensor:
        """Return ``compute(run, *inputs)``, replayed if the variant is compiled.

        inputs: tensors or None, in tuples and dictionaries. ``run`` calls a block.
        """
        run = self.select(variant)
        if not self.form.is_ready(variant):
            return compute(run, *inputs)
        leaves, tree = pytree.tree_flatten(inputs)
        shapes = tuple(None if leaf is None else leaf.shape for leaf in leaves)

        def compute_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            values = iter(tensors)
            filled = [None if shape is None else next(values) for shape in shapes]
            return compute(run, *pytree.tree_unflatten(filled, tree))

        tensors = [leaf for leaf in leaves if leaf is not None]
        return self.passes.run((variant, shapes, str(tree)), compute_tensors, tensors)

    def _warm(self, variant: Variant, run: Run) -> None:
        """Call all blocks with values of no meaning; their own branches are not used."""
        for block in self._list_blocks():
            copied = copy_module(block)
            for layer in iter_branching(copied):
                layer.set_branch(self._build_branch(layer, variant))
            run(copied, *self._build_arguments(block, variant))

    def _build_branch(self, layer: Branching, variant: Variant) -> Branch | None:
        if not variant.branches:
            return None
        pictures = variant.pictures if variant.branches > 1 else 1
        outputs, inputs = sum(layer.sizes), layer.inputs
        down = self.build_tensor(pictures, RANK, inputs)
        up = self.build_tensor(pictures, outputs, RANK)
        mark_variable(down, 1)
        mark_variable(up, 2)
        return Branch(down, up, self.build_tensor(pictures, 1, outputs))

    def build_tensor(
        self, *shape: int, dtype: torch.dtype | None = None, dynamic: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Return zeros whose ``dynamic`` axes are variables, and the first one in a batch."""
        tensor = torch.zeros(shape, device=self._library.device, dtype=dtype or self._library.dtype)
        axes = [*dynamic, *([_PICTURES] if shape[_PICTURES] > 1 else [])]
        mark_variable(tensor, *axes)
        return tensor

    def build_length(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros (pictures, length, ...) whose length is a variable."""
        return self.build_tensor(*shape, dtype=dtype, dynamic=(_LENGTH,))


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
