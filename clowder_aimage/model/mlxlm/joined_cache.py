"""The caches of several texts, which a network takes for one: each text keeps its own.

Nothing is copied when a text begins or ends. Layers beside the attention compute all texts at once,
so that their weights are read once; the attention is computed for each text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.prompt_cache import Cache

# Caches of mlx-lm that have no state but keys, values and their number
_KINDS = ("KVCache", "RotatingKVCache")


class JoinedLayer:
    """The caches of a layer. ``offset``: the positions of the tokens of a step, (texts,)."""

    def __init__(self, layers: Sequence[Any], offset: mx.array) -> None:
        self.layers, self.offset = layers, offset

    def make_mask(self, *args: Any, **options: Any) -> list[Any] | None:
        """Return the masks of a step by text; None if there are none."""
        masks = [layer.make_mask(*args, **options) for layer in self.layers]
        return None if all(mask is None for mask in masks) else masks

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Add the keys and values of a token of each text; return all of them by text."""
        pairs = [
            layer.update_and_fetch(keys[row : row + 1], values[row : row + 1])
            for row, layer in enumerate(self.layers)
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def attend_by_text(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    cache: JoinedLayer,
    *,
    mask: Any = None,
    **options: Any,
) -> mx.array:
    """Return the attention of each text to its own keys and values. queries: (texts, ...)."""
    masks = mask if isinstance(mask, list) else [mask] * len(keys)
    rows = [
        attention(queries[row : row + 1], keys[row], values[row], layer, mask=masks[row], **options)
        for row, layer in enumerate(cache.layers)
    ]
    return mx.concatenate(rows)


def join(caches: Sequence[Cache]) -> list[JoinedLayer]:
    """Return the caches of a network for a step of several texts."""
    offset = mx.array([cache[0].offset for cache in caches])
    return [JoinedLayer(layers, offset) for layers in zip(*caches, strict=True)]


def is_plain(cache: Cache) -> bool:
    """Return True if ``join`` takes a cache: all layers have the same tokens."""
    return bool(cache) and all(
        type(layer).__name__ in _KINDS and layer.offset == cache[0].offset for layer in cache
    )
