"""The blocks of a network in forward passes: as they are, compiled, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from clowder_aimage.model.library_choice import NEVER
from clowder_aimage.model.rounding import COMPILED, EAGER
from clowder_aimage.model.torch.compiler import CompiledForm, Run, call_block, mark_variable
from clowder_aimage.model.torch.graph import PassCache
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.operation import Branch, Branching, Table, iter_branching

# Of the inputs that are compiled first: any other length, rank or number is a value of the same
# variables
LENGTH, RANK, PICTURES = 64, 16, 3


class Variant(NamedTuple):
    """Properties of inputs for which code is compiled: each variant is other code.

    branches: rows of those of adapters: none, one for all pictures, or one for each. is_batch: of
    several pictures. has_mask: their captions have several lengths.
    """

    branches: int = 0
    is_batch: bool = False
    has_mask: bool = False


class ExampleInputs:
    """Tensors of no meaning, of the shapes that a variant has."""

    def __init__(self, library: TorchLibrary, variant: Variant) -> None:
        self._library, self.variant = library, variant
        self._pictures = PICTURES if variant.is_batch else 1

    def build(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros (pictures, length, ...) of which both are variables, but for one picture."""
        tensor = self.build_tensor(self._pictures, *shape, dtype=dtype)
        mark_variable(tensor, *((0, 1) if self.variant.is_batch else (1,)))
        return tensor

    def build_once(self, *shape: int) -> torch.Tensor:
        """Return zeros (pictures, ...) of which only the number of pictures is a variable."""
        tensor = self.build_tensor(self._pictures, *shape)
        if self.variant.is_batch:
            mark_variable(tensor, 0)
        return tensor

    def build_table(self, length: int, channels: int) -> Table:
        """Return a table of positions."""
        shape = length, 1, channels // 2
        return self.build(*shape, dtype=torch.float32), self.build(*shape, dtype=torch.float32)

    def build_masks(self) -> tuple[torch.Tensor, ...]:
        """Return the mask of keys, if the variant has one."""
        if not self.variant.has_mask:
            return ()
        mask = self.build_tensor(self._pictures, 1, 1, LENGTH, dtype=torch.bool)
        mark_variable(mask, 0, 3)
        return (mask,)

    def build_branch(self, layer: Branching) -> Branch | None:
        """Return a branch of a layer, if the variant has them."""
        if not self.variant.branches:
            return None
        rows, outputs = (PICTURES if self.variant.branches > 1 else 1), sum(layer.sizes)
        down = self.build_tensor(rows, RANK, layer.inputs)
        up = self.build_tensor(rows, outputs, RANK)
        shift = self.build_tensor(rows, 1, outputs)
        mark_variable(down, 1)
        mark_variable(up, 2)
        if rows > 1:
            for tensor in (down, up, shift):
                mark_variable(tensor, 0)
        return Branch(down, up, shift)

    def build_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros on the device, in the compute type or another one."""
        library = self._library
        return torch.zeros(shape, device=library.device, dtype=dtype or library.dtype)


class BlockRunner:
    """The blocks of a network, with their compiled form and the recorded passes.

    build_arguments: return arguments of a block, of any values.
    """

    def __init__(
        self,
        library: TorchLibrary,
        list_blocks: Callable[[], Iterator[torch.nn.Module]],
        build_arguments: Callable[[torch.nn.Module, ExampleInputs], Sequence[Any]],
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

    def find_variant(self, *, is_batch: bool = False, has_mask: bool = False) -> Variant:
        """Return the variant of inputs, with the branches that the blocks have now."""
        rows = (len(layer.down) for layer in self.iter_branching() if layer.down is not None)
        return Variant(min(2, next(rows, 0)), is_batch, has_mask)

    def iter_branching(self) -> Iterator[Branching]:
        """Yield the linear layers of the blocks."""
        for block in self._list_blocks():
            yield from iter_branching(block)

    def select(self, variant: Variant | None = None) -> Run:
        """Return the function that calls blocks, by default for one picture."""
        variant = variant or self.find_variant()
        run = self.form.select(variant, partial(self._warm, variant))
        self._library.forms.add(EAGER if run is call_block else COMPILED)
        return run

    @property
    def is_batch_ready(self) -> bool:
        """Return True unless code for batches is still compiled, while that for one picture is.

        It is begun to be compiled.
        """
        alone = self.find_variant()
        batch = alone._replace(is_batch=True)
        self.select(batch)
        return self.form.is_ready(batch) or not self.form.is_ready(alone)

    @property
    def is_settled(self) -> bool:
        """Return True if later passes, alone and in batches, have the form that they have now.

        Code for them is begun to be compiled, one after the other.
        """
        for variant in (Variant(), Variant(is_batch=True)):
            self.select(variant)
            if self.is_compiled and not self.form.is_ready(variant):
                return False
        return True

    def run(
        self,
        compute: Callable[..., torch.Tensor],
        *inputs: Any,
        constant: int = 0,
        is_batch: bool = False,
        has_mask: bool = False,
    ) -> torch.Tensor:
        """Return ``compute(run, *inputs)``, replayed if the blocks are compiled.

        inputs: tensors in tuples and dictionaries. ``run`` calls a block. constant: a number that
        ``compute`` depends on, beside the shapes of the inputs. is_batch, has_mask: as of
        ``Variant``.
        """
        variant = self.find_variant(is_batch=is_batch, has_mask=has_mask)
        run = self.select(variant)
        # Blocks may have become ready since they were selected
        if run is call_block or not self.form.is_ready(variant):
            return compute(run, *inputs)
        tensors, tree = pytree.tree_flatten(inputs)

        def compute_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return compute(run, *pytree.tree_unflatten(list(tensors), tree))

        key = variant, constant, tuple(tensor.shape for tensor in tensors), str(tree)
        return self.passes.run(key, compute_tensors, tensors)

    def _warm(self, variant: Variant, run: Run) -> None:
        """Call all blocks with values of no meaning; their own branches are not used."""
        example = ExampleInputs(self._library, variant)
        for block in self._list_blocks():
            copied = copy_module(block)
            for layer in iter_branching(copied):
                layer.set_branch(example.build_branch(layer))
            run(copied, *self._build_arguments(block, example))


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
