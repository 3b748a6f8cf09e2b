"""Keys and values of earlier requests, for those that begin with the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.library import import_library_module

# Tokens for which a part of a cache is copied
_LEAST = 16
# One of mlx-lm's caches for each layer
Cache = list[Any]


@dataclass(slots=True)
class _Entry:
    owner: str
    tokens: list[int]
    cache: Cache
    size: int


class PromptCache:
    """The caches of the last requests, at most ``count`` and of ``limit`` bytes together."""

    def __init__(self, network: Any, limit: int, count: int = 8) -> None:
        self._network, self._limit, self._count = network, limit, count
        self._library = import_library_module("models.cache")
        # The last one is the newest
        self._entries: list[_Entry] = []

    @property
    def size(self) -> int:
        """Return the bytes of all caches."""
        return sum(entry.size for entry in self._entries)

    def take(self, prompt: Sequence[int], owner: str = "") -> tuple[Cache, int]:
        """Return a cache for a prompt, and the number of its first tokens that are in it.

        Only caches of the same ``owner`` count: the time until the first token would tell a client
        how the prompts of others begin. At least one token of the prompt remains. A conversation
        that goes on takes its cache; one that only begins alike gets a copy, if the kind of cache
        can be cut.
        """
        best, count = None, 0
        for entry in reversed(self._entries):
            if entry.owner != owner:
                continue
            common = _count_common(entry.tokens, prompt[:-1])
            if common > count and (
                common == len(entry.tokens) or self._is_divisible(entry, common)
            ):
                best, count = entry, common
        if best is None:
            return self._library.make_prompt_cache(self._network), 0
        if count == len(best.tokens):
            self._entries.remove(best)
            return best.cache, count
        cache = copy.deepcopy(best.cache)
        self._library.trim_prompt_cache(cache, len(best.tokens) - count)
        return cache, count

    def _is_divisible(self, entry: _Entry, count: int) -> bool:
        return count >= _LEAST and bool(self._library.can_trim_prompt_cache(entry.cache))

    def put(self, tokens: list[int], cache: Cache, owner: str = "") -> None:
        """Keep a cache of ``tokens`` for its ``owner``.

        It takes the place of the owner's caches of their beginning, and of older ones.
        """
        mx.eval([layer.state for layer in cache])
        size = cache_size(cache)
        self._entries = [
            entry
            for entry in self._entries
            if entry.owner != owner or entry.tokens != tokens[: len(entry.tokens)]
        ]
        if size <= self._limit and tokens:
            self._entries.append(_Entry(owner, tokens, cache, size))
        while len(self._entries) > self._count or self.size > self._limit:
            self._entries.pop(0)


def cache_size(cache: Cache) -> int:
    """Return the bytes of a cache."""
    return sum(int(layer.nbytes) for layer in cache)


def _count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal elements at the beginning."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
