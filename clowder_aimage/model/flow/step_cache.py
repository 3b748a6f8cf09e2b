"""First-block cache: steps that reuse the work of the last computed one.

The first block of a transformer runs at every step. If its residual, its output minus its input,
is near that of the last computed step, the other blocks are skipped, and their residual of that
step is added. This is the rule of ParaAttention's "first block cache" and of
``hooks/first_block_cache.py`` in diffusers: mean(|r - r'|) / mean(|r'|) is compared with a
threshold; r' is from the last computed step.
"""

from __future__ import annotations

from collections.abc import Callable

from clowder_aimage.model.backend import mx
from clowder_aimage.model.compute.array_block import Array, to_mlx

Layers = Callable[[Array], Array]


class StepCache:
    """The residuals of the last computed step, for one caption and one picture."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        # Of the first block, and of all others
        self._residuals: tuple[Array, Array] | None = None

    def run(self, x: Array, first_block: Layers, remaining_blocks: Layers) -> Array:
        """Return the result of all blocks, or an approximation from the first block alone."""
        # Another object: a layer may add to x in place
        before = x.astype(x.dtype)
        after = first_block(x)
        residual = after - before
        if self._residuals and _change(self._residuals[0], residual) < self._threshold:
            return after + self._residuals[1]
        result = remaining_blocks(after.astype(after.dtype))
        self._residuals = residual, result - after
        # A lazy array would keep its operands in memory
        mx.eval(self._residuals)
        return result


def _change(previous: Array, current: Array) -> float:
    """Return mean(|current - previous|) / mean(|previous|), not finite for zeros."""
    previous, current = (to_mlx(array).astype(mx.float32) for array in (previous, current))
    return float(mx.abs(current - previous).mean() / mx.abs(previous).mean())
