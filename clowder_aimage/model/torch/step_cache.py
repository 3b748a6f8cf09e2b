"""Steps that reuse the work of the last computed one, by the rule of ``flow/step_cache.py``.

The loops over layers are diffusers'. While a cache is used, other modules take the places of the
layers: one for the first, and one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Layers = Callable[[torch.Tensor], torch.Tensor]


class TorchStepCache:
    """The residuals of the last computed step, for one caption and one picture."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        # Of the first block, and of all others
        self._residuals: tuple[torch.Tensor, torch.Tensor] | None = None
        # The first block's residual and result at this step
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_reused = False

    def begin(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Decide to skip the other blocks by the first block's input and result."""
        residual = after - before
        self._first = [(residual, after)]
        change = _change(self._residuals[0], residual) if self._residuals else self._threshold
        self.is_reused = change < self._threshold

    def end(self, x: torch.Tensor, remaining_layers: Layers) -> torch.Tensor:
        """Return the result of the remaining layers, or an approximation without them."""
        residual, after = self._first.pop()
        if self.is_reused and self._residuals is not None:
            return after + self._residuals[1]
        result = remaining_layers(x)
        self._residuals = residual, result - after
        return result


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """A function in place of a layer; the layer's parameters stay."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._run(*arguments, **keywords)


@contextmanager
def replace_layers(module: Any, **layers: tuple[Callable[..., Any], ...]) -> Iterator[None]:
    """Replace lists of layers of a network, by their names, inside the block."""
    before = {name: getattr(module, name) for name in layers}
    try:
        for name, functions in layers.items():
            setattr(module, name, torch.nn.ModuleList(map(_Layer, functions)))
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


def _change(previous: torch.Tensor, current: torch.Tensor) -> float:
    """Return mean(|current - previous|) / mean(|previous|), not finite for zeros."""
    previous = previous.float()
    return float((current.float() - previous).abs().mean() / previous.abs().mean())
