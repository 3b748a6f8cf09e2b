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
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # of this step: with its result
        self.is_reused = False

    def begin(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Decide by the first block's input and result whether the others are skipped."""
        residual = after - before
        self._first = [(residual, after)]
        change = _change(self._residuals[0], residual) if self._residuals else self._threshold
        self.is_reused = change < self._threshold

    def end(self, x: torch.Tensor, others: Layers) -> torch.Tensor:
        """Return ``others(x)``, or an approximation without a call of ``others``."""
        residual, after = self._first.pop()
        if self.is_reused and self._residuals is not None:
            return after + self._residuals[1]
        result = others(x)
        self._residuals = residual, result - after
        return result


class _Layer(torch.nn.Module):  # type: ignore[misc]
    """A function in the place of a layer, whose parameters stay where they are."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._run(*given, **named)


@contextmanager
def replaced(module: Any, **layers: tuple[Callable[..., Any], ...]) -> Iterator[None]:
    """Replace lists of layers of a network, by their names, inside the block."""
    before = {name: getattr(module, name) for name in layers}
    try:
        for name, functions in layers.items():
            setattr(module, name, torch.nn.ModuleList(map(_Layer, functions)))
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)


def _change(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return mean(|other - one|) / mean(|one|), which is NaN or infinite if ``one`` is 0."""
    one = one.float()
    return float((other.float() - one).abs().mean() / one.abs().mean())
