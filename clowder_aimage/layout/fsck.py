"""Whether what lies in a layout is what its names say: every byte read and hashed again."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.graph import GraphNode, walk
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.store import Lease
from clowder_aimage.content.verified_reader import check
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    ContentError,
    FormatError,
    VerificationError,
)
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.lock import open_regular
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, parse_document


@dataclass(frozen=True, slots=True)
class FsckProblem:
    """``kind`` is ``missing``, ``damaged``, ``unreadable`` (we may not, or the like),
    ``document`` (a manifest that means nothing), ``foreign`` (a file that no blob is called
    like) or ``writable`` (blobs that may be changed); ``names`` are the names that need it."""

    kind: str
    what: str
    message: str
    names: tuple[str, ...] = ()


@dataclass(slots=True)
class FsckReport:
    """What was read, and what was wrong."""

    blobs: int = 0
    size: int = 0
    problems: list[FsckProblem] = field(default_factory=list)
    writable: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class _Wanted:
    """A blob to read, and who needs it."""

    content: Descriptor
    names: set[str] = field(default_factory=set)
    may_lack: bool = True  # a layer, which an AImage that is here in part may lack


class Fsck:
    """One look through ``layout``: what ``roots`` need, kept by ``lease``, or everything in it.

    Blobs are hashed ``threads`` at a time; ``on_read`` hears how many bytes were read.
    """

    def __init__(
        self,
        layout: ImageLayout,
        roots: Iterable[tuple[str, Descriptor]],
        lease: Lease,
        *,
        threads: int = os.cpu_count() or 1,
        on_plan: Callable[[int], None] = lambda size: None,
        on_read: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._layout = layout
        self._roots = list(roots)
        self._lease = lease
        self._threads = threads
        self._on_plan = on_plan
        self._on_read = on_read
        self._partial = {
            name for name, root in self._roots if root.annotations.get(mediatype.PARTIAL) == "true"
        }
        self._wanted: dict[Digest, _Wanted] = {}
        self._report = FsckReport()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, *, loose: bool = False) -> FsckReport:
        """Look at all of it; with ``loose`` also at blobs that no name needs, and at what else
        lies among them."""
        for name, descriptor in self._roots:
            self._add_root(name, descriptor)
        if loose:
            for content in self._loose():
                self._wanted.setdefault(content.digest, _Wanted(content))
        wanted = sorted(self._wanted.values(), key=lambda one: -one.content.size)
        self._on_plan(sum(one.content.size for one in wanted))
        calls = [partial(self._blob, one) for one in wanted]
        in_parallel(calls, self._threads, self._stopped.set)
        if writable := self._report.writable:
            message = (
                f"{len(writable)} of the blobs have write permission: nothing should change them"
            )
            self._problem("writable", self._layout.root / "blobs", message)
        self._report.problems.sort(key=lambda problem: (problem.kind, problem.what))
        return self._report

    def _problem(self, kind: str, what: object, message: str, names: Iterable[str] = ()) -> None:
        with self._lock:
            problem = FsckProblem(kind, str(what), message, tuple(sorted(names)))
            self._report.problems.append(problem)

    def _add_root(self, name: str, root: Descriptor) -> None:
        """Note what a name needs, and what is wrong with its documents."""

        def read(content: Descriptor) -> Manifest | Index | None:
            if content.media_type not in mediatype.DOCUMENTS:
                return None
            try:
                return parse_document(self._layout.read(content), content.media_type)
            except (AccessError, VerificationError):
                return None  # found when it is hashed
            except FormatError as error:
                self._problem("document", content.digest, error.message, [name])
                return None

        try:
            for node in walk(read, root):
                content, listed_in = node.content, node.parent and node.parent.document
                if isinstance(listed_in, Manifest):
                    is_layer = content.digest != listed_in.config.digest
                    self._want(name, content, may_lack=is_layer)
                elif listed_in is None or not self._is_unfetched(node):
                    self._want(name, content, may_lack=False)
        except FormatError as error:
            self._problem("document", root.digest, error.message, [name])

    def _is_unfetched(self, node: GraphNode) -> bool:
        """Return whether a document of an index is a variant that was not fetched."""
        return node.is_document and not os.path.lexists(self._layout.place(node.content))

    def _want(self, name: str, content: Descriptor, *, may_lack: bool) -> None:
        self._lease.add(content.digest)
        known = self._wanted.setdefault(content.digest, _Wanted(content))
        known.names.add(name)
        known.may_lack = known.may_lack and may_lack
        if known.content.size != content.size:
            message = f"it is said to have {known.content.size} bytes, and {content.size}"
            self._problem("document", content.digest, message, [name])

    def _loose(self) -> Iterator[Descriptor]:
        """The blobs in the directories, by their names; other files there are noted."""
        for directory in sorted((self._layout.root / "blobs").glob("*")):
            for path in sorted(directory.iterdir()) if directory.is_dir() else [directory]:
                try:
                    digest = Digest.parse(f"{directory.name}:{path.name}")
                except AImageError:
                    digest = None
                if not os.path.lexists(path):
                    continue  # it has just been collected
                if digest is None or path.is_symlink() or not path.is_file():
                    self._problem("foreign", path, f"no blob is called {path}")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        yield Descriptor("application/octet-stream", digest, path.stat().st_size)

    def _blob(self, wanted: _Wanted) -> None:
        content = wanted.content
        try:
            encoded, size = self._hash(Path(self._layout.place(content)), content)
            check(content, size, encoded)
        except FileNotFoundError:
            if not wanted.names or (wanted.may_lack and wanted.names <= self._partial):
                return  # of an AImage that is here in part; or it was loose, and is collected now
            message = f"{content.digest} is not there ({content.size} bytes)"
            self._problem("missing", content.digest, message, wanted.names)
        except ContentError as error:
            self._problem("damaged", content.digest, error.message, wanted.names)
        except OSError as error:
            kind = "damaged" if error.errno == errno.EIO else "unreadable"
            message = f"{content.digest} cannot be read: {error.strerror or error}"
            self._problem(kind, content.digest, message, wanted.names)
        else:
            with self._lock:
                self._report.blobs += 1
                self._report.size += content.size

    def _hash(self, path: Path, content: Descriptor) -> tuple[str, int]:
        hasher, size = content.digest.hasher(), 0
        buffer = new_buffer()
        with open(open_regular(path), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            # one that has other names is another program's, too, whose mode is its own affair
            if status.st_mode & 0o222 and status.st_nlink == 1:
                with self._lock:
                    self._report.writable.append(path)
            while count := file.readinto(buffer):
                if self._stopped.is_set():
                    raise ParallelStoppedError
                hasher.update(buffer[:count])
                size += count
                self._on_read(count)
        return hasher.hexdigest(), size
