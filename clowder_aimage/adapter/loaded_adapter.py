"""Adapters of requests in memory, and those that are kept for the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from clowder_aimage.adapter.adapter import Adapter, Change


class LoadedAdapter:
    """An adapter of one model: its changes, which become effects when they are used first.

    ``key`` identifies its content. Used on the thread of the model.
    """

    def __init__(self, key: str, adapter: Adapter) -> None:
        self.key, self.what = key, adapter.what
        self.tensors = frozenset(adapter.changes)
        self._changes = {name: list(changes) for name, changes in adapter.changes.items()}
        self._effects: dict[str, list[Any]] = {}

    @property
    def nbytes(self) -> int:
        """The memory of the changes and effects that are kept."""
        changes = {name: tuple(found) for name, found in self._changes.items()}
        effects = (effect for found in self._effects.values() for effect in found)
        return Adapter(self.what, changes).nbytes + sum(map(size_of, effects))

    def touches(self, prefixes: tuple[str, ...]) -> bool:
        """Return whether a changed tensor's ``component/name`` begins with one of ``prefixes``."""
        return any(name.startswith(prefixes) for name in self.tensors)

    def changes(self, name: str) -> list[Change]:
        """Return the changes of the tensor ``component/name`` that did not become effects."""
        return self._changes[name]

    def effects(self, name: str, prepare: Callable[[Change], Any]) -> list[Any]:
        """Return the effects on a linear layer; the changes are then no longer kept."""
        if name not in self._effects:
            self._effects[name] = [prepare(change) for change in self._changes[name]]
            del self._changes[name]
        return self._effects[name]


Use = tuple[LoadedAdapter, float]


class AdapterCache:
    """The most recently used adapters of a model, up to ``limit`` bytes of values."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, LoadedAdapter] = OrderedDict()

    def get(self, key: str, read: Callable[[], Adapter]) -> LoadedAdapter:
        """Return the adapter with ``key``, from ``read`` if it is not here."""
        found = self._kept.pop(key, None) or LoadedAdapter(key, read())
        self._kept[key] = found
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > self.limit:
            self._kept.popitem(last=False)
        return found


def size_of(effect: Any) -> int:
    """Return the bytes of the arrays of an effect."""
    if isinstance(effect, tuple):
        return sum(map(size_of, effect))
    if is_dataclass(effect):
        return sum(size_of(getattr(effect, field.name)) for field in fields(effect))
    return int(getattr(effect, "nbytes", 0))
