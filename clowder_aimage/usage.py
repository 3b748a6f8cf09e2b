"""usage: the disk space of names in a store, in total and unique to each.

A name needs the content that ``layout/gc.py`` keeps for it: removing it would free ``unique``.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.blob_directory import BlobDirectories
from clowder_aimage.layout.digest_scan import LARGEST, DigestScanner, iter_blobs
from clowder_aimage.layout.lock import check_own, translate_store_errors
from clowder_aimage.layout.need_table import NeedTable
from clowder_aimage.layout.unpacking import list_companions
from clowder_aimage.oci import Descriptor, Digest, Manifest

# st_blocks counts units of this many bytes (stat(2)).
_BLOCK = 512


class NameUsage(NamedTuple):
    """The size of one manifest and of its content, in bytes of the files on disk.

    ``names`` are all names of the manifest, and an empty one for an entry without a name.
    ``unique`` is the size of content that no other manifest needs; ``missing`` counts needed blobs
    that are not stored.
    """

    names: tuple[str, ...]
    digest: Digest
    size: int
    unique: int
    missing: int = 0
    missing_size: int = 0

    @property
    def shared(self) -> int:
        return self.size - self.unique


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The manifests, the largest ``unique`` first, and their total size in bytes.

    ``size`` counts every blob once; ``freed`` is the size of the blobs that only they need.
    """

    shares: tuple[NameUsage, ...]
    blobs: int
    size: int
    freed: int

    @property
    def unique(self) -> int:
        return sum(share.unique for share in self.shares)


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The size of a store in bytes; ``allocated`` is the space that the file system uses.

    ``unneeded`` counts blobs that no entry of ``index.json`` needs; ``partials`` are unfinished
    downloads and their size on disk; ``free`` is available to unprivileged users, None if unknown.
    """

    root: Path
    names: int
    blobs: int
    size: int
    allocated: int
    unneeded: int
    unneeded_size: int
    partials: int
    partial_size: int
    free: int | None


def measure_usage(
    layout: ImageLayout, roots: Sequence[Path], only: Iterable[Digest] = ()
) -> UsageReport:
    """Return the usage of each manifest in ``layout``, or of those in ``only``, compared with all.

    ``roots`` are the directories of the stores in ``layout``. Raises StoreError.
    """
    names: dict[str, list[str]] = {}
    digests: dict[str, Digest] = {}
    needed: dict[str, _NeededBlobs] = {}
    with translate_store_errors(layout.root), _NeedReader(layout, roots) as needs:
        for name, descriptor in layout.iter_entries():
            digest = str(descriptor.digest)
            if digest in needed:
                names[digest].append(name)
            else:
                names[digest], digests[digest] = [name], descriptor.digest
                needed[digest] = needs.read(descriptor)
        blob_sizes = needs.sizes
    users = Counter(chain.from_iterable(item.stored for item in needed.values()))
    # A blob that two manifests need is freed by neither of them alone.
    exclusive = [0] * len(blob_sizes)
    for blob, count in users.items():
        if count == 1:
            exclusive[blob] = blob_sizes[blob]
    chosen, selected_users = needed, users
    if selected := {str(digest) for digest in only}:
        chosen = {digest: item for digest, item in needed.items() if digest in selected}
        selected_users = Counter(chain.from_iterable(item.stored for item in chosen.values()))
    shares = [
        NameUsage(
            names=_sort_names(names[digest]),
            digest=digests[digest],
            size=sum(map(blob_sizes.__getitem__, item.stored)),
            unique=sum(map(exclusive.__getitem__, item.stored)),
            missing=len(item.missing),
            missing_size=sum(item.missing.values()),
        )
        for digest, item in chosen.items()
    ]
    freed: Iterable[int] = selected_users
    if selected:
        freed = (blob for blob, count in selected_users.items() if count == users[blob])
    return UsageReport(
        shares=tuple(sorted(shares, key=lambda share: (-share.unique, -share.size, share.names))),
        blobs=len(selected_users),
        size=sum(map(blob_sizes.__getitem__, selected_users)),
        freed=sum(map(blob_sizes.__getitem__, freed)),
    )


def _sort_names(names: list[str]) -> tuple[str, ...]:
    if len(names) == 1:
        return tuple(names)
    return tuple(sorted(set(names), key=lambda name: (not name, name)))


def measure_disk_usage(layout: ImageLayout) -> DiskUsage:
    """Return the disk usage of the single store ``layout``. Raises StoreError."""
    entries = list(layout.iter_entries())
    statuses = dict(iter_blobs(layout.root))
    sizes = {name: status.st_size for name, status in statuses.items()}
    with translate_store_errors(layout.root), _NeedReader(layout, [layout.root]) as needs:
        needed = {blob for _, descriptor in entries for blob in needs.read(descriptor).stored}
        blob_sizes = needs.sizes
    partials = [status.st_blocks * _BLOCK for status in _iter_partials(layout.root)]
    space = layout.measure_space()
    return DiskUsage(
        root=layout.root,
        names=sum(1 for name, _ in entries if name),
        blobs=len(sizes),
        size=sum(sizes.values()),
        allocated=sum(status.st_blocks * _BLOCK for status in statuses.values()),
        unneeded=len(sizes) - len(needed),
        unneeded_size=sum(sizes.values()) - sum(map(blob_sizes.__getitem__, needed)),
        partials=len(partials),
        partial_size=sum(partials),
        free=None if space is None else space.free,
    )


class _NeededBlobs(NamedTuple):
    """The numbers of the needed blobs that are stored, and the sizes of those that are missing."""

    stored: Sequence[int]
    missing: Mapping[str, int]


class _NeedReader:
    """A reader of what documents need in the stores at ``roots``, until it is closed.

    ``sizes`` are those of all blobs by their numbers, in bytes; -1 for a missing one.
    """

    def __init__(self, layout: ImageLayout, roots: Sequence[Path]) -> None:
        self._companions = list_companions(layout.root)
        self._kept = frozenset(self._companions)
        self._scanner = DigestScanner(self._companions)
        self._table = NeedTable(layout.root)
        self._blobs = BlobDirectories(roots)
        self.sizes = self._blobs.measure_all(self._table.digests)
        # Needs with one of these are not those in the table, or not all stored
        sizes = enumerate(self.sizes) if -1 in self.sizes else ()
        self._uncertain = {number for number, size in sizes if size < 0}
        self._uncertain |= {*self._table.number(self._companions)} if self._companions else set()
        # Documents that differ from their digests
        self._damaged: set[str] = set()

    def __enter__(self) -> _NeedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._blobs.__exit__(kind, error, trace)
        if error is None:
            self._table.close()

    def read(self, descriptor: Descriptor) -> _NeededBlobs:
        """Return the blobs that a document needs."""
        key = str(descriptor.digest)
        blobs = self._table.find(key)
        if blobs is not None and (not self._uncertain or self._uncertain.isdisjoint(blobs)):
            return _NeededBlobs(blobs, {})
        if self._blobs.measure(key) < 0:
            return _NeededBlobs((), {key: descriptor.size})
        needed = self._scanner.needs(key, self._read, self._read)
        blobs = self._table.number(needed)
        self.sizes += self._blobs.measure_all(self._table.digests[len(self.sizes) :])
        missing = {self._table.digests[number] for number in blobs if self.sizes[number] < 0}
        if not missing:
            if needed.isdisjoint(self._damaged) and needed.isdisjoint(self._kept):
                self._table.add(key, blobs)
            return _NeededBlobs(blobs, {})
        return _NeededBlobs(
            [number for number in blobs if self.sizes[number] >= 0], self._find_sizes(key, missing)
        )

    def _find_sizes(self, key: str, missing: set[str]) -> dict[str, int]:
        """Return the stated sizes of those blobs whose sizes the documents below one state."""
        sizes: dict[str, int] = {}
        for digest, document in self._scanner.walk(key, self._read):
            if document and not missing.isdisjoint(document.digests):
                # A document of another kind states no sizes.
                with contextlib.suppress(FormatError):
                    children = Manifest.parse(self._read(digest) or b"").children
                    stated = ((str(child.digest), child.size) for child in children)
                    sizes |= {child: size for child, size in stated if child in missing}
        return sizes

    def _read(self, key: str) -> bytes | None:
        """Return a document; None if it is missing, no bytes if it is too large for one."""
        size = self._blobs.measure(key)
        if size < 0 or size > LARGEST:
            return None if size < 0 else b""
        # It may have been removed, or replaced by a link, in the meantime.
        raw = self._blobs.read(key, size + 1)
        if raw is not None and str(Digest.of(raw, key.partition(":")[0])) != key:
            self._damaged.add(key)
        return raw


def _iter_partials(root: Path) -> Iterator[os.stat_result]:
    """Yield the status of each unfinished download."""
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(check_own(root, "ingest")):
            if not entry.name.endswith(".journal") and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)
