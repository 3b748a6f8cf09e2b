"""usage: the disk space of names in a store, in total and unique to each.

A name needs the content that ``layout/gc.py`` keeps for it: removing it would free ``unique``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType

from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import ALGORITHMS, LARGEST, DigestScanner, iter_blobs
from clowder_aimage.layout.lock import check_own, translate_store_errors
from clowder_aimage.layout.unpacking import list_unpacked
from clowder_aimage.oci import Descriptor, Digest, Manifest

# st_blocks counts units of this many bytes (stat(2)).
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class NameUsage:
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
    sizes = {name: status.st_size for root in roots for name, status in iter_blobs(root)}
    names: dict[Digest, list[str]] = {}
    needed: dict[Digest, tuple[tuple[str, ...], dict[str, int]]] = {}
    with translate_store_errors(layout.root), _NeededBlobs(layout, roots, sizes) as needs:
        for name, descriptor in layout.iter_entries():
            names.setdefault(descriptor.digest, []).append(name)
            if descriptor.digest not in needed:
                needed[descriptor.digest] = needs.of(descriptor)
    users = Counter(chain.from_iterable(stored for stored, _ in needed.values()))
    # A blob that two manifests need is freed by neither of them alone.
    exclusive = {blob for blob, count in users.items() if count == 1}
    selected = set(only) or needed.keys()
    chosen = {digest: status for digest, status in needed.items() if digest in selected}
    shares = [
        NameUsage(
            names=tuple(sorted(set(names[digest]), key=lambda name: (not name, name))),
            digest=digest,
            size=sum(map(sizes.__getitem__, stored)),
            unique=sum(map(sizes.__getitem__, exclusive.intersection(stored))),
            missing=len(missing),
            missing_size=sum(missing.values()),
        )
        for digest, (stored, missing) in chosen.items()
    ]
    selected_users = Counter(chain.from_iterable(stored for stored, _ in chosen.values()))
    return UsageReport(
        shares=tuple(sorted(shares, key=lambda share: (-share.unique, -share.size, share.names))),
        blobs=len(selected_users),
        size=sum(sizes[blob] for blob in selected_users),
        freed=sum(sizes[blob] for blob, count in selected_users.items() if count == users[blob]),
    )


def measure_disk_usage(layout: ImageLayout) -> DiskUsage:
    """Return the disk usage of the single store ``layout``. Raises StoreError."""
    entries = list(layout.iter_entries())
    statuses = dict(iter_blobs(layout.root))
    sizes = {name: status.st_size for name, status in statuses.items()}
    with translate_store_errors(layout.root), _NeededBlobs(layout, [layout.root], sizes) as needs:
        needed = {blob for _, descriptor in entries for blob in needs.of(descriptor)[0]}
    partials = [status.st_blocks * _BLOCK for status in _iter_partials(layout.root)]
    space = layout.measure_space()
    return DiskUsage(
        root=layout.root,
        names=sum(1 for name, _ in entries if name),
        blobs=len(sizes),
        size=sum(sizes.values()),
        allocated=sum(status.st_blocks * _BLOCK for status in statuses.values()),
        unneeded=len(sizes) - len(needed),
        unneeded_size=sum(sizes.values()) - sum(sizes[blob] for blob in needed),
        partials=len(partials),
        partial_size=sum(partials),
        free=None if space is None else space.free,
    )


class _NeededBlobs:
    """The blobs that documents need, among those in ``sizes``, until it is closed."""

    def __init__(self, layout: ImageLayout, roots: Sequence[Path], sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._scanner = DigestScanner(list_unpacked(layout.root))
        self._stack = contextlib.ExitStack()
        # The directories of blobs are opened once: opening a file takes longer than scanning it
        self._directories: dict[str, list[OpenDirectory]] = {}
        for algorithm in ALGORITHMS:
            for root in roots:
                with contextlib.suppress(FileNotFoundError):
                    directory = OpenDirectory(root / "blobs" / algorithm)
                    self._directories.setdefault(algorithm, []).append(directory)
                    self._stack.enter_context(directory)

    def __enter__(self) -> _NeededBlobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, descriptor: Descriptor) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return the needed blobs that are stored, and the sizes of those that are missing."""
        key = str(descriptor.digest)
        if key not in self._sizes:
            return (), {key: descriptor.size}
        needed = self._scanner.needs(key, self._read, self._read)
        stored = tuple(filter(self._sizes.__contains__, needed))
        missing: dict[str, int] = {}
        documents = self._scanner.walk(key, self._read) if len(stored) < len(needed) else ()
        for digest, document in documents:
            if document and not self._sizes.keys() >= set(document.digests):
                # A document of another kind states no sizes.
                with contextlib.suppress(FormatError):
                    children = Manifest.parse(self._read(digest) or b"").children
                    sizes = {str(child.digest): child.size for child in children}
                    missing |= {
                        digest_text: sizes[digest_text]
                        for digest_text in sizes.keys() - self._sizes.keys()
                    }
        return stored, missing

    def _read(self, key: str) -> bytes | None:
        """Return a document; None if it is missing, no bytes if it is too large for one."""
        size = self._sizes.get(key)
        if size is None or size > LARGEST:
            return None if size is None else b""
        algorithm, _, encoded = key.partition(":")
        for directory in self._directories.get(algorithm, ()):
            try:
                return directory.read(encoded, size + 1)
            except OSError as error:
                # It may have been removed, or replaced by a link, in the meantime.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
        return None


def _iter_partials(root: Path) -> Iterator[os.stat_result]:
    """Yield the status of each unfinished download."""
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(check_own(root, "ingest")):
            if not entry.name.endswith(".journal") and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)
