"""The state of a pipeline: all changes by requests, except loaded networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.pipeline import StoredControlNet

K = TypeVar("K")
T = TypeVar("T")
# A text, and the adapters that change its caption
CaptionKey = tuple[str, tuple[tuple[str, float], ...]]
# The most recently used
CACHED_TEXTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class UsedControl:
    """A control network in use, and its files."""

    stored: StoredControlNet
    module: Module


@dataclass(slots=True, eq=False)
class PipelineState:
    """The adapters and the control network in use, and the captions of recent texts."""

    adapters: tuple[Use, ...] = ()
    control: UsedControl | None = None
    captions: dict[CaptionKey, Caption] = field(default_factory=dict)

    def build_caption_key(self, text: str, captioning: tuple[str, ...]) -> CaptionKey:
        """Return the key of a text's caption.

        captioning: prefixes of the tensors that captions depend on. Adapters of other tensors are
        not a part of the key.
        """
        return text, tuple(
            (adapter.key, strength)
            for adapter, strength in self.adapters
            if strength and adapter.has_changes(captioning)
        )


def recall(cache: dict[K, T], key: K, make: Callable[[K], T]) -> T:
    """Return the value of a key from a cache of the most recently used, or a new one."""
    # A dict keeps the order of insertion: the first key is the least recently used
    value = cache.pop(key) if key in cache else make(key)
    while len(cache) >= CACHED_TEXTS:
        del cache[next(iter(cache))]
    cache[key] = value
    return value
