"""Completeness of an AImage in a store: its size and its missing blobs."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clowder_aimage.content.graph import walk
from clowder_aimage.content.store import ContentStore, Lease
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype, parse_document

if TYPE_CHECKING:
    from clowder_aimage.layout.stored_aimage import StoredAImage

# Seconds that a result is cached. The fingerprint does not reveal a damaged blob.
MAX_AGE = 300.0
# The same for blobs that other AImages have too
_SNAPSHOT_AGE = 30.0


@dataclass(frozen=True, slots=True)
class Completeness:
    """The content below ``root``: ``total`` bytes, and the ``missing`` blobs, each once.

    ``root`` is None if no manifest has the name.
    """

    root: Descriptor | None = None
    total: int = 0
    missing: tuple[Descriptor, ...] = ()

    @property
    def is_complete(self) -> bool:
        return self.root is not None and not self.missing

    @property
    def digest(self) -> Digest | None:
        return self.root.digest if self.root else None

    @property
    def missing_size(self) -> int:
        return sum(blob.size for blob in self.missing)


def check_completeness(
    layout: ImageLayout, root: Descriptor, exists: Callable[[Descriptor], bool] | None = None
) -> Completeness:
    """Return the missing content below ``root``. Raises ContentError if damaged, StoreError.

    ``exists`` is that of the layout, or of a snapshot of it.
    """
    # The content below a missing document is unknown.
    root_node, *nodes = walk(
        lambda content: (
            parse_document(layout.read(content), content.media_type)
            if layout.exists(content)
            else None
        ),
        root,
    )
    if root_node.document is None:
        return Completeness(root, root.size, (root,))
    return check_blobs(layout, root, (node.content for node in nodes), exists)


def check_stored(store: ContentStore, stored: StoredAImage) -> Completeness:
    """Return the missing blobs of a manifest that was read. Raises StoreError."""
    return check_blobs(store, stored.descriptor, stored.manifest.children)


def check_blobs(
    store: ContentStore,
    root: Descriptor,
    blobs: Iterable[Descriptor],
    exists: Callable[[Descriptor], bool] | None = None,
) -> Completeness:
    """Return the missing blobs among ``blobs``, the needs of ``root``. Raises StoreError."""
    by_digest = {blob.digest: blob for blob in blobs}
    exists = exists or store.exists
    missing = tuple(blob for blob in by_digest.values() if not exists(blob))
    return Completeness(root, sum(blob.size for blob in by_digest.values()), missing)


def require_complete(store: ContentStore, reference: Reference, stored: StoredAImage) -> None:
    """Raise IncompleteError, with the missing parts, if a blob of an AImage is missing."""
    completeness = check_stored(store, stored)
    if completeness.missing:
        words = describe_missing(stored, completeness)
        raise IncompleteError(
            f"{reference} is incomplete in the store: missing {words}",
            stored.descriptor.digest,
            **suggest_completion(store, reference, stored.descriptor),
        )


def open_complete(store: ContentStore, reference: Reference, lease: Lease) -> StoredAImage:
    """Return the AImage if it is complete in the store, and lease it. Raises NotFoundError."""
    from clowder_aimage.layout.stored_aimage import inflate, lease_manifest, read_aimage

    lease_manifest(store, reference, lease)
    stored = read_aimage(store, reference)
    lease_aimage(stored, lease)
    require_complete(store, reference, stored)
    inflate(store, stored)
    return stored


def lease_aimage(stored: StoredAImage, lease: Lease) -> None:
    """Lease an AImage with all its blobs."""
    lease.add(
        stored.descriptor.digest,
        *(blob.digest for blob in stored.manifest.children),
        # Compressed layers are also leased as decompressed.
        *(layer.descriptor.digest for layer in stored.aimage.layers),
    )


class IncompleteError(NotFoundError):
    """Blobs of the AImage with the manifest ``digest`` are missing from the store."""

    def __init__(self, message: str, digest: Digest, **advice: Any) -> None:
        super().__init__(message, **advice)
        self.digest = digest


def suggest_completion(
    store: ContentStore, reference: Reference, root: Descriptor, *, prefer_other: bool = False
) -> dict[str, Any]:
    """Return advice with ``reference`` or, preferably with ``prefer_other``, another name.

    The name has a registry: ``root`` can be completed from there.
    """
    names = []
    for name, descriptor in store.list_tags():
        # Another tool's name need not be a reference.
        with contextlib.suppress(UsageError):
            names += [Reference.parse(name)] if descriptor.digest == root.digest else []
    for candidate in sorted(
        [reference, *names], key=lambda name: (name == reference) == prefer_other
    ):
        if candidate.registry is not None:
            return {"remedy": "complete", "reference": candidate}
    return {"hint": "pull or create it again"}


def describe_missing(stored: StoredAImage, completeness: Completeness) -> str:
    """Return the missing parts in words: ``its config, vae (2 of 9 layers)``.

    Files at the top are named, components counted, in the manifest's order.
    """
    from clowder_aimage.dialect.selection import join_names

    missing = {blob.digest for blob in completeness.missing}
    parts = ["its config"] if stored.manifest.config.digest in missing else []
    counts: dict[str, tuple[int, int]] = {}
    for blob, layer in zip(stored.manifest.layers, stored.aimage.layers, strict=True):
        is_missing = blob.digest in missing
        if layer.component:
            count, total = counts.get(layer.component, (0, 0))
            counts[layer.component] = (count + is_missing, total + 1)
        elif is_missing:
            parts.append(layer.name)
    for component, (count, total) in counts.items():
        share = f"{count} of {total}" if count < total else str(total)
        parts += [f"{component} ({share} layer{'' if total == 1 else 's'})"] if count else []
    return join_names(parts) if parts else ""


def is_partial(layout: ImageLayout, descriptor: Descriptor) -> bool:
    """Return True if an entry is marked as partial, and no later pull has completed it."""
    if descriptor.annotations.get(mediatype.PARTIAL) != "true":
        return False
    with contextlib.suppress(AImageError):
        return not check_completeness(layout, descriptor).is_complete
    return True


class CompletenessCache:
    """A cache of complete AImages in a store, valid while its fingerprint is unchanged.

    Missing and unreadable content is checked again each time. Thread-safe. ``clock`` returns
    monotonic seconds; ``chance`` a number in [0, 1) that shortens the lifetime of a result by up to
    half, so that many results do not expire at once. The fingerprint is read every ``interval``
    seconds at most for results that are cached.
    """

    def __init__(
        self,
        store: ImageLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = lambda: 0.0,
        interval: float = 0.0,
    ) -> None:
        self._store, self._clock, self._chance = store, clock, chance
        self._interval, self._read_at = interval, -math.inf
        self._lock = threading.Lock()
        self._fingerprint: Hashable = None
        self._snapshot, self._snapshot_end = StoreSnapshot(store), 0.0
        # The versions of results, and the times at which they expire
        self._results: dict[Hashable, tuple[Hashable, float, Completeness]] = {}

    def find(
        self,
        key: Hashable,
        check: Callable[[StoreSnapshot], Completeness],
        version: Hashable = None,
    ) -> Completeness:
        """Return the cached result for ``key`` and ``version``, or that of ``check``.

        Checks within some seconds share a snapshot of an unchanged store: models share blobs.
        """
        if (cached := self.find_recent(key, version)) is not None:
            return cached
        # A result counts only if the store was unchanged from before the check to its end.
        timestamp, before, snapshot = self._read_store()
        if (cached := self._find_cached(key, version, timestamp)) is not None:
            return cached
        result = check(snapshot)
        end = timestamp + MAX_AGE * (1.0 - self._chance() / 2.0)
        is_settled = before is not None and before == self._store.compute_fingerprint()
        with self._lock:
            self._results.pop(key, None)
            if result.is_complete and is_settled and before == self._fingerprint:
                self._results[key] = version, end, result
        return result

    @property
    def is_recent(self) -> bool:
        """True if the fingerprint was read within the interval."""
        return self._clock() - self._read_at < self._interval

    def refresh(self) -> None:
        """Read the fingerprint, unless that was done within the interval."""
        if not self.is_recent:
            self._read_store()

    def find_recent(self, key: Hashable, version: Hashable = None) -> Completeness | None:
        """Return the cached result if the fingerprint was read within the interval.

        Reads nothing.
        """
        return self._find_cached(key, version, self._clock()) if self.is_recent else None

    def _find_cached(
        self, key: Hashable, version: Hashable, timestamp: float
    ) -> Completeness | None:
        with self._lock:
            cached = self._results.get(key)
        is_valid = cached is not None and cached[0] == version and timestamp < cached[1]
        return cached[2] if cached is not None and is_valid else None

    def _read_store(self) -> tuple[float, Hashable, StoreSnapshot]:
        """Read the fingerprint; return the time before that, and the snapshot for checks."""
        timestamp, fingerprint = self._clock(), self._store.compute_fingerprint()
        with self._lock:
            self._read_at = timestamp
            if fingerprint is None or fingerprint != self._fingerprint:
                self._fingerprint, self._results = fingerprint, {}
                self._snapshot_end = timestamp
            if timestamp >= self._snapshot_end:
                self._snapshot = StoreSnapshot(self._store, is_settled=fingerprint is not None)
                self._snapshot_end = timestamp + _SNAPSHOT_AGE
            return timestamp, fingerprint, self._snapshot
