"""The copy of an artifact from a store to another."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from functools import partial
from typing import BinaryIO, cast

from clowder_aimage.content.copy_event import CopyEvent, OnEvent, ignore
from clowder_aimage.content.copy_plan import CopyPlan, plan_copy
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.rate import Rate
from clowder_aimage.content.store import (
    DEFAULT_CONCURRENCY,
    CopyOptions,
    Source,
    Target,
    bytes_body,
)
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.oci import Descriptor, Reference


def copy(
    source: Source,
    reference: Reference,
    target: Target,
    target_reference: Reference | None = None,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
    is_named: bool = True,
    plan: CopyPlan | None = None,
) -> Descriptor:
    """Copy what ``reference`` names, children before parents, and name it in ``target``.

    Blobs that the target has are skipped, the others move ``concurrency`` at a time. The first
    failure stops the rest. The root is pushed and named last, so a target never names content
    that is not there in full. A ``plan`` that was made before is followed as it is; when it leaves
    blobs out, the caller gives the name.

    Returns:
        The descriptor of the root manifest or index.

    Raises:
        ContentError: the bytes of the source differ from their descriptors.
        NoSpaceError: it would not fit; nothing was fetched.
        AccessError: it could not be read, or could not be kept.
    """
    plan = plan or plan_copy(source, source.resolve(reference))
    on_event(CopyEvent("plan", plan.root, plan.size, len(plan.blobs)))
    with target.lease(*plan.digests):
        target.receive(source, plan.blobs, CopyOptions(concurrency, on_event, rate))
        *below, (root, document) = plan.documents
        for descriptor, child in below:
            if not target.exists(descriptor):
                target.push(descriptor, bytes_body(child.raw))
        name = (target_reference or reference) if is_named and not plan.left_out else None
        target.push(root, bytes_body(document.raw), name)
    return root


def push_blobs(
    source: Source, target: Target, blobs: Sequence[Descriptor], options: CopyOptions
) -> None:
    """Push the missing ``blobs`` to a target that takes each as one stream, several at a time."""
    stopped, on_event = threading.Event(), options.on_event

    def push(blob: Descriptor) -> None:
        if stopped.is_set():
            raise ParallelStoppedError
        if target.exists(blob):
            on_event(CopyEvent("skip", blob, blob.size))
            return
        on_event(CopyEvent("start", blob, blob.size))
        target.push(blob, _WatchedBody(source, blob, stopped, on_event))
        on_event(CopyEvent("done", blob, blob.size))

    in_parallel([partial(push, blob) for blob in blobs], options.concurrency, stopped.set)


class _WatchedBody:
    """The body of a blob, counted as it is read, and cut short when the copy stops."""

    def __init__(
        self, source: Source, blob: Descriptor, stopped: threading.Event, on_event: OnEvent
    ) -> None:
        self._source = source
        self._blob = blob
        self._stopped = stopped
        self._on_event = on_event
        self._count = 0

    def __call__(self, offset: int = 0, /) -> BinaryIO:
        self._progress(offset - self._count)  # a retry goes back to an earlier offset
        source = self._source.open(self._blob, offset)
        kind = _WatchedFile if isinstance(source, io.FileIO) else _WatchedReader
        return cast(BinaryIO, kind(source, self))

    def _progress(self, count: int) -> None:
        if count:
            self._count += count
            self._on_event(CopyEvent("progress", self._blob, count))

    def passed(self, count: int) -> None:
        if self._stopped.is_set():
            raise ParallelStoppedError
        self._progress(count)


class _WatchedReader(io.RawIOBase):
    def __init__(self, source: BinaryIO, body: _WatchedBody) -> None:
        self._source = source
        self._body = body

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = readinto(self._source, buffer)
        self._body.passed(count)
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class _WatchedFile(_WatchedReader):
    """A file, which the kernel may send by itself; ``sent`` then counts its bytes."""

    def fileno(self) -> int:
        return self._source.fileno()

    def sent(self, count: int) -> None:
        self._body.passed(count)
