"""Networks whose layers are on the device one by one: group offload.

Between its calls a layer has the tensors of the blobs. These take no memory: they are mapped,
and the system may drop their pages. For a call they are copied, in the compute type. diffusers'
``enable_group_offload`` copies each group back instead, or holds all of them in pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def iter_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a network, by name: the members of its lists."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((f"{name}.{index}", layer) for index, layer in enumerate(child))


def compute_least_count(module: Any, counts: Mapping[str, int]) -> int:
    """Return the values on the device at most, by the ``counts`` of parameters: one layer's."""
    layers = dict.fromkeys((name for name, _ in iter_layers(module)), 0)
    resident = 0
    for name, count in counts.items():
        layer = ".".join(name.split(".", 2)[:2])
        if layer in layers:
            layers[layer] += count
        else:
            resident += count
    return resident + max(layers.values(), default=0)


class LayerOffload:
    """A layer whose parameters are on a device, in a type, while it runs."""

    def __init__(self, layer: Any, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._stored: list[tuple[Any, str, Any]] = []
        layer.register_forward_pre_hook(self._begin)
        # Stored tensors are restored after an error, too
        layer.register_forward_hook(self._end, always_call=True)

    def _begin(self, layer: Any, _: Any) -> None:
        for submodule in layer.modules():
            for name, stored in [*submodule.named_parameters(recurse=False)]:
                self._stored.append((submodule, name, stored))
                value = stored.to(self._device, self._dtype)
                setattr(submodule, name, torch.nn.Parameter(value, requires_grad=False))

    def _end(self, *_: Any) -> None:
        while self._stored:
            submodule, name, stored = self._stored.pop()
            setattr(submodule, name, stored)
