"""Networks of PyTorch as those of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch

from clowder_aimage.model.torch.blocks import BlockRunner
from clowder_aimage.model.torch.device_queue import do_nothing
from clowder_aimage.model.torch.operation import Branching, join_layers


class TorchNetwork:
    """A network that is called with arrays of the library; ``module`` has its parameters.

    ``blocks``: those that are compiled, if any are.
    """

    module: torch.nn.Module
    blocks: BlockRunner | None = None

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor: the same."""
        return name

    def skip(self, name: str) -> bool:  # noqa: ARG002 - of those that do not use all
        """Return True for tensors that are not used."""
        return False

    def finish(
        self, *, in_layers: bool, is_copied: bool, clear: Callable[[], None] = do_nothing
    ) -> None:
        """Prepare the network after its tensors were set, and compile it by the library's mode.

        in_layers: layers are on the device only while they run. is_copied: its tensors are copies
        of those of the blobs, so that they can be joined without more memory. clear: returns
        released memory to the device.
        """
        if in_layers:
            if self.blocks is not None:
                self.blocks.use_layers()
            return
        if is_copied and join_layers(self.module):
            # That of the parts has no use for larger arrays
            clear()
        self.compile()

    def close(self) -> None:
        """Release all tensors: a thread that compiles blocks has the network, and then fails."""
        if self.blocks is not None:
            self.blocks.close()
        for layer in self.module.modules():
            vars(layer)["_parameters"].clear()
            vars(layer)["_buffers"].clear()
            if isinstance(layer, Branching):
                layer.set_branch(None)

    def compile(self) -> None:
        """Begin to compile, or compile, by the mode of the library."""
        if self.blocks is not None:
            self.blocks.select()
