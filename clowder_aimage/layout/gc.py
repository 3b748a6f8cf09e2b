"""Garbage collection: remove unneeded content, in two phases, and leftovers of killed processes.

Marking reads every manifest that is named, leased or listed, without a lock. Sweeping holds the
collection lock, which blocks new leases, reads names and leases again, and removes what was
unneeded both times and is older than the grace period, for tools without leases. There is no grace
for a blob of a manifest that lost its name in this store after the blob was stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path

from clowder_aimage.content.atomic_file import flock
from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout.digest_scan import LARGEST, DigestScanner, blobs, mentioned
from clowder_aimage.layout.index import read_index
from clowder_aimage.layout.layout import UNNAMED, ImageLayout, index_name
from clowder_aimage.layout.lease import COLLECTION, leased
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    held,
    known_time,
    locks_work,
    store_errors,
)
from clowder_aimage.oci import Descriptor, Digest, Reference

GRACE = 3600.0  # seconds that an unnamed blob is kept: another tool may be about to tag it
_TEMPORARY = re.compile(r".*\.[0-9a-f]{16}")
STALE = 7 * 86400.0  # seconds after which an interrupted download is removed


@dataclass(frozen=True, slots=True)
class RemovedName:
    """A name that was removed, and the reason."""

    name: str
    reason: str


@dataclass(slots=True)
class Collection:
    """The result of a collection or dry run, in bytes; ``young`` is kept by the grace period."""

    forgotten: list[RemovedName] = field(default_factory=list)
    blobs: int = 0
    size: int = 0
    partials: int = 0
    partial_size: int = 0
    young: int = 0
    young_size: int = 0
    left_size: int = 0


@dataclass(slots=True)
class Collector:
    """One collection; ``grace`` and ``stale`` are seconds, as GRACE and STALE are.

    With ``keeps_unnamed`` the grace also applies to what only removed names needed.
    """

    layout: ImageLayout
    grace: float = GRACE
    keeps_unnamed: bool = False
    stale: float = STALE
    dry_run: bool = False
    now: Callable[[], float] = time.time
    _scanner: DigestScanner = field(init=False, default_factory=DigestScanner)
    _done: Collection = field(init=False, default_factory=Collection)
    _held: set[str] = field(init=False, default_factory=set)
    _sizes: dict[str, int] = field(init=False, default_factory=dict)
    _unnamed: dict[str, float] = field(init=False, default_factory=dict)

    def run(
        self, *, max_age: float | None = None, max_size: int | None = None, keep: Sequence[str] = ()
    ) -> Collection:
        """Remove old names, then unneeded content.

        Args:
            max_age: Remove names that were not used for this many seconds.
            max_size: Remove the least recently used names until the rest fits, in bytes.
            keep: Patterns of names to keep; pinned and leased names are always kept.

        Raises VerificationError if a manifest is damaged or missing, so that its needs are unknown;
        StoreError if the store cannot be read or written.
        """
        root, roots, done = self.layout.root, self._roots(), self._done
        self._held = {str(digest) for digest in leased(root, remove=False)}
        self._sizes = {name: found.st_size for name, found in blobs(root)}
        live = self._live(roots)  # raises for a damaged manifest before any name is removed
        if max_age is not None or max_size is not None:
            gone = self._evict(max_age, max_size, keep)
            live = self._live([(name, digest) for name, digest in roots if name not in gone])
        unneeded = self._sizes.keys() - live
        if self.keeps_unnamed:
            self._unnamed.clear()
        else:
            self._find_unnamed(unneeded)
        if self.dry_run:
            self._sweep(unneeded)
        elif root.is_dir():
            with held(root, COLLECTION):
                self._held = {str(digest) for digest in leased(root, remove=True)}
                self._sweep(unneeded - self._live(self._roots()))
            tidy(root, self.now() - max(self.grace, 60.0))
        stale = remove_partials(root, self.now() - self.stale, dry_run=self.dry_run)
        done.partials, done.partial_size = len(stale), sum(stale)
        done.left_size = sum(self._sizes.values()) - done.size
        return done

    def remove(self, contents: Sequence[Descriptor]) -> Collection:
        """Remove these blobs if no document and no lease needs them. Raises as ``run``."""
        self._sizes = {str(content.digest): content.size for content in contents}
        self._live(self._roots())  # reads the documents before the lock is held
        with held(self.layout.root, COLLECTION):
            self._held = {str(digest) for digest in leased(self.layout.root, remove=False)}
            self._sweep(self._sizes.keys() - self._live(self._roots()))
        return self._done

    def _roots(self) -> list[tuple[str, Digest]]:
        """Return the digests in index.json with their names, including malformed entries."""
        roots = [(name, descriptor.digest) for name, descriptor in self.layout.entries()]
        known = {str(digest) for _, digest in roots}
        others = mentioned(json.dumps(read_index(self.layout.root)).encode()) - known
        return [*roots, *(("", Digest.parse(found)) for found in sorted(others))]

    def _find_unnamed(self, unneeded: set[str]) -> None:
        """Find the blobs of manifests that lost a name, and the last time that one did."""
        directory = Path(check_own(self.layout.root, UNNAMED))
        with store_errors(self.layout.root), contextlib.suppress(FileNotFoundError):
            lost = {path.name: path.lstat().st_mtime for path in directory.glob("*")}
        if not lost or not locks_work(self.layout.root):  # without locks, leases need the grace
            return
        for digest in unneeded:
            if (at := lost.get(digest.partition(":")[2])) is not None:
                for needed in self._needs_of_held(Digest.parse(digest)):
                    self._unnamed[needed] = max(at, self._unnamed.get(needed, 0.0))

    def _live(self, roots: Iterable[tuple[str, Digest]]) -> set[str]:
        live: set[str] = set()
        for name, digest in roots:
            live |= self._needs(digest, name)
        for held_alone in self._held - live:  # a process still reads what a tag has moved from
            live |= self._needs_of_held(Digest.parse(held_alone))
        return live | self._held

    def _needs_of_held(self, digest: Digest) -> set[str]:
        """Return the digests that a leased document needs; none if it is a blob or unreadable."""
        with contextlib.suppress(AImageError, OSError):
            with self.layout.open(_content(str(digest))) as file:
                is_document = file.read(1) == b"{"
            return self._needs(digest, "") if is_document else set()
        return set()

    def _needs(self, digest: Digest, name: str) -> set[str]:
        """Return the digest of a document and of everything that it needs.

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
            with self.layout.open(_content(key)) as file, store_errors(self.layout.root):
                raw = file.read(LARGEST + 1) or b""
        except NotFoundError:
            return None
        if len(raw) > LARGEST:
            return b""  # larger than any manifest: the entry names a blob
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(
                f"{digest} in {name or 'index.json'} is damaged: nothing was removed",
                remedy="repair",
            )
        return raw

    def _read_config(self, key: str) -> bytes | None:
        """Return a config, verified or not; None if it is missing."""
        with contextlib.suppress(NotFoundError, OSError), self.layout.open(_content(key)) as file:
            raw = file.read(LARGEST + 1) or b""
            return raw if len(raw) <= LARGEST else b""
        return None

    def _evict(self, max_age: float | None, max_size: int | None, keep: Sequence[str]) -> set[str]:
        """Remove names from the first store, and return the removed names."""
        entries = [(name, root) for name, root in ImageLayout.entries(self.layout) if name]
        pinned = {name for name, _ in self.layout.pins.items()}
        free = [
            (self.layout.used(descriptor), name, descriptor)
            for name, descriptor in entries
            if _whole(name) is not None
            and not pinned & {name, _whole(name)}
            and str(descriptor.digest) not in self._held
            and not any(fnmatchcase(name, pattern) for pattern in keep)
        ]
        gone = {
            name: RemovedName(name, f"not used for {_long(self.now() - used)}")
            for used, name, _ in free
            if max_age is not None and self.now() - used > max_age
        }
        if max_size is not None:
            free = sorted((one for one in free if one[1] not in gone), key=lambda one: one[:2])
            for name in self._surplus(free, gone.keys(), max_size):
                gone[name] = RemovedName(name, "least recently used")
        meant = {name: root.digest for name, root in entries if name in gone}
        done = set(meant) if self.dry_run else self.layout.remove_names(meant)
        if self.dry_run:
            needed = (self._needs(digest, name) for name, digest in meant.items())
            self._unnamed = dict.fromkeys(chain.from_iterable(needed), self.now())
        self._done.forgotten = [gone[name] for name in gone if name in done]
        return done

    def _surplus(
        self, free: Iterable[tuple[float, str, Descriptor]], gone: Container[str], max_size: int
    ) -> Iterator[str]:
        """Yield names of ``free``, in order, until the content of the others fits."""
        needs = Counter(self._held)
        for name, digest in self._roots():
            if not name or name not in gone:
                needs.update(self._needs(digest, name))
        total = sum(self._sizes.get(digest, 0) for digest in needs)
        for _, name, descriptor in free:
            if total <= max_size:
                break
            yield name
            for needed in self._needs(descriptor.digest, name):
                needs[needed] -= 1
                total -= 0 if needs[needed] else self._sizes.get(needed, 0)

    def _sweep(self, unneeded: set[str]) -> None:
        """Remove blobs older than the grace period. The lock is held, except in a dry run."""
        now = self.now()
        latest = now - self.grace
        for digest in sorted(unneeded):
            algorithm, _, encoded = digest.partition(":")
            path = os.path.join(self.layout.root, "blobs", algorithm, encoded)
            with store_errors(self.layout.root), contextlib.suppress(FileNotFoundError):
                stored = known_time(os.stat(path).st_ctime, now)
                if self.grace and stored > max(latest, self._unnamed.get(digest, 0.0)):
                    self._done.young += 1
                    self._done.young_size += self._sizes[digest]
                    continue
                if not self.dry_run:
                    os.unlink(path)
                self._done.blobs += 1
                self._done.size += self._sizes[digest]


def _content(digest: str) -> Descriptor:
    return Descriptor("application/octet-stream", Digest.parse(digest), 0)


def _whole(name: str) -> str | None:
    """Return a name with its tag in canonical form, or None if it is not a reference."""
    with contextlib.suppress(AImageError):
        return index_name(Reference.parse(name))
    return None


def _long(seconds: float) -> str:
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
    can_lock = locks_work(root)
    for path in sorted(directory.glob("*")):
        is_anonymous = path.suffix != "" and can_lock  # no later ingest continues it
        with store_errors(root), contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if path.suffix == ".journal" or not stat.S_ISREG(status.st_mode):
                continue
            is_old = is_anonymous or known_time(status.st_mtime, time.time()) <= latest
            if is_old and _remove_idle(path, dry_run=dry_run):
                removed.append(status.st_blocks * 512)
    for journal in () if dry_run else sorted(directory.glob("*.journal")):
        if not journal.with_suffix("").exists():
            journal.unlink(missing_ok=True)
    return removed


def _remove_idle(path: Path, *, dry_run: bool) -> bool:
    """Remove an ingest if no process has it open; return whether it was idle."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return False  # another user's file
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if os.fstat(fd).st_ino != os.stat(path).st_ino:
            return False  # it was finished and started again
        if not dry_run:
            os.unlink(path)
        return True
    finally:
        os.close(fd)


def tidy(root: Path, latest: float) -> None:
    """Remove metadata of missing manifests, and temporary files from before ``latest``."""
    present = {name.partition(":")[2] for name, _ in blobs(root)}
    for kind in ("used", "listing", UNNAMED):
        for path in Path(check_own(root, kind)).glob("*"):
            if "." not in path.name and path.name not in present:
                with contextlib.suppress(OSError):
                    path.unlink()
    private = root / PRIVATE
    ours = [one for one in private.glob("[!i]*") if not one.is_symlink()]  # except ingests
    for path in chain(private.glob("*.*"), *(one.glob("*.*") for one in ours)):
        if _TEMPORARY.fullmatch(path.name) or path.name.startswith("damaged."):
            with contextlib.suppress(OSError):
                changed = path.lstat().st_ctime  # a damaged blob keeps its old mtime
                if known_time(changed, time.time()) < latest:
                    path.unlink()
