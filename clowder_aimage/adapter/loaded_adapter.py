"""Adapters of requests in memory, and a cache of them for later requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from clowder_aimage.adapter.adapter import Adapter, Change


class LoadedAdapter:
    """An adapter of a model: its changes, which are converted to effects on first use.

    ``key`` identifies its content. Used on the thread of the model.
    """

    def __init__(self, key: str, adapter: Adapter) -> None:
        self.key, self.label, self.warning = key, adapter.label, adapter.warning
        self.tensors = frozenset(adapter.changes)
        self._changes = {name: list(changes) for name, changes in adapter.changes.items()}
        self._effects: dict[str, list[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Return the size of the changes and effects in bytes."""
        changes = {name: tuple(values) for name, values in self._changes.items()}
        effects = (effect for values in self._effects.values() for effect in values)
        return Adapter(self.label, changes).nbytes + sum(map(count_bytes, effects))

    def has_changes(self, prefixes: tuple[str, ...]) -> bool:
        """Return True if a changed tensor's ``component/name`` begins with one of ``prefixes``."""
        return any(name.startswith(prefixes) for name in self.tensors)

    def get_changes(self, name: str) -> list[Change]:
        """Return the changes of the tensor ``component/name`` that are not effects yet."""
        return self._changes[name]

    def prepare_effects(self, name: str, prepare: Callable[[Change], Any]) -> list[Any]:
        """Return the effects on a linear layer; their changes are released."""
        if name not in self._effects:
            self._effects[name] = [prepare(change) for change in self._changes[name]]
            # Effects are copies of the arrays: both would take twice the memory.
            del self._changes[name]
        return self._effects[name]


Use = tuple[LoadedAdapter, float]


class AdapterCache:
    """The most recently used adapters of a model, up to ``limit`` bytes of values."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[str, LoadedAdapter] = OrderedDict()

    def get(self, key: str, read: Callable[[], Adapter]) -> LoadedAdapter:
        """Return the adapter with ``key`` from the cache, else from ``read``."""
        adapter = self._entries.pop(key, None) or LoadedAdapter(key, read())
        # The last entry is the most recently used.
        self._entries[key] = adapter
        # The adapter of this request stays, even if it exceeds the limit.
        while (
            len(self._entries) > 1
            and sum(cached.nbytes for cached in self._entries.values()) > self.limit
        ):
            self._entries.popitem(last=False)
        return adapter


def count_bytes(effect: Any) -> int:
    """Return the bytes of the arrays of an effect."""
    if isinstance(effect, tuple):
        return sum(map(count_bytes, effect))
    if is_dataclass(effect):
        return sum(count_bytes(getattr(effect, field.name)) for field in fields(effect))
    return int(getattr(effect, "nbytes", 0))
