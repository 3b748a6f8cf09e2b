"""Garbage collection: remove what no name needs, in two phases.

Marking reads every manifest that is named, leased or listed, without a lock. Sweeping holds the
collection's lock, under which no lease can begin, reads names and leases once more, and removes
what was unneeded both times and is older than the grace period. The grace period is for other
tools: they write blobs before they name them, and take no lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout.digest_scan import LARGEST, DigestScanner, blobs, mentioned
from clowder_aimage.layout.index import read_index
from clowder_aimage.layout.layout import ImageLayout, index_name
from clowder_aimage.layout.lease import COLLECTION, leased
from clowder_aimage.layout.lock import held, store_errors
from clowder_aimage.layout.orphan import remove_partials, tidy
from clowder_aimage.oci import Descriptor, Digest, Reference

GRACE = 3600.0  # seconds that an unnamed blob is kept: another tool may be about to name it
STALE = 7 * 86400.0  # seconds after which an interrupted download is removed


@dataclass(frozen=True, slots=True)
class ForgottenName:
    """A name that was removed, and the reason."""

    name: str
    reason: str


@dataclass(slots=True)
class Collection:
    """The result of a collection, or of a dry run; sizes in bytes.

    ``young`` is what the grace period keeps.
    """

    forgotten: list[ForgottenName] = field(default_factory=list)
    blobs: int = 0
    size: int = 0
    partials: int = 0
    partial_size: int = 0
    young: int = 0
    young_size: int = 0
    left_size: int = 0


class Collector:
    """One collection in ``layout``. ``now`` is seconds since the epoch."""

    def __init__(
        self,
        layout: ImageLayout,
        *,
        grace: float = GRACE,
        stale: float = STALE,
        dry_run: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self._grace = grace
        self._stale = stale
        self._dry_run = dry_run
        self._now = now
        self._scanner = DigestScanner()
        self._done = Collection()

    def run(
        self,
        *,
        max_age: float | None = None,
        max_size: int | None = None,
        keep: Sequence[str] = (),
    ) -> Collection:
        """Remove old names, then what nothing needs.

        Args:
            max_age: Remove names that were not used for so many seconds.
            max_size: Remove the least recently used names until the rest fits, in bytes.
            keep: Patterns of names that stay, as do pinned and leased ones.

        Raises:
            VerificationError: a manifest is damaged or missing, so that its needs are not known.
            StoreError: the store cannot be read or written.
        """
        roots = self._roots()
        held_now = {str(digest) for digest in leased(self._layout.root, remove=False)}
        sizes = {name: found.st_size for name, found in blobs(self._layout.root)}
        live = self._live(
            roots, held_now
        )  # raises for a damaged manifest before any name is removed
        if max_age is not None or max_size is not None:
            gone = self._forget(held_now, sizes, max_age, max_size, keep)
            roots = [(name, digest) for name, digest in roots if not name or name not in gone]
            live = self._live(roots, held_now)
        unneeded = {digest for digest in sizes if digest not in live}
        if self._dry_run:
            self._sweep(unneeded, sizes)
        elif self._layout.root.is_dir():
            with held(self._layout.root, COLLECTION):
                now_held = {str(digest) for digest in leased(self._layout.root, remove=True)}
                unneeded -= self._live(self._roots(), now_held)
                self._sweep(unneeded, sizes)
            tidy(self._layout.root, self._now() - max(self._grace, 60.0))
        stale = remove_partials(self._layout.root, self._now() - self._stale, dry_run=self._dry_run)
        self._done.partials, self._done.partial_size = len(stale), sum(stale)
        self._done.left_size = sum(sizes.values()) - self._done.size
        return self._done

    # -- what is needed

    def _roots(self) -> list[tuple[str, Digest]]:
        """Return what index.json lists, with names, and what malformed entries mention."""
        roots = [(name, descriptor.digest) for name, descriptor in self._layout.entries()]
        known = {str(digest) for _, digest in roots}
        others = mentioned(json.dumps(read_index(self._layout.root)).encode()) - known
        return [*roots, *(("", Digest.parse(found)) for found in sorted(others))]

    def _live(self, roots: Iterable[tuple[str, Digest]], held_now: set[str]) -> set[str]:
        live: set[str] = set()
        for name, digest in roots:
            live |= self._needs(digest, name)
        for held_alone in held_now - live:  # a tag has moved on from what a process is reading
            live |= self._needs_of_held(Digest.parse(held_alone))
        return live | held_now

    def _needs_of_held(self, digest: Digest) -> set[str]:
        """Return what a leased document needs; nothing for a blob, or what cannot be read."""
        try:
            with self._layout.open(_content(str(digest))) as file:
                is_document = file.read(1) == b"{"
            return self._needs(digest, "") if is_document else set()
        except (AImageError, OSError):
            return set()

    def _needs(self, digest: Digest, name: str) -> set[str]:
        """Return the digests of a document that ``name`` names, and of all that it needs.

        Raises:
            VerificationError: it is damaged or, with a name, missing: nothing may be collected.
        """
        read = partial(self._read, name)
        if name and self._scanner.scan(str(digest), read) is None:
            raise VerificationError(
                f"{name} names a manifest that is missing, and what it needs is not known: "
                "nothing was collected",
                remedy="repair_or_remove",
                reference=name,
            )
        return self._scanner.needs(str(digest), read, self._read_config)

    def _read(self, name: str, key: str) -> bytes | None:
        """Return a document, verified; nothing of a blob, None where it is missing."""
        digest = Digest.parse(key)
        try:
            with self._layout.open(_content(key)) as file, store_errors(self._layout.root):
                raw = file.read(LARGEST + 1) or b""
        except NotFoundError:
            return None
        if len(raw) > LARGEST:
            return b""  # no manifest is as large: an entry that names a blob
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(
                f"{digest}, which {name or 'index.json'} names, is damaged: nothing was collected",
                remedy="repair",
            )
        return raw

    def _read_config(self, key: str) -> bytes | None:
        """Return a config as it is, verified or not; None where it is missing."""
        with contextlib.suppress(NotFoundError, OSError), self._layout.open(_content(key)) as file:
            raw = file.read(LARGEST + 1) or b""
            return raw if len(raw) <= LARGEST else b""
        return None

    # -- names

    def _forget(
        self,
        held_now: set[str],
        sizes: dict[str, int],
        max_age: float | None,
        max_size: int | None,
        keep: Sequence[str],
    ) -> set[str]:
        """Remove names of the first store, and return those that were removed."""
        entries = [(name, root) for name, root in ImageLayout.entries(self._layout) if name]
        pinned = {name for name, _ in self._layout.pins.items()}
        free = [
            (self._layout.used(descriptor), name, descriptor)
            for name, descriptor in entries
            if _whole(name) is not None
            and not pinned & {name, _whole(name)}
            and str(descriptor.digest) not in held_now
            and not any(fnmatchcase(name, pattern) for pattern in keep)
        ]
        gone = {
            name: ForgottenName(name, f"not used for {_long(self._now() - used)}")
            for used, name, _ in free
            if max_age is not None and self._now() - used > max_age
        }
        if max_size is not None:
            free = sorted((one for one in free if one[1] not in gone), key=lambda one: one[:2])
            for name in self._surplus(free, gone.keys(), held_now, sizes, max_size):
                gone[name] = ForgottenName(name, "the least recently used")
        meant = {name: root.digest for name, root in entries if name in gone}
        done = set(meant) if self._dry_run else self._layout.forget(meant)
        self._done.forgotten = [gone[name] for name in gone if name in done]
        return done

    def _surplus(
        self,
        free: Iterable[tuple[float, str, Descriptor]],
        gone: Container[str],
        held_now: set[str],
        sizes: dict[str, int],
        max_size: int,
    ) -> Iterator[str]:
        """Yield the names of ``free``, in order, until what the others need fits."""
        needs = Counter(held_now)
        for name, digest in self._roots():
            if not name or name not in gone:
                needs.update(self._needs(digest, name))
        total = sum(sizes.get(digest, 0) for digest in needs)
        for _, name, descriptor in free:
            if total <= max_size:
                break
            yield name
            for needed in self._needs(descriptor.digest, name):
                needs[needed] -= 1
                total -= 0 if needs[needed] else sizes.get(needed, 0)

    # -- removing

    def _sweep(self, unneeded: set[str], sizes: dict[str, int]) -> None:
        """Remove blobs, but for the young. The lock is held, except in a dry run."""
        latest = self._now() - self._grace
        for digest in sorted(unneeded):
            algorithm, _, encoded = digest.partition(":")
            path = os.path.join(self._layout.root, "blobs", algorithm, encoded)
            with store_errors(self._layout.root), contextlib.suppress(FileNotFoundError):
                if self._grace and os.stat(path).st_ctime > latest:
                    self._done.young += 1
                    self._done.young_size += sizes[digest]
                    continue
                if not self._dry_run:
                    os.unlink(path)
                self._done.blobs += 1
                self._done.size += sizes[digest]


def _content(digest: str) -> Descriptor:
    return Descriptor("application/octet-stream", Digest.parse(digest), 0)


def _whole(name: str) -> str | None:
    """Return a name with its tag, as we write it; None where it is not a reference."""
    with contextlib.suppress(AImageError):
        return index_name(Reference.parse(name))
    return None


def _long(seconds: float) -> str:
    """Return a duration in one unit."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
