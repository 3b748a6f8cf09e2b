"""Collection: what no name needs is removed, in two phases.

Marking reads every manifest that is named, leased or listed, without a lock. Sweeping holds the
collection's lock, which no new lease can be taken under, looks once more at names and leases, and
removes what was found unneeded and is older than the grace period. The grace period is for other
tools: they write blobs before they name them, and know no lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from clowder_aimage.errors import AImageError, NotFoundError, VerificationError
from clowder_aimage.layout.fault import store_errors
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.lease import COLLECTION, leased
from clowder_aimage.layout.lock import PRIVATE, flock, held
from clowder_aimage.oci import Descriptor, Digest, Reference

GRACE = 3600.0  # seconds that an unnamed blob is left for whoever is about to name it
STALE = 7 * 86400.0  # seconds after which nobody will go on with a broken-off download
_LARGEST = 64 * 1024 * 1024  # bytes of a document that is read to see what it needs
_MAX_DEPTH = 100  # for the stack; far more than can be pulled
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_CONFIG = re.compile(rb'"config"\s*:\s*\{[^{}]*\}')
_TEMPORARY = re.compile(r".*\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A name that was let go, and why."""

    name: str
    reason: str


@dataclass(slots=True)
class Collection:
    """What was removed, or would be; sizes in bytes. ``young`` is what the grace period keeps,
    ``dangling`` are names whose manifest is not there."""

    forgotten: list[Forgotten] = field(default_factory=list)
    blobs: int = 0
    size: int = 0
    partials: int = 0
    partial_size: int = 0
    young: int = 0
    young_size: int = 0
    left_size: int = 0
    dangling: list[str] = field(default_factory=list)


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
        self._known: dict[str, tuple[str, ...]] = {}  # what a document needs, itself included
        self._interned: dict[bytes, str] = {}
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
        entries = list(self._layout.entries())
        held_now = {str(digest) for digest in leased(self._layout.root, remove=False)}
        sizes = dict(self._blobs())
        entries = self._forget(entries, held_now, sizes, max_age, max_size, keep)
        live = self._live(entries, held_now)
        unneeded = {digest for digest in sizes if digest not in live}
        if self._dry_run:
            self._sweep(unneeded, sizes)
        elif self._layout.root.is_dir():
            with held(self._layout.root, COLLECTION):
                now_held = {str(digest) for digest in leased(self._layout.root, remove=True)}
                unneeded -= self._live(self._layout.entries(), now_held)
                self._sweep(unneeded, sizes)
            self._tidy()
        self._partials()
        self._done.left_size = sum(sizes.values()) - self._done.size
        return self._done

    # -- what is needed

    def _live(self, entries: Iterable[tuple[str, Descriptor]], held_now: set[str]) -> set[str]:
        live = set(held_now)
        for name, descriptor in entries:
            needed = self._closure(descriptor.digest, name)
            live.update(needed)
        return live

    def _closure(self, digest: Digest, name: str, depth: int = 0) -> tuple[str, ...]:
        """A document and all that it mentions: rather too much than too little."""
        key = str(digest)
        if key not in self._known:
            self._known[key] = (key,)  # also what it is to itself, if it should say so
            raw = self._read(digest, name, depth)
            found = {key, *self._mentioned(raw)}
            for child in _documents(raw) if depth < _MAX_DEPTH else ():
                found.update(self._closure(child, name, depth + 1))
            for config in _CONFIG.findall(raw):  # it says what compressed layers unpack to
                for mentioned in _DIGEST.findall(config):
                    found.update(self._mentioned(self._peek(mentioned.decode())))
            self._known[key] = tuple(found)
        return self._known[key]

    def _mentioned(self, raw: bytes) -> Iterator[str]:
        if b"\\u" in raw:  # somebody spells plain letters in a roundabout way
            with contextlib.suppress(ValueError, RecursionError):
                raw = json.dumps(json.loads(raw)).encode()
        for found in _DIGEST.findall(raw):
            yield self._interned.setdefault(found, found.decode())

    def _read(self, digest: Digest, name: str, depth: int) -> bytes:
        content = Descriptor("application/octet-stream", digest, 0)
        try:
            path = self._layout.path(content)
        except NotFoundError:
            if not depth and name:
                self._done.dangling.append(name)
            return b""
        with store_errors(self._layout.root), path.open("rb", buffering=0) as file:
            raw = file.read(_LARGEST + 1) or b""
        if len(raw) > _LARGEST:
            return b""  # no manifest is as large: an entry that names a blob
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(
                f"{digest}, which {name or 'index.json'} names, is damaged: nothing was collected",
                hint="mend it first: aimage verify --repair",
            )
        return raw

    def _peek(self, digest: str) -> bytes:
        """A config, as far as it is one."""
        content = Descriptor("application/octet-stream", Digest.parse(digest), 0)
        with contextlib.suppress(NotFoundError, OSError):
            path = self._layout.path(content)
            if path.stat().st_size <= _LARGEST:
                return path.read_bytes()
        return b""

    def _blobs(self) -> Iterator[tuple[str, int]]:
        """All that is called like a blob, and its size."""
        for algorithm in ("sha256", "sha512"):
            directory = os.path.join(self._layout.root, "blobs", algorithm)
            with store_errors(self._layout.root), contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(directory):
                    with contextlib.suppress(AImageError, FileNotFoundError):
                        digest = str(Digest.parse(f"{algorithm}:{entry.name}"))
                        if entry.is_file(follow_symlinks=False):
                            yield digest, entry.stat(follow_symlinks=False).st_size

    # -- names

    def _forget(
        self,
        entries: list[tuple[str, Descriptor]],
        held_now: set[str],
        sizes: dict[str, int],
        max_age: float | None,
        max_size: int | None,
        keep: Sequence[str],
    ) -> list[tuple[str, Descriptor]]:
        """What is left of the entries."""
        if max_age is None and max_size is None:
            return entries
        pinned = {name for name, _ in self._layout.pins.items()}
        free = [
            (self._layout.used(descriptor), name, descriptor)
            for name, descriptor in entries
            if name
            and name not in pinned
            and str(descriptor.digest) not in held_now
            and not any(fnmatchcase(name, pattern) for pattern in keep)
        ]
        gone: set[str] = set()
        for used, name, descriptor in free:
            age = self._now() - used
            if max_age is not None and age > max_age and self._let_go(name, descriptor):
                self._done.forgotten.append(Forgotten(name, f"not used for {_long(age)}"))
                gone.add(name)
        if max_size is not None:
            left = [(name, descriptor) for name, descriptor in entries if name not in gone]
            needs = Counter(held_now)
            for name, descriptor in left:
                needs.update(self._closure(descriptor.digest, name))
            total = sum(sizes.get(digest, 0) for digest in needs)
            for _, name, descriptor in sorted(free, key=lambda one: one[:2]):
                if total <= max_size:
                    break
                if name in gone or not self._let_go(name, descriptor):
                    continue
                gone.add(name)
                self._done.forgotten.append(Forgotten(name, "the least recently used"))
                for digest in self._closure(descriptor.digest, name):
                    needs[digest] -= 1
                    if not needs[digest]:
                        total -= sizes.get(digest, 0)
        return [(name, descriptor) for name, descriptor in entries if name not in gone]

    def _let_go(self, name: str, descriptor: Descriptor) -> bool:
        """Forget a name, if it still means what it did."""
        with contextlib.suppress(AImageError):
            reference = Reference.parse(name)
            if not self._dry_run:
                self._layout.untag(reference, descriptor.digest)
            return True
        return False

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

    def _partials(self) -> None:
        """Remove what downloads left that nobody will go on with."""
        directory = self._layout.root / PRIVATE / "ingest"
        latest = self._now() - self._stale
        for path in sorted(directory.glob("*")):
            if path.suffix == ".journal":
                continue
            is_anonymous = path.suffix != ""  # nobody can find it again
            with store_errors(self._layout.root), contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if not is_anonymous and status.st_mtime > latest:
                    continue
                if self._remove_idle(path):
                    self._done.partials += 1
                    self._done.partial_size += status.st_blocks * 512
        if not self._dry_run:
            for journal in sorted(directory.glob("*.journal")):
                if not journal.with_suffix("").exists():
                    journal.unlink(missing_ok=True)

    def _remove_idle(self, path: os.PathLike[str]) -> bool:
        """Remove an ingest that no process has open; whether that is so."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except PermissionError:
            return False  # another user's
        try:
            flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            if os.fstat(fd).st_ino != os.stat(path).st_ino:
                return False  # it was finished, and begun anew
            if not self._dry_run:
                os.unlink(path)
            return True
        finally:
            os.close(fd)

    def _tidy(self) -> None:
        """Remove facts about manifests that are gone, and files that a killed process left."""
        private = self._layout.root / PRIVATE
        for kind in ("used", "listing"):
            for path in (private / kind).glob("*"):
                blobs = self._layout.root / "blobs"
                if not any((blobs / kind / path.name).exists() for kind in ("sha256", "sha512")):
                    with contextlib.suppress(OSError):
                        path.unlink()
        latest = self._now() - max(self._grace, 60.0)
        for path in [*private.glob("*.*"), *(private / "names").glob("*.*")]:
            if _TEMPORARY.fullmatch(path.name) or path.name.startswith("damaged."):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < latest:
                        path.unlink()


def _documents(raw: bytes) -> Iterator[Digest]:
    """The manifests in an index, whatever they call themselves."""
    if b'"manifests"' not in raw and b"\\u" not in raw:
        return
    try:
        children = json.loads(raw).get("manifests") or ()
    except (ValueError, RecursionError, AttributeError):
        return
    for child in children if isinstance(children, list) else ():
        with contextlib.suppress(AImageError, KeyError, TypeError):
            yield Digest.parse(child["digest"])


def _long(seconds: float) -> str:
    """How long that is, in one unit."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} seconds"
