"""Collection: what no name needs is removed, in two phases.

Marking reads every manifest that is named, leased or listed, without a lock. Sweeping holds the
collection's lock, which no new lease can be taken under, looks once more at names and leases, and
removes what was found unneeded and is older than the grace period. The grace period is for other
tools: they write blobs before they name them, and know no lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

GRACE = 3600.0  # seconds that an unnamed blob is left for whoever is about to name it
STALE = 7 * 86400.0  # seconds after which nobody will go on with a broken-off download


@dataclass(frozen=True, slots=True)
class ForgottenName:
    """A name that was let go, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class Collection:
    """What was removed, or would be; sizes in bytes. ``young`` is what the grace period keeps,
    ``dangling`` are names whose manifest is not there."""

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
        """Let go of names that were not used for ``max_age`` seconds, and of the least recently
        used ones until the rest fits into ``max_size`` bytes; then remove what nothing needs.

        Names that are pinned, leased, or fit a pattern of ``keep`` stay.

        Raises:
            VerificationError: a manifest is damaged, so that nobody knows what it needs.
            StoreError: the store cannot be read or written.
        """
        roots = self._roots()
        held_now = {str(digest) for digest in leased(self._layout.root, remove=False)}
        sizes = {name: found.st_size for name, found in blobs(self._layout.root)}
        live = self._live(roots, held_now)  # whether anything is damaged must be known first
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
        """The names that were let go; those of stores that are only read are none of ours."""
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
        gone: dict[str, ForgottenName] = {}
        for used, name, _ in free:
            age = self._now() - used
            if max_age is not None and age > max_age:
                gone[name] = ForgottenName(name, f"not used for {_long(age)}")
        if max_size is not None:
            needs = Counter(held_now)
            for name, digest in self._roots():
                if not name or name not in gone:
                    needs.update(self._needs(digest, name))
            total = sum(sizes.get(digest, 0) for digest in needs)
            for _, name, descriptor in sorted(free, key=lambda one: one[:2]):
                if total <= max_size:
                    break
                if name in gone:
                    continue
                gone[name] = ForgottenName(name, "the least recently used")
                for needed in self._needs(descriptor.digest, name):
                    needs[needed] -= 1
                    if not needs[needed]:
                        total -= sizes.get(needed, 0)
        meant = {name: root.digest for name, root in entries if name in gone}
        done = set(meant) if self._dry_run else self._layout.forget(meant)
        self._done.forgotten = [gone[name] for name in gone if name in done]
        return done

    # -- removing

    def _sweep(self, unneeded: set[str], sizes: dict[str, int]) -> None:
        """Remove blobs, but for the young. The collection's lock is held, unless it is a trial."""
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
    """A name as we write it: another tool may have left the tag out. None where it is not one that
    we could write."""
    with contextlib.suppress(AImageError):
        return index_name(Reference.parse(name))
    return None


def _long(seconds: float) -> str:
    """How long that is, in one unit."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
