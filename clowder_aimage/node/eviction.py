"""What goes from a node's store, and when. All of it blocks but ``prune``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Collection as Names
from typing import Any

from clowder_aimage.api import model_list
from clowder_aimage.api.service import Service
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout.gc import Collection, Collector
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.lease import leased
from clowder_aimage.node.disk_usage import Watermarks, relieve, stored
from clowder_aimage.node.eviction_policy import EvictionFacts, unwanted
from clowder_aimage.node.node_metric import NodeMetrics
from clowder_aimage.node.pinner import PIN
from clowder_aimage.node.spec_store import SpecStore
from clowder_aimage.oci import Digest, Reference

EVERY = 10.0  # seconds between two looks at the disk
OFTEN = 1.0  # seconds between two looks for what nobody wants
_log = logging.getLogger("aimage.node")


class Evictor:
    """Lets names go, and collects what nothing needs."""

    def __init__(self, service: Service, marks: Watermarks, metrics: NodeMetrics) -> None:
        self._service, self._marks, self._metrics = service, marks, metrics
        self._store = service.store
        self._looked, self._pruned = -EVERY, -EVERY
        self._seen: object = None  # what was wanted, and what was known, when names last went
        self._is_full = False
        self.spare: Callable[[], object] = lambda: None  # lets go of what is kept for others

    # -- the disk

    def mind_the_disk(self, keep: Callable[[], Iterable[str]]) -> Collection | None:
        """Measure, and make room where the disk is fuller than it may be. Raises StoreError,
        VerificationError: nothing could be collected."""
        if time.monotonic() - self._looked < EVERY:
            return None
        self._looked = time.monotonic()
        self._measure()
        excess = self._marks.excess(self._store.root)
        done = self._relieve(excess, keep(), "high") if excess else None
        self._tell_of(self._marks.excess(self._store.root) if excess else 0)
        return done

    def _tell_of(self, excess: int) -> None:
        """How much is too much, though nothing more may go."""
        self._metrics.excess.set(excess)
        if excess and not self._is_full:
            _log.warning("the disk is too full, and nothing may go", extra={"bytes": excess})
            self._service.news.tell_from_thread("full", bytes=excess)
        self._is_full = excess > 0

    def make_room(self, needed: int, keep: Callable[[], Iterable[str]]) -> Collection | None:
        """Make room for ``needed`` bytes; no name goes where that would not be enough. A failure
        is logged."""
        try:
            excess = max(0, needed - self._store.free())
            return self._relieve(excess, keep(), "space", is_all=True)
        except AImageError as error:
            _log.warning("no room could be made", extra={"reason": error.message})
            return None

    def collect(self, reason: str, grace: float) -> Collection:
        """Remove what nothing has needed for ``grace`` seconds. Raises as ``mind_the_disk``."""
        done = Collector(self._store, grace=grace).run()
        self._note(done, reason)
        return done

    def _relieve(
        self, excess: int, keep: Iterable[str], reason: str, *, is_all: bool = False
    ) -> Collection:
        self.spare()
        done = relieve(self._store, excess, keep, age=self._marks.age, is_all=is_all)
        self._note(done, reason)
        return done

    def _note(self, done: Collection, reason: str) -> None:
        self._metrics.collections.labels(reason).inc()
        self._metrics.reclaimed.inc(done.size + done.partial_size)
        for one in done.forgotten:
            self._service.news.tell_from_thread("evict", model=one.name, reason=one.reason)
        if done.blobs or done.partials:
            facts = {"blobs": done.blobs, "bytes": done.size + done.partial_size}
            self._service.news.tell_from_thread("gc", reason=reason, **facts)

    def _measure(self) -> None:
        found, taken = self._marks.measure(self._store.root), stored(self._store.root)
        self._metrics.free.set(found.free)
        self._metrics.size.set(found.total)
        self._metrics.bytes.labels("blob").set(taken.blobs)
        self._metrics.bytes.labels("partial").set(taken.partial)
        self._metrics.images.set(sum(1 for _ in self._store.tags()))

    # -- names

    async def prune(self, wanted: Names[str], memory: SpecStore) -> list[str]:
        """Let the names go that this node was told to keep once, and that nobody wants now.
        Raises StoreError: it cannot be known which."""
        now, seen = time.monotonic(), (memory.stamp(), frozenset(wanted))
        if now - self._pruned < (EVERY if seen == self._seen else OFTEN):
            return []
        self._pruned, self._seen = now, seen
        gone = await asyncio.to_thread(self._unwanted, wanted, memory)
        for name, known in gone.items():
            reference = Reference.parse(name)
            try:
                await asyncio.to_thread(self._unpin, name, memory.owner)
                await model_list.forget(self._service, reference)
            except NotFoundError:
                pass  # another was faster
            except AImageError as error:
                _log.warning("a name stays", extra={"model": name, "reason": error.message})
                continue
            await asyncio.to_thread(memory.forget, known)
            await self._service.news.tell("evict", model=name, reason="not wanted")
        return list(gone)

    def _unpin(self, name: str, owner: str) -> None:
        """A pin of the node's own goes with the wish."""
        found = self._store.pins.get(index_name(Reference.parse(name)))
        if found is not None and _is_ours(found, owner):
            self._store.pins.remove(index_name(Reference.parse(name)))

    def _unwanted(self, wanted: Names[str], memory: SpecStore) -> dict[str, str]:
        """The names that go, and how they were wanted."""
        known, others = indexed(memory.ours()), indexed(memory.others())
        if not set(known) - set(wanted) or memory.is_damaged():
            return {}
        here: dict[str, Digest] = {}
        for name, descriptor in self._store.tags():
            here[name] = descriptor.digest
        pins = self._store.pins.items()
        still_named = {here[name] for name in wanted if name in here}
        facts = EvictionFacts(
            here=here,
            ever=set(known) - set(others),
            wanted=wanted,
            pinned={name for name, value in pins if not _is_ours(value, memory.owner)},
            held=leased(self._store.root, remove=False) - still_named,
        )
        for name in set(known) - (set(here) - set(others)) - set(wanted):
            memory.forget(known[name])  # it is gone already, or another node's alone from now on
        return {name: known[name] for name in unwanted(facts, may_prune=True)}


def _is_ours(pin: Mapping[str, Any], owner: str) -> bool:
    return pin.get("by") == PIN["by"] and pin.get("owner", owner) == owner


def indexed(names: Mapping[str, str]) -> dict[str, str]:
    """By what the index calls them, the names in ``names``, whose values are what the store calls
    them."""
    found = {}
    for name, stored_as in names.items():
        with contextlib.suppress(AImageError):
            found[index_name(Reference.parse(stored_as))] = name
    return found
