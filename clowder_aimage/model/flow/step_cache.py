"""First-block cache: steps that reuse the work of the last computed one.

The first block of a transformer runs at every step. If its residual, the change that it makes to
its input, is near that of the last computed step, the other blocks are skipped, and the change
that they made then is added. This is the rule of ParaAttention's "first block cache" and of
``hooks/first_block_cache.py`` in diffusers: mean(|r - r'|) / mean(|r'|) is compared with a
threshold, where r' is from the last computed step.
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

    def run(self, x: Array, first: Layers, others: Layers) -> Array:
        """Return ``others(first(x))``, or an approximation without a call of ``others``."""
        before = x.astype(x.dtype)  # another object: a layer may add to x in place
        after = first(x)
        residual = after - before
        if self._residuals and _change(self._residuals[0], residual) < self._threshold:
            return after + self._residuals[1]
        result = others(after.astype(after.dtype))
        self._residuals = residual, result - after
        mx.eval(self._residuals)  # a lazy array keeps what it is computed from in memory
        return result


def _change(one: Array, other: Array) -> float:
    """Return mean(|other - one|) / mean(|one|), which is NaN or infinite if ``one`` is 0."""
    one, other = (to_mlx(each).astype(mx.float32) for each in (one, other))
    return float(mx.abs(other - one).mean() / mx.abs(one).mean())
