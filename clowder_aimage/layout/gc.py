"""Garbage collection: remove unneeded content, in two phases, and leftovers of killed processes.

Marking reads every manifest that is named, leased or listed, without a lock. Sweeping holds the
collection lock, so that there are no new leases, and reads names and leases again. It removes the
content that was unneeded both times and is older than the grace period, for tools without leases.
There is no grace for a blob of a manifest that lost its name in this store after the blob was
stored. A manifest that lost a tag of a registry is kept for the grace period after the loss, since
clients pull it by digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path

from clowder_aimage.content.file_system import is_locked, open_to_lock
from clowder_aimage.content.open_directory import READ, unlink
from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout.description import ATTACHED, KINDS, UNPACKED, DescriptionFiles
from clowder_aimage.layout.digest_scan import LARGEST, DigestScanner, find_digests, iter_blobs
from clowder_aimage.layout.index_file import read_index
from clowder_aimage.layout.layout import UNNAMED, ImageLayout, index_name
from clowder_aimage.layout.lease import COLLECTION, read_leases
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    hold_lock,
    sanitize_time,
    supports_locks,
    translate_store_errors,
)
from clowder_aimage.layout.origin import ORIGINS
from clowder_aimage.layout.repository_record import RepositoryRecords
from clowder_aimage.layout.unpacking import list_companions
from clowder_aimage.oci import Descriptor, Digest, Reference

# Seconds that an unnamed blob is kept: another tool may be about to tag it.
GRACE = 3600.0
_TEMPORARY = re.compile(r".*\.[0-9a-f]{16}")
# Seconds after which an interrupted download is removed
STALE = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class RemovedName:
    """A name that was removed, and the reason."""

    name: str
    reason: str


@dataclass(slots=True)
class Collection:
    """The result of a collection or dry run, in bytes.

    ``young`` is kept by the grace period, also under names that would be removed after it;
    ``held_size`` could be freed, but would not suffice.
    """

    forgotten: list[RemovedName] = field(default_factory=list)
    blobs: int = 0
    size: int = 0
    partials: int = 0
    partial_size: int = 0
    young: int = 0
    young_size: int = 0
    held_size: int = 0
    left_size: int = 0


@dataclass(slots=True)
class Collector:
    """One collection; ``grace`` and ``stale`` are seconds, as GRACE and STALE are.

    With ``keeps_unnamed`` the grace also applies to the content of removed names.
    """

    layout: ImageLayout
    grace: float = GRACE
    keeps_unnamed: bool = False
    stale: float = STALE
    dry_run: bool = False
    clock: Callable[[], float] = time.time
    _scanner: DigestScanner = field(init=False, default_factory=DigestScanner)
    _result: Collection = field(init=False, default_factory=Collection)
    _leased: set[str] = field(init=False, default_factory=set)
    _sizes: dict[str, int] = field(init=False, default_factory=dict)
    # When the blobs were stored.
    _times: dict[str, float] = field(init=False, default_factory=dict)
    _unnamed: dict[str, float] = field(init=False, default_factory=dict)

    def run(
        self, *, max_age: float | None = None, max_size: int | None = None, keep: Sequence[str] = ()
    ) -> Collection:
        """Remove old names, then unneeded content.

        Args:
            max_age: Remove names that were not used for this many seconds.
            max_size: Remove the least recently used names until the others fit, in bytes.
            keep: Patterns of names to keep; pinned and leased names are always kept.

        Raises VerificationError if a manifest is damaged or missing, so that its needs are unknown;
        StoreError if the store cannot be read or written.
        """
        root, roots, result = self.layout.root, self._list_roots(), self._result
        self._leased = self._read_leased(remove=False)
        statuses = dict(iter_blobs(root))
        self._sizes = {name: status.st_size for name, status in statuses.items()}
        self._times = {name: status.st_ctime for name, status in statuses.items()}
        # Raises for a damaged manifest before any name is removed.
        live = self._find_live(roots)
        if max_age is not None or max_size is not None:
            gone = self._evict(max_age, max_size, keep)
            live = self._find_live([(name, digest) for name, digest in roots if name not in gone])
        unneeded = self._sizes.keys() - live
        if self.keeps_unnamed:
            self._unnamed.clear()
        else:
            self._find_unnamed(unneeded)
        if self.dry_run:
            self._sweep(unneeded)
        elif root.is_dir():
            # Other tools still see the names that index.json has; a full disk is no reason to stop
            with contextlib.suppress(AImageError):
                self.layout.write_pending()
            with hold_lock(root, COLLECTION):
                self._leased = self._read_leased(remove=True)
                self._sweep(unneeded - self._find_live(self._list_roots()))
                RepositoryRecords(root).prune(self._is_stored)
            tidy(root, self.clock() - max(self.grace, 60.0))
        stale = remove_partials(root, self.clock() - self.stale, dry_run=self.dry_run)
        result.partials, result.partial_size = len(stale), sum(stale)
        result.left_size = sum(self._sizes.values()) - result.size
        return result

    def remove(self, contents: Sequence[Descriptor]) -> Collection:
        """Remove these blobs if no document and no lease needs them. Raises as ``run``."""
        self._sizes = {str(content.digest): content.size for content in contents}
        # Reads and caches the documents before the lock is held: writers wait for the lock.
        self._find_live(self._list_roots())
        with hold_lock(self.layout.root, COLLECTION):
            self._leased = self._read_leased(remove=False)
            self._sweep(self._sizes.keys() - self._find_live(self._list_roots()))
        return self._result

    def _read_leased(self, *, remove: bool) -> set[str]:
        """Return the digests that processes need, or clients of a registry for the grace period."""
        timestamp = self.clock()
        records = RepositoryRecords(self.layout.root)
        recent = records.find_recent(timestamp - self.grace, timestamp)
        return {str(digest) for digest in recent | read_leases(self.layout.root, remove=remove)}

    def _is_stored(self, digest: Digest) -> bool:
        return os.path.lexists(self.layout.locate(_build_descriptor(str(digest))))

    def _list_roots(self) -> list[tuple[str, Digest]]:
        """Return the digests in index.json with their names, including malformed entries."""
        roots = [(name, descriptor.digest) for name, descriptor in self.layout.iter_entries()]
        listed = {str(digest) for _, digest in roots}
        unparsed = find_digests(json.dumps(read_index(self.layout.root)).encode()) - listed
        return [*roots, *(("", Digest.parse(digest_text)) for digest_text in sorted(unparsed))]

    def _find_unnamed(self, unneeded: set[str]) -> None:
        """Find the blobs of manifests that lost a name, with the time of the latest loss."""
        directory = Path(check_own(self.layout.root, UNNAMED))
        with translate_store_errors(self.layout.root), contextlib.suppress(FileNotFoundError):
            lost = {path.name: path.lstat().st_mtime for path in directory.glob("*")}
        # Without locks, only the grace protects content of running processes.
        if not lost or not supports_locks(self.layout.root):
            return
        for digest in unneeded:
            if (lost_at := lost.get(digest.partition(":")[2])) is not None:
                for needed in self._read_leased_needs(Digest.parse(digest)):
                    self._unnamed[needed] = max(lost_at, self._unnamed.get(needed, 0.0))

    def _find_live(self, roots: Iterable[tuple[str, Digest]]) -> set[str]:
        live: set[str] = set()
        # Read again under the lock: a model may have been unpacked since
        self._scanner.companions = list_companions(self.layout.root)
        for name, digest in roots:
            live |= self._needs(digest, name)
        # A process may still read a manifest after its tag has moved.
        for unreachable in self._leased - live:
            live |= self._read_leased_needs(Digest.parse(unreachable))
        return live | self._leased

    def _read_leased_needs(self, digest: Digest) -> set[str]:
        """Return the digests that a leased document needs; none if it is a blob or unreadable."""
        with contextlib.suppress(AImageError, OSError):
            with self.layout.open(_build_descriptor(str(digest))) as file:
                is_document = file.read(1) == b"{"
            return self._needs(digest, "") if is_document else set()
        return set()

    def _needs(self, digest: Digest, name: str) -> set[str]:
        """Return the digest of a document and all digests that it needs.

        Raises VerificationError if it is damaged or, with a name, missing: nothing is collected.
        """
        read = partial(self._read, name)
        if name and self._scanner.scan(str(digest), read) is None:
            raise VerificationError(
                f"the manifest of {name} is missing, and its blobs are unknown: "
                "nothing was removed",
                remedy="repair_or_remove",
                reference=name,
            )
        return self._scanner.needs(str(digest), read, self._read_config)

    def _read(self, name: str, key: str) -> bytes | None:
        """Return a verified document; no bytes for a blob, None if it is missing."""
        digest = Digest.parse(key)
        try:
            with (
                self.layout.open(_build_descriptor(key)) as file,
                translate_store_errors(self.layout.root),
            ):
                raw = file.read(LARGEST + 1) or b""
        except NotFoundError:
            return None
        if len(raw) > LARGEST:
            # Larger than any manifest: the entry names a blob
            return b""
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(
                f"{digest} in {name or 'index.json'} is damaged: nothing was removed",
                remedy="repair",
            )
        return raw

    def _read_config(self, key: str) -> bytes | None:
        """Return a config, verified or not; None if it is missing."""
        with (
            contextlib.suppress(NotFoundError, OSError),
            self.layout.open(_build_descriptor(key)) as file,
        ):
            raw = file.read(LARGEST + 1) or b""
            return raw if len(raw) <= LARGEST else b""
        return None

    def _evict(self, max_age: float | None, max_size: int | None, keep: Sequence[str]) -> set[str]:
        """Remove names from the first store, and return the removed names."""
        entries = [(name, root) for name, root in ImageLayout.iter_entries(self.layout) if name]
        pinned = {name for name, _ in self.layout.pins.iter_items()}
        candidates = [
            (self.layout.use_time(descriptor), name, descriptor)
            for name, descriptor in entries
            if _normalize_name(name) is not None
            and not pinned & {name, _normalize_name(name)}
            and str(descriptor.digest) not in self._leased
            and not any(fnmatchcase(name, pattern) for pattern in keep)
        ]
        evicted = {
            name: RemovedName(name, f"not used for {_format_duration(self.clock() - last_use)}")
            for last_use, name, _ in candidates
            if max_age is not None and self.clock() - last_use > max_age
        }
        if max_size is not None:
            candidates = sorted(
                (candidate for candidate in candidates if candidate[1] not in evicted),
                key=lambda candidate: candidate[:2],
            )
            for name in self._select_surplus(candidates, evicted.keys(), max_size):
                evicted[name] = RemovedName(name, "least recently used")
        targets = {name: root.digest for name, root in entries if name in evicted}
        removed = set(targets) if self.dry_run else self.layout.remove_names(targets)
        if self.dry_run:
            needed = (self._needs(digest, name) for name, digest in targets.items())
            self._unnamed = dict.fromkeys(chain.from_iterable(needed), self.clock())
        self._result.forgotten = [evicted[name] for name in evicted if name in removed]
        return removed

    def _select_surplus(
        self,
        candidates: Iterable[tuple[float, str, Descriptor]],
        evicted: Container[str],
        max_size: int,
    ) -> list[str]:
        """Return names of ``candidates``, in order, without which the content of the others fits.

        A name that would free nothing now is kept. What it would free after the grace is counted
        as young, and no other name is removed in its place.
        """
        needs = Counter(self._leased)
        for name, digest in self._list_roots():
            if not name or name not in evicted:
                needs.update(self._needs(digest, name))
        total = sum(self._sizes.get(digest, 0) for digest in needs)
        surplus: dict[str, set[str]] = {}
        for _, name, descriptor in candidates:
            if total <= max_size:
                break
            needed = self._needs(descriptor.digest, name)
            needs.subtract(needed)
            total -= sum(self._sizes.get(digest, 0) for digest in needed if not needs[digest])
            # The manifest alone is not worth the name.
            surplus[name] = needed - {str(descriptor.digest)}
        unneeded = {digest for digest in chain.from_iterable(surplus.values()) if not needs[digest]}
        young = set(filter(self._is_young, unneeded))
        freed = unneeded - young
        removed = [name for name, needed in surplus.items() if needed & freed]
        kept = (needed & young for name, needed in surplus.items() if name not in removed)
        self._count_young(set().union(*kept))
        return removed

    def _is_young(self, digest: str) -> bool:
        """Return True if a blob that loses its names is kept by the grace period."""
        if not (self.grace and self.keeps_unnamed) or digest not in self._times:
            return False
        timestamp = self.clock()
        return sanitize_time(self._times[digest], timestamp) > timestamp - self.grace

    def _count_young(self, digests: set[str]) -> None:
        self._result.young += len(digests)
        self._result.young_size += sum(self._sizes[digest] for digest in digests)

    def _sweep(self, unneeded: set[str]) -> None:
        """Remove blobs older than the grace period. The lock is held, except in a dry run."""
        timestamp = self.clock()
        latest = timestamp - self.grace
        for digest in sorted(unneeded):
            algorithm, _, encoded = digest.partition(":")
            path = os.path.join(self.layout.root, "blobs", algorithm, encoded)
            with translate_store_errors(self.layout.root), contextlib.suppress(FileNotFoundError):
                stored = sanitize_time(os.stat(path).st_ctime, timestamp)
                if self.grace and stored > max(latest, self._unnamed.get(digest, 0.0)):
                    self._count_young({digest})
                    continue
                if not self.dry_run:
                    unlink(path)
                self._result.blobs += 1
                self._result.size += self._sizes[digest]


def _build_descriptor(digest: str) -> Descriptor:
    return Descriptor("application/octet-stream", Digest.parse(digest), 0)


def _normalize_name(name: str) -> str | None:
    """Return a name with its tag in canonical form, or None if it is not a reference."""
    with contextlib.suppress(AImageError):
        return index_name(Reference.parse(name))
    return None


def _format_duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"


def remove_partials(root: Path, latest: float, *, dry_run: bool) -> list[int]:
    """Remove ingests last written before ``latest`` that no process has open; return their bytes.

    Raises StoreError: one cannot be removed.
    """
    directory = Path(check_own(root, "ingest"))
    removed: list[int] = []
    if not directory.is_dir():
        return removed
    can_lock = supports_locks(root)
    for path in sorted(directory.glob("*")):
        # Its name is random: no later ingest continues it.
        is_anonymous = path.suffix != "" and can_lock
        with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if path.suffix == ".journal" or not stat.S_ISREG(status.st_mode):
                continue
            is_old = is_anonymous or sanitize_time(status.st_mtime, time.time()) <= latest
            if is_old and _remove_idle(path, dry_run=dry_run):
                removed.append(status.st_blocks * 512)
    for journal in () if dry_run else sorted(directory.glob("*.journal")):
        if not journal.with_suffix("").exists():
            journal.unlink(missing_ok=True)
    return removed


def _remove_idle(path: Path, *, dry_run: bool) -> bool:
    """Remove an ingest if no process has it open; return True if it was idle."""
    try:
        fd = open_to_lock(path, READ)
    except PermissionError:
        # Another user's file
        return False
    try:
        if is_locked(fd):
            return False
        if os.fstat(fd).st_ino != os.stat(path).st_ino:
            # The ingest was committed, and another one was started.
            return False
        if not dry_run:
            unlink(path)
        return True
    finally:
        os.close(fd)


def tidy(root: Path, latest: float) -> None:
    """Remove metadata of missing manifests, and temporary files from before ``latest``."""
    present = {name.partition(":")[2] for name, _ in iter_blobs(root)}
    # A name may be of a manifest in another store
    listed = find_digests(json.dumps(read_index(root)).encode())
    named = present | {name.partition(":")[2] for name in listed}
    for kind in KINDS:
        check_own(root, kind)
        with DescriptionFiles(root, kind) as files:
            files.retain(named if kind in (ATTACHED, UNPACKED) else present)
    for kind in ("used", UNNAMED, ORIGINS):
        kept = named if kind == ORIGINS else present
        for path in Path(check_own(root, kind)).glob("*"):
            if "." not in path.name and path.name not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()
    private = root / PRIVATE
    # All directories except ingest, whose files are removed by remove_partials.
    directories = [directory for directory in private.glob("[!i]*") if not directory.is_symlink()]
    for path in chain(private.glob("*.*"), *(directory.glob("*.*") for directory in directories)):
        if _TEMPORARY.fullmatch(path.name) or path.name.startswith("damaged."):
            with contextlib.suppress(OSError):
                # A damaged blob keeps its old mtime
                changed = path.lstat().st_ctime
                if sanitize_time(changed, time.time()) < latest:
                    path.unlink()
