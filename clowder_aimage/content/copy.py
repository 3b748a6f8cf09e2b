"""Copy an artifact from one store to another."""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.content.chunk import (
    MEASURING_TIME,
    ConcurrencyProbe,
    SmallConcurrency,
    is_large,
)
from clowder_aimage.content.copy_option import (
    DEFAULT_CONCURRENCY,
    CopyEvent,
    CopyOptions,
    OnEvent,
    Rate,
    ignore,
)
from clowder_aimage.content.graph import read_document, walk
from clowder_aimage.content.parallel import ParallelStoppedError, run_parallel
from clowder_aimage.content.store import FileStream, Reader, Source, Target, build_bytes_body
from clowder_aimage.content.verified_reader import SourceReader
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The documents to copy, children before parents, and the blobs, each listed once.

    ``left_out`` are blobs that the documents need but that are not copied; ``absent`` are manifests
    of an index that the source does not have. The order of the blobs is free unless ``is_ordered``.
    """

    documents: tuple[tuple[Descriptor, Manifest | Index], ...]
    blobs: tuple[Descriptor, ...]
    left_out: tuple[Descriptor, ...] = ()
    absent: tuple[Descriptor, ...] = ()
    is_ordered: bool = False

    @property
    def root(self) -> Descriptor:
        return self.documents[-1][0]

    @property
    def size(self) -> int:
        """The size of all blobs in bytes."""
        return sum(blob.size for blob in self.blobs)

    @property
    def digests(self) -> set[Digest]:
        """The digests of all documents and blobs, including left-out blobs."""
        contents = [descriptor for descriptor, _ in self.documents]
        return {content.digest for content in (*contents, *self.blobs, *self.left_out)}

    def list_missing(self, target: Source) -> list[Descriptor]:
        """Return the blobs that ``target`` does not have in full."""
        return [blob for blob in self.blobs if not target.exists(blob)]

    def list_missing_left_out(self, target: Source) -> list[Descriptor]:
        """Return the left-out blobs that ``target`` does not have."""
        return [blob for blob in self.left_out if not target.exists(blob)]

    def select(self, digests: Collection[Digest]) -> CopyPlan:
        """Return a plan for these blobs only; the others are left out."""
        chosen = tuple(blob for blob in self.blobs if blob.digest in digests)
        excluded = tuple(blob for blob in self.blobs if blob.digest not in digests)
        return replace(self, blobs=chosen, left_out=self.left_out + excluded)

    def put_first(self, digests: Collection[Digest]) -> CopyPlan:
        """Return the same plan with these blobs before the others."""
        blobs = sorted(self.blobs, key=lambda blob: blob.digest not in digests)
        return replace(self, blobs=tuple(blobs))

    def order_blobs(self, digests: Sequence[Digest]) -> CopyPlan:
        """Return the same plan with the blobs in this order, the others before them."""
        positions = {digest: index for index, digest in reversed([*enumerate(digests)])}
        blobs = sorted(self.blobs, key=lambda blob: positions.get(blob.digest, -1))
        return replace(self, blobs=tuple(blobs), is_ordered=True)


def plan_copy(
    source: Source,
    root: Descriptor,
    document: Manifest | Index | None = None,
    *,
    is_sparse: bool = False,
) -> CopyPlan:
    """Read ``root`` and all documents below it; ``document`` is the parsed root, if known.

    With ``is_sparse``, the source may lack manifests of an index.

    Raises NotFoundError, AccessError, or, for a document that is wrong or malformed,
    VerificationError and FormatError.
    """
    documents: list[tuple[Descriptor, Manifest | Index]] = []
    absent: dict[Digest, Descriptor] = {}
    # Two sizes for one digest are two blobs here: one of them will be refused.
    blobs: dict[tuple[Digest, int], Descriptor] = {}

    def read(content: Descriptor) -> Manifest | Index | None:
        if is_sparse and content is not root and not source.exists(content):
            absent[content.digest] = content
            return None
        return document if document and content is root else read_document(source, content)

    for node in walk(read, root, children_first=True):
        if node.document is not None:
            documents.append((node.content, node.document))
        elif not node.is_document:
            blobs[node.content.digest, node.content.size] = node.content
    # Largest first, so that the copy does not end with one large blob on its own.
    order = sorted(blobs.values(), key=lambda blob: (-blob.size, blob.digest))
    return CopyPlan(tuple(documents), tuple(order), absent=tuple(absent.values()))


def copy(
    source: Source,
    reference: Reference,
    target: Target,
    target_reference: Reference | None = None,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    max_concurrency: int = 0,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
    is_named: bool = True,
    plan: CopyPlan | None = None,
) -> Descriptor:
    """Copy the artifact ``reference``, children before parents, and tag it in ``target``.

    Blobs that the target has are skipped, the others are copied ``concurrency`` at a time, and over
    ``max_concurrency`` connections where a store fetches chunks and more of them are faster. The
    first failure stops the copy. The root is pushed and tagged last, so that no tag in the target
    refers to incomplete content. A given ``plan`` is followed unchanged; if it leaves blobs out,
    the caller sets the tag. Returns the descriptor of the root.

    Raises:
        ContentError: the bytes of the source differ from their descriptors.
        NoSpaceError: the content does not fit; nothing was fetched.
        AccessError: the content could not be read or stored.
    """
    plan = plan or plan_copy(source, source.resolve(reference))
    on_event(CopyEvent("plan", plan.root, plan.size, len(plan.blobs)))
    with target.lease(*plan.digests):
        options = CopyOptions(concurrency, on_event, rate, plan.is_ordered, max_concurrency)
        target.receive(source, plan.blobs, options)
        *children, (root, document) = plan.documents
        for descriptor, child in children:
            if not target.exists(descriptor):
                target.push(descriptor, build_bytes_body(child.raw))
        name = (target_reference or reference) if is_named and not plan.left_out else None
        target.push(root, build_bytes_body(document.raw), name)
    return root


def push_blobs(
    source: Source, target: Target, blobs: Sequence[Descriptor], options: CopyOptions
) -> None:
    """Push the missing ``blobs``, several at a time, to a target that accepts streams only."""
    _BlobPush(source, target, blobs, options).run()


class _BlobPush:
    """Pushes of blobs over some connections, fewer where more do not help."""

    def __init__(
        self, source: Source, target: Target, blobs: Sequence[Descriptor], options: CopyOptions
    ) -> None:
        self._source, self._target = source, target
        self._pending, self._on_listener = deque(blobs), options.on_event
        self._stopped = threading.Event()
        self._connections = min(options.concurrency, len(blobs))
        limit, cores = max(1, self._connections), os.cpu_count() or 1
        self._small, self._large = SmallConcurrency(limit, cores), ConcurrencyProbe(limit, cores)
        # Connections that push a blob.
        self._active = 0
        # Guards all fields; connections that are not needed wait for it.
        self._needed = threading.Condition()

    def run(self) -> None:
        """Push all blobs. Raises the error of the first connection that fails."""
        run_parallel([self._run_connection] * self._connections, self._connections, self._stop)

    def _stop(self) -> None:
        with self._needed:
            self._stopped.set()
            self._needed.notify_all()

    def _run_connection(self) -> None:
        while (blob := self._take()) is not None:
            try:
                self._push(blob)
            finally:
                with self._needed:
                    self._active -= 1

    def _take(self) -> Descriptor | None:
        """Wait until the next blob needs this connection; return None at the end."""
        with self._needed:
            while True:
                if self._stopped.is_set():
                    raise ParallelStoppedError
                if not self._pending or not self._is_unneeded(self._pending[0]):
                    break
                is_measured = self._small.may_grow and not is_large(self._pending[0])
                self._needed.wait(MEASURING_TIME if is_measured else None)
            if not self._pending:
                return None
            blob = self._pending.popleft()
            self._active += 1
            # Blobs of the other kind use other connections
            if not self._pending or is_large(self._pending[0]) != is_large(blob):
                self._needed.notify_all()
            return blob

    def _is_unneeded(self, blob: Descriptor) -> bool:
        """Return True if another connection would not speed up the push of a blob."""
        if is_large(blob):
            return self._active >= self._large.value
        if self._small.may_grow and self._small.record(time.monotonic(), time.process_time()):
            self._needed.notify_all()
        return self._active >= self._small.value

    def _on_event(self, event: CopyEvent) -> None:
        """Report an event, and measure the speed of large blobs."""
        self._on_listener(event)
        is_measured = event.kind == "progress" and not self._large.settled
        if is_measured and event.content is not None and is_large(event.content):
            with self._needed:
                before = self._large.value
                self._large.record(event.count, time.monotonic(), time.process_time())
                if self._large.value > before:
                    self._needed.notify_all()

    def _push(self, blob: Descriptor) -> None:
        if not self._target.lacks(blob):
            self._on_event(CopyEvent("skip", blob, blob.size))
            return
        self._on_event(CopyEvent("start", blob, blob.size))
        body = _WatchedBody(self._source, blob, self._stopped, self._on_event)
        self._target.push(blob, body)
        self._on_event(CopyEvent("done", blob, blob.size))


class _WatchedBody:
    """A body of a blob that reports its progress and ends when the copy stops."""

    def __init__(
        self, source: Source, blob: Descriptor, stopped: threading.Event, on_event: OnEvent
    ) -> None:
        self._source, self._blob = source, blob
        self._stopped, self._on_event = stopped, on_event
        self._count = 0

    def __call__(self, offset: int = 0, /) -> Reader:
        # A retry returns to an earlier offset: the progress is taken back.
        self._report_progress(offset - self._count)
        source = self._source.open(self._blob, offset)
        kind = _WatchedFile if isinstance(source, io.FileIO) else _WatchedReader
        return kind(source, self)

    def _report_progress(self, count: int) -> None:
        if count:
            self._count += count
            self._on_event(CopyEvent("progress", self._blob, count))

    def advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise ParallelStoppedError
        self._report_progress(count)


class _WatchedReader(SourceReader):
    def __init__(self, source: Reader, body: _WatchedBody) -> None:
        super().__init__(source)
        self._body = body

    def _fill(self, view: memoryview) -> int:
        count = self._source.readinto(view)
        self._body.advance(count)
        return count


class _WatchedFile(_WatchedReader, FileStream):
    """A file that the kernel may send."""

    _source: io.FileIO

    def fileno(self) -> int:
        return self._source.fileno()

    def record_sent(self, count: int) -> None:
        self._body.advance(count)
