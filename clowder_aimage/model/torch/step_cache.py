"""Steps that reuse the work of the last computed one, by the rule of ``flow/step_cache.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

Layers = Callable[[torch.Tensor], torch.Tensor]


class TorchStepCache:
    """The residuals of the last computed step, for one caption and one picture."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        # Of the first block, and of all others
        self._residuals: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, x: torch.Tensor, first_block: Layers, remaining_blocks: Layers) -> torch.Tensor:
        """Return the result of all blocks, or an approximation from the first block alone."""
        after = first_block(x)
        residual = after - x
        if self._residuals and _change(self._residuals[0], residual) < self._threshold:
            return after + self._residuals[1]
        result = remaining_blocks(after)
        self._residuals = residual, result - after
        return result


def _change(previous: torch.Tensor, current: torch.Tensor) -> float:
    """Return mean(|current - previous|) / mean(|previous|), not finite for zeros."""
    previous = previous.float()
    return float((current.float() - previous).abs().mean() / previous.abs().mean())
