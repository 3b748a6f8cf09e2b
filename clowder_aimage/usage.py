"""What the names in a store take on disk, and what is needed by one of them alone.

What a name needs is what a collection takes it to need (``layout/gc.py``): every digest that
its manifests and their configs mention, so that ``unique`` is what removing the name would free.
Manifests are searched and not parsed, which is several times as fast. The time grows with the bytes
of all manifests and the number of blobs; the memory with the number of layers in all manifests.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import (
    LARGEST,
    MAX_DEPTH,
    blobs,
    configs,
    documents,
    mentioned,
    plain,
)
from clowder_aimage.layout.lock import check_own
from clowder_aimage.layout.os_error import store_errors
from clowder_aimage.oci import Descriptor, Digest

_BLOCK = 512  # bytes that st_blocks counts in


@dataclass(frozen=True, slots=True)
class NameUsage:
    """What one manifest takes; all sizes are bytes of the files on disk.

    ``names`` are all the names that it has, and an empty one where an entry names nothing: they
    go together, for it is needed until the last of them is gone. ``size`` is of everything it
    needs, itself included; ``unique`` of what no other manifest needs. What it needs and is not
    there is ``missing`` blobs, of ``missing_size`` bytes.
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
class StoreUsage:
    """The shares, the largest ``unique`` first, and what they take together, in bytes.

    ``size`` counts every blob once; ``freed`` is what would be freed if all of them went.
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
    """A store as a whole. Sizes are bytes; ``allocated`` is what the file system gives for them.

    ``unneeded`` is what no entry of ``index.json`` needs; ``partials`` are unfinished downloads
    and what they take on disk; ``free`` is what an ordinary user may still write.
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
    free: int


def usage(layout: ImageLayout, roots: Sequence[Path], only: Iterable[Digest] = ()) -> StoreUsage:
    """What each manifest in ``layout`` takes, or those of ``only``, beside all the others.

    Where ``layout`` is made of several stores, ``roots`` are their directories.

    Raises:
        StoreError: the store cannot be read.
    """
    needs = _Needs(layout, roots)
    names: dict[Digest, list[str]] = {}
    needed: dict[Digest, _Needed] = {}
    users = [0] * len(needs.sizes)  # of each blob: how many manifests need it
    for name, descriptor in layout.entries():
        names.setdefault(descriptor.digest, []).append(name)
        if descriptor.digest not in needed:
            needed[descriptor.digest] = found = needs.of(descriptor)
            for blob in found.blobs:
                users[blob] += 1
    wanted = set(only) or needed.keys()
    chosen = {digest: found for digest, found in needed.items() if digest in wanted}
    shares = [
        _share(digest, names[digest], found, needs.sizes, users) for digest, found in chosen.items()
    ]
    shares.sort(key=lambda share: (-share.unique, -share.size, share.names))
    mine = [0] * len(users)
    for found in chosen.values():
        for blob in found.blobs:
            mine[blob] += 1
    sizes = needs.sizes
    return StoreUsage(
        shares=tuple(shares),
        blobs=len(mine) - mine.count(0),
        size=sum(size for size, count in zip(sizes, mine, strict=True) if count),
        freed=sum(
            size for size, count, all_ in zip(sizes, mine, users, strict=True) if count == all_ != 0
        ),
    )


def _share(
    digest: Digest, names: list[str], found: _Needed, sizes: list[int], users: list[int]
) -> NameUsage:
    return NameUsage(
        names=tuple(sorted(set(names), key=lambda name: (not name, name))),
        digest=digest,
        size=sum(sizes[blob] for blob in found.blobs),
        unique=sum(sizes[blob] for blob in found.blobs if users[blob] == 1),
        missing=len(found.missing),
        missing_size=sum(found.missing.values()),
    )


def filling(layout: ImageLayout) -> DiskUsage:
    """How full the one store ``layout`` is. Raises StoreError."""
    entries = list(layout.entries())
    needs = _Needs(layout, [layout.root])
    needed = {blob for _, descriptor in entries for blob in needs.of(descriptor).blobs}
    partials = [status.st_blocks * _BLOCK for status in _partials(layout.root)]
    return DiskUsage(
        root=layout.root,
        names=sum(1 for name, _ in entries if name),
        blobs=len(needs.sizes),
        size=sum(needs.sizes),
        allocated=needs.allocated,
        unneeded=len(needs.sizes) - len(needed),
        unneeded_size=sum(needs.sizes) - sum(needs.sizes[blob] for blob in needed),
        partials=len(partials),
        partial_size=sum(partials),
        free=layout.free(),
    )


@dataclass(slots=True)
class _Needed:
    """What a document needs, itself included: the numbers of the blobs that are here, and the
    sizes of those that are not."""

    blobs: tuple[int, ...] = ()
    missing: dict[bytes, int] = field(default_factory=dict)


class _Needs:
    """The blobs of the stores in ``roots``, numbered, and which of them a document needs."""

    def __init__(self, layout: ImageLayout, roots: Iterable[Path]) -> None:
        self._layout = layout
        self._numbers: dict[bytes, int] = {}
        self._known: dict[bytes, _Needed] = {}
        self.sizes: list[int] = []
        self.allocated = 0
        for root in roots:
            for name, status in blobs(root):
                if name not in self._numbers:  # else another store has it, too
                    self._numbers[name] = len(self.sizes)
                    self.sizes.append(status.st_size)
                    self.allocated += status.st_blocks * _BLOCK

    def of(self, descriptor: Descriptor) -> _Needed:
        """What the document that an entry of ``index.json`` names needs. Raises StoreError."""
        key = str(descriptor.digest).encode()
        if key not in self._numbers:
            return _Needed((), {key: descriptor.size})
        return self._of(key)

    def _of(self, key: bytes, depth: int = 0) -> _Needed:
        if key not in self._known:
            raw = self._read(key)
            found = set(mentioned(raw))
            needed = {self._numbers[key], *self._here(found)}
            missing = _missing(raw, [one for one in found if one not in self._numbers])
            for digest in documents(raw) if depth < MAX_DEPTH else ():
                child = str(digest).encode()
                if child in self._numbers:  # else it is a variant that nobody has fetched
                    below = self._of(child, depth + 1)
                    needed.update(below.blobs)
                    missing |= below.missing
            for config in configs(raw):
                needed.update(self._here(mentioned(self._read(config))))
            self._known[key] = _Needed(tuple(needed), missing)
        return self._known[key]

    def _here(self, digests: Iterable[bytes]) -> Iterator[int]:
        numbers = self._numbers
        return (numbers[digest] for digest in digests if digest in numbers)

    def _read(self, key: bytes) -> bytes:
        """A document, its letters spelt plainly; nothing where it is none, or not here."""
        number = self._numbers.get(key)
        if number is None or self.sizes[number] > LARGEST:
            return b""
        content = Descriptor("application/octet-stream", Digest.parse(key.decode()), 0)
        try:
            with store_errors(self._layout.root), self._layout.open(content) as file:
                raw = file.read(LARGEST) or b""
        except NotFoundError:  # it has just been removed
            return b""
        return plain(raw)


def _partials(root: Path) -> Iterator[os.stat_result]:
    """The unfinished downloads."""
    with store_errors(root), contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(check_own(root, "ingest")):
            if not entry.name.endswith(".journal") and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False)


def _load(raw: bytes) -> dict[str, Any]:
    """A document, parsed; empty where it means nothing."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(raw)
        return value if isinstance(value, dict) else {}
    return {}


def _missing(raw: bytes, absent: Sequence[bytes]) -> dict[bytes, int]:
    """Of the digests that are not here, those of the config and the layers, and their sizes."""
    if not absent:
        return {}
    value, sizes = _load(raw), {}
    for child in [*_list([value.get("config")]), *_list(value.get("layers"))]:
        size = child.get("size")
        sizes[str(child.get("digest"))] = size if isinstance(size, int) and size >= 0 else 0
    named = ((digest, digest.decode()) for digest in absent)
    return {digest: sizes[text] for digest, text in named if text in sizes}


def _list(value: object) -> list[dict[str, Any]]:
    """The objects in what should be a list of them."""
    items = value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict)]
