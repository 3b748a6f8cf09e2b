"""Check a layout by reading and hashing every byte."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.graph import walk
from clowder_aimage.content.parallel import ParallelStoppedError, run_parallel
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
    """A problem with a digest or a path (``what``); ``names`` are the names that need it.

    ``kind`` is ``missing``, ``damaged``, ``unreadable`` (for example no permission), ``document``
    (a malformed manifest), ``foreign`` (a file not named like a blob) or ``writable`` (blobs with
    write permission).
    """

    kind: str
    what: str
    message: str
    names: tuple[str, ...] = ()


@dataclass(slots=True)
class FsckReport:
    """The number and size of intact blobs, and the problems."""

    blobs: int = 0
    size: int = 0
    problems: list[FsckProblem] = field(default_factory=list)
    writable: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class _BlobCheck:
    """A blob to read, and the names that need it."""

    content: Descriptor
    names: set[str] = field(default_factory=set)
    # True for layers of partial AImages, and for unnamed blobs.
    is_optional: bool = True


@dataclass(slots=True)
class Fsck:
    """A check of ``layout``: the content of ``roots``, protected by ``lease``, or everything in it.

    ``on_plan`` is called with the number of bytes to read, ``on_read`` with the bytes read.
    """

    layout: ImageLayout
    roots: Sequence[tuple[str, Descriptor]]
    lease: Lease
    on_plan: Callable[[int], None] = lambda _: None
    on_read: Callable[[int], None] = lambda _: None
    _checks: dict[Digest, _BlobCheck] = field(init=False, default_factory=dict)
    _report: FsckReport = field(init=False, default_factory=FsckReport)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _stopped: threading.Event = field(init=False, default_factory=threading.Event)

    def run(self, *, loose: bool = False) -> FsckReport:
        """Run the check; ``loose`` includes unneeded blobs and foreign files."""
        for name, descriptor in self.roots:
            self._add_root(name, descriptor)
        if loose:
            for content in self._find_loose():
                self._checks.setdefault(content.digest, _BlobCheck(content))
        # Largest first, so that the check does not end with one large blob on its own.
        checks = sorted(self._checks.values(), key=lambda blob_check: -blob_check.content.size)
        self.on_plan(sum(blob_check.content.size for blob_check in checks))
        calls = [partial(self._check_blob, blob_check) for blob_check in checks]
        run_parallel(calls, os.cpu_count() or 1, self._stopped.set)
        if count := len(self._report.writable):
            message = f"{count} of the blobs have write permission, expected read-only"
            self._report_problem("writable", self.layout.root / "blobs", message)
        self._report.problems.sort(key=lambda problem: (problem.kind, problem.what))
        return self._report

    def _report_problem(
        self, kind: str, subject: object, message: str, names: Iterable[str] = ()
    ) -> None:
        with self._lock:
            problem = FsckProblem(kind, str(subject), message, tuple(sorted(names)))
            self._report.problems.append(problem)

    def _add_root(self, name: str, root: Descriptor) -> None:
        def read(content: Descriptor) -> Manifest | Index | None:
            if content.media_type not in mediatype.DOCUMENTS:
                return None
            try:
                return parse_document(self.layout.read(content), content.media_type)
            except (AccessError, VerificationError):
                # Reported when its bytes are hashed.
                return None
            except FormatError as error:
                self._report_problem("document", content.digest, error.message, [name])
                return None

        is_partial = root.annotations.get(mediatype.PARTIAL) == "true"
        locate = self.layout.locate
        try:
            for node in walk(read, root):
                content, listed_in = node.content, node.parent and node.parent.document
                if isinstance(listed_in, Manifest):
                    is_layer = content.digest != listed_in.config.digest
                    self._add_content(name, content, is_optional=is_layer and is_partial)
                # Of an index, only the stored variants are needed.
                elif listed_in is None or not node.is_document or os.path.lexists(locate(content)):
                    self._add_content(name, content, is_optional=False)
        except FormatError as error:
            self._report_problem("document", root.digest, error.message, [name])

    def _add_content(self, name: str, content: Descriptor, *, is_optional: bool) -> None:
        self.lease.add(content.digest)
        blob_check = self._checks.setdefault(content.digest, _BlobCheck(content))
        blob_check.names.add(name)
        blob_check.is_optional = blob_check.is_optional and is_optional
        if blob_check.content.size != content.size:
            message = (
                f"descriptors have two sizes: {blob_check.content.size} and {content.size} bytes"
            )
            self._report_problem("document", content.digest, message, [name])

    def _find_loose(self) -> Iterator[Descriptor]:
        """Yield the blobs in the directories; report foreign files as problems."""
        for directory in sorted((self.layout.root / "blobs").glob("*")):
            for path in sorted(directory.iterdir()) if directory.is_dir() else [directory]:
                digest = None
                with contextlib.suppress(AImageError):
                    digest = Digest.parse(f"{directory.name}:{path.name}")
                if not os.path.lexists(path):
                    # It was collected in the meantime.
                    continue
                if digest is None or path.is_symlink() or not path.is_file():
                    self._report_problem("foreign", path, f"{path} is not a file named by a digest")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        yield Descriptor("application/octet-stream", digest, path.stat().st_size)

    def _check_blob(self, blob_check: _BlobCheck) -> None:
        content = blob_check.content
        try:
            encoded, size = self._hash(Path(self.layout.locate(content)), content)
            check(content, size, encoded)
        except FileNotFoundError:
            if blob_check.is_optional:
                return
            message = f"{content.digest} is missing ({content.size} bytes)"
            self._report_problem("missing", content.digest, message, blob_check.names)
        except ContentError as error:
            self._report_problem("damaged", content.digest, error.message, blob_check.names)
        except OSError as error:
            kind = "damaged" if error.errno == errno.EIO else "unreadable"
            message = f"cannot read {content.digest}: {error.strerror or error}"
            self._report_problem(kind, content.digest, message, blob_check.names)
        else:
            with self._lock:
                self._report.blobs += 1
                self._report.size += content.size

    def _hash(self, path: Path, content: Descriptor) -> tuple[str, int]:
        hasher, size = content.digest.create_hasher(), 0
        buffer = new_buffer()
        with open(open_regular(path), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            # A file with other hard links may be shared with a program that sets its mode.
            if status.st_mode & 0o222 and status.st_nlink == 1:
                self._report.writable.append(path)
            while count := file.readinto(buffer):
                if self._stopped.is_set():
                    raise ParallelStoppedError
                hasher.update(buffer[:count])
                size += count
                self.on_read(count)
        return hasher.hexdigest(), size
