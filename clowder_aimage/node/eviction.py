"""Eviction of models from a node's store. Everything blocks except ``Evictor.prune``.

As in kubelet (Kubernetes, "Garbage Collection", image lifecycle): above the watermark ``high``,
the least recently used models are evicted until the usage falls to ``low``. Models that are
specified, pinned, or leased by a running process are never evicted.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from clowder_aimage.api import model_list
from clowder_aimage.api.service import Service
from clowder_aimage.content.file_system import measure_space
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import iter_blobs
from clowder_aimage.layout.fingerprint import compute_fingerprint
from clowder_aimage.layout.gc import Collection, Collector
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.lease import read_leases
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.node.metric import NodeMetrics
from clowder_aimage.node.pinner import SpecStore, is_own_pin, unpin
from clowder_aimage.oci import Reference

# Seconds between two measurements of the disk.
EVERY = 10.0
# Seconds between two searches for names to prune.
OFTEN = 1.0
# Seconds before an unreferenced blob is removed under disk pressure.
GRACE = 60.0
# Seconds before an interrupted download is removed under disk pressure.
STALE = 600.0
# Seconds since its last use before a model can be evicted, as in kubelet.
AGE = 120.0
_log = logging.getLogger("aimage.node")


class DiskReading(NamedTuple):
    """The usage of a file system in bytes."""

    total: int
    used: int
    free: int

    @property
    def used_fraction(self) -> float:
        """The fraction used for an unprivileged user, computed as in df."""
        return self.used / max(1, self.used + self.free)


def measure_disk(root: Path) -> DiskReading | None:
    """Measure the file system of a store, even before the store is created; None if unknown."""
    space = measure_space(root)
    return None if space is None else DiskReading(*space)


def measure_blobs(root: Path) -> int:
    """Return the bytes of blobs in a store."""
    return sum(status.st_size for _, status in iter_blobs(root))


def measure_partials(root: Path) -> int:
    """Return the bytes of interrupted downloads in a store."""
    partial = 0
    with contextlib.suppress(OSError), os.scandir(root / PRIVATE / "ingest") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                # An ingest is a sparse file: its ranges arrive in any order. Blocks have 512 bytes.
                partial += entry.stat(follow_symlinks=False).st_blocks * 512
    return partial


@dataclass(slots=True)
class Watermarks:
    """The watermarks of a store's disk, as fractions of its size.

    A model can be evicted ``age`` seconds after its last use. ``measure`` returns the usage.
    """

    high: float = 0.85
    low: float = 0.80
    age: float = AGE
    measure: Callable[[Path], DiskReading | None] = field(default=measure_disk)

    def compute_excess(self, root: Path) -> int:
        """Return the number of bytes to evict; 0 below the upper watermark."""
        disk = self.measure(root)
        if disk is None or disk.used_fraction <= self.high:
            return 0
        return max(0, disk.used - int(self.low * (disk.used + disk.free)))


def relieve(
    store: ImageLayout, excess: int, keep: Iterable[str], *, age: float = AGE, is_all: bool = False
) -> Collection:
    """Free ``excess`` bytes.

    Unreferenced blobs are removed first, then names that are not in ``keep`` and were not used for
    ``age`` seconds, least recently used first. A name is removed only if that frees bytes: not for
    blobs younger than GRACE, which the result counts as young. With ``is_all``, no name is removed
    unless ``excess`` bytes can be freed. Raises StoreError or VerificationError if nothing was
    collected.
    """
    # a list of models that is lost for a moment costs no transfer: its models keep the grace
    collector = partial(Collector, store, grace=GRACE, keeps_unnamed=True)
    plain = collector(stale=STALE).run()
    left = excess - plain.size - plain.partial_size
    if left <= 0:
        return plain
    limit = max(0, plain.left_size - left)
    latest = time.time() - age
    young = (name for name, manifest in store.list_tags() if store.use_time(manifest) > latest)
    patterns = [glob.escape(name) for name in (*keep, *(young if age else ()))]
    if is_all:
        would = collector(dry_run=True).run(max_size=limit, keep=patterns)
        if would.size < left:
            plain.young, plain.young_size = would.young, would.young_size
            plain.held_size = would.size
            return plain
    done = collector().run(max_size=limit, keep=patterns)
    done.size += plain.size
    done.blobs += plain.blobs
    done.partials += plain.partials
    done.partial_size += plain.partial_size
    return done


class Evictor:
    """Removes names and collects unreferenced blobs."""

    def __init__(self, service: Service, marks: Watermarks, metrics: NodeMetrics) -> None:
        self._service, self._store = service, service.store
        self.marks, self._metrics = marks, metrics
        self._measured_at, self._pruned_at = -EVERY, -EVERY
        # The desired state and the records at the last pruning.
        self._pruned_inputs: object = None
        self._is_full = False
        # The fingerprint of the store when its blobs were measured, and their bytes
        self._measured: Hashable = None
        self._blob_size = 0
        # Frees the space of ranges kept for peers.
        self.spare: Callable[[], object] = lambda: None

    def check_disk(self, keep: Callable[[], Iterable[str]]) -> None:
        """Measure the disk and evict above the upper watermark. Raises as ``relieve``."""
        if time.monotonic() - self._measured_at < EVERY:
            return
        self._measured_at = time.monotonic()
        self._measure()
        young = 0
        if excess := self.marks.compute_excess(self._store.root):
            young = self._relieve(excess, keep(), "high").young_size
            excess = self.marks.compute_excess(self._store.root)
        self._metrics.excess.set(excess)
        if excess and not self._is_full:
            facts = {"bytes": excess, "young": young}
            why = (
                f"some blobs are kept until they are {GRACE:.0f} seconds old"
                if young
                else "nothing can be evicted"
            )
            _log.warning(f"the disk is above the watermark, and {why}", extra=facts)
            self._service.events.record_from_thread("full", **facts)
        self._is_full = excess > 0

    def make_room(self, needed: int, keep: Callable[[], Iterable[str]]) -> str:
        """Evict until ``needed`` bytes are free, or evict no name; log a failure.

        Return what is worth waiting for, if the rest becomes free without a change; else nothing.
        """
        try:
            excess = max(0, needed - self._store.measure_free())
            done = self._relieve(excess, keep(), "space", is_all=True)
            missing = needed - self._store.measure_free()
        except AImageError as error:
            _log.warning("cannot free space", extra={"reason": error.message})
            return ""
        if not done.young or not 0 < missing <= done.young_size + done.held_size:
            return ""
        return (
            f"{done.young_size / 1e6:.1f} MB of blobs that no desired model needs are kept until "
            f"they are {GRACE:.0f} seconds old"
        )

    def collect(self, reason: str, grace: float) -> None:
        """Remove blobs unreferenced for ``grace`` seconds. Raises as ``relieve``."""
        self._note(Collector(self._store, grace=grace, keeps_unnamed=True).run(), reason)

    def _relieve(
        self, excess: int, keep: Iterable[str], reason: str, *, is_all: bool = False
    ) -> Collection:
        self.spare()
        done = relieve(self._store, excess, keep, age=self.marks.age, is_all=is_all)
        self._note(done, reason)
        return done

    def _note(self, done: Collection, reason: str) -> None:
        self._metrics.collections.labels(reason).inc()
        self._metrics.reclaimed.inc(done.size + done.partial_size)
        for removal in done.forgotten:
            self._service.events.record_from_thread(
                "evict", model=removal.name, reason=removal.reason
            )
        if done.blobs or done.partials:
            facts = {"blobs": done.blobs, "bytes": done.size + done.partial_size}
            self._service.events.record_from_thread("gc", reason=reason, **facts)

    def _measure(self) -> None:
        disk = self.marks.measure(self._store.root)
        # Hundreds of thousands of blobs take seconds, and thousands of names a tenth of one
        fingerprint = compute_fingerprint(self._store.roots)
        if fingerprint is None or fingerprint != self._measured:
            self._blob_size = measure_blobs(self._store.root)
            self._metrics.images.set(sum(1 for _ in self._store.list_tags()))
            self._measured = fingerprint
        self._metrics.free.set(math.nan if disk is None else disk.free)
        self._metrics.size.set(math.nan if disk is None else disk.total)
        self._metrics.bytes.labels("blob").set(self._blob_size)
        self._metrics.bytes.labels("partial").set(measure_partials(self._store.root))

    async def prune(self, specified: Set[str], records: SpecStore) -> list[str]:
        """Remove the names that were once listed in the files and are not any more; return them.

        Raises StoreError if the records cannot be read.
        """
        timestamp, inputs = time.monotonic(), (records.stamp(), specified)
        if timestamp - self._pruned_at < (EVERY if inputs == self._pruned_inputs else OFTEN):
            return []
        self._pruned_at, self._pruned_inputs = timestamp, inputs
        gone = await run_io(self._find_prunable, specified, records)
        for name, listed in gone.items():
            reference = Reference.parse(name)
            try:
                await run_locking(unpin, self._store, name, records.owner)
                await model_list.delete(self._service, reference)
            except NotFoundError:
                # Removed by another process.
                pass
            except AImageError as error:
                _log.warning("cannot remove a name", extra={"model": name, "reason": error.message})
                continue
            await run_locking(records.forget, listed)
            self._service.events.record("evict", model=name, reason="not desired")
        return list(gone)

    def _find_prunable(self, specified: Set[str], records: SpecStore) -> dict[str, str]:
        """Return the names to prune, each with its listed form.

        A name is pruned if only this node's files ever listed it and do not list it now, if it has
        no pin but the node's own, and if no running process leases its digest.
        """
        listed, listed_elsewhere = (
            map_index_names(records.read_own_names()),
            map_index_names(records.read_other_names()),
        )
        former = set(listed) - set(specified)
        if not former or records.is_damaged():
            return {}
        digests = {name: descriptor.digest for name, descriptor in self._store.list_tags()}
        for name in former - (set(digests) - set(listed_elsewhere)):
            # Already removed, or now listed by another node only.
            records.forget(listed[name])
        leased_digests = read_leases(self._store.root, remove=False) - {
            digests[name] for name in specified & set(digests)
        }
        pins = self._store.pins.iter_items()
        protected = set(listed_elsewhere) | {
            name for name, pin in pins if not is_own_pin(pin, records.owner)
        }
        gone = sorted(former & set(digests) - protected)
        return {name: listed[name] for name in gone if digests[name] not in leased_digests}


def map_index_names(names: Mapping[str, str]) -> dict[str, str]:
    """Map the names in the index to the listed names."""
    listed = {}
    for name, stored_as in names.items():
        with contextlib.suppress(AImageError):
            listed[index_name(Reference.parse(stored_as))] = name
    return listed
