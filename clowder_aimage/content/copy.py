"""The one way to move an artifact from a store to another."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Sequence
from functools import partial
from typing import BinaryIO, cast

from clowder_aimage.content.copy_event import CopyEvent, OnEvent, ignore
from clowder_aimage.content.copy_plan import CopyPlan, check_space, plan_copy
from clowder_aimage.content.fetch import BlobDownload
from clowder_aimage.content.parallel import ParallelStoppedError, in_parallel
from clowder_aimage.content.rate import Rate
from clowder_aimage.content.store import ContentStore, Source, Target, bytes_body
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.oci import Descriptor, Reference

DEFAULT_CONCURRENCY = 8


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
    failure stops the rest. The root is pushed and named last, so a target never names what it
    does not have in full. A ``plan`` that was made before is followed as it is; what it leaves out
    is not moved, and then the name is the caller's to give.

    Returns:
        the descriptor of the root manifest or index.

    Raises:
        ContentError: what the source gave is not what it promised.
        NoSpaceError: it would not fit; nothing was fetched.
        AccessError: it could not be read, or could not be kept.
    """
    plan = plan or plan_copy(source, reference)
    on_event(CopyEvent("plan", plan.root, plan.size, len(plan.blobs)))
    with contextlib.ExitStack() as leases:
        if isinstance(target, ContentStore):
            check_space(plan.missing(target), target)
            leases.enter_context(target.lease(*plan.digests))
            missing = plan.missing(target)  # from now on it stays as it is
            for blob in set(plan.blobs).difference(missing):
                on_event(CopyEvent("skip", blob, blob.size))
            with target.batch():
                BlobDownload(
                    source, target, missing, connections=concurrency, on_event=on_event, rate=rate
                ).run()
        else:
            _push_blobs(source, target, plan.blobs, concurrency, on_event)
        *below, (root, document) = plan.documents
        for descriptor, child in below:
            if not target.exists(descriptor):
                target.push(descriptor, bytes_body(child.raw))
        name = (target_reference or reference) if is_named and not plan.left_out else None
        target.push(root, bytes_body(document.raw), name)
    return root


def _push_blobs(
    source: Source,
    target: Target,
    blobs: Sequence[Descriptor],
    concurrency: int,
    on_event: OnEvent,
) -> None:
    """Blobs to a target that takes each as one stream, several side by side."""
    stopped = threading.Event()

    def one(blob: Descriptor) -> None:
        if stopped.is_set():
            raise ParallelStoppedError
        if target.exists(blob):
            on_event(CopyEvent("skip", blob, blob.size))
            return
        on_event(CopyEvent("start", blob, blob.size))
        target.push(blob, _Watch(source, blob, stopped, on_event))
        on_event(CopyEvent("done", blob, blob.size))

    in_parallel([partial(one, blob) for blob in blobs], concurrency, stopped.set)


class _Watch:
    """A blob's body, counted as it passes and cut short when the copy stops."""

    def __init__(
        self, source: Source, blob: Descriptor, stopped: threading.Event, on_event: OnEvent
    ) -> None:
        self._source = source
        self._blob = blob
        self._stopped = stopped
        self._on_event = on_event
        self._passed = 0

    def __call__(self, offset: int = 0, /) -> BinaryIO:
        self._count(offset - self._passed)  # a retry begins again: progress must say so
        source = self._source.open(self._blob, offset)
        kind = _WatchedFile if isinstance(source, io.FileIO) else _WatchedReader
        return cast(BinaryIO, kind(source, self))

    def _count(self, count: int) -> None:
        if count:
            self._passed += count
            self._on_event(CopyEvent("progress", self._blob, count))

    def passed(self, count: int) -> None:
        if self._stopped.is_set():
            raise ParallelStoppedError
        self._count(count)


class _WatchedReader(io.RawIOBase):
    def __init__(self, source: BinaryIO, watch: _Watch) -> None:
        self._source = source
        self._watch = watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = readinto(self._source, buffer)
        self._watch.passed(count)
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class _WatchedFile(_WatchedReader):
    """One that the kernel may send by itself, and is told how far."""

    def fileno(self) -> int:
        return self._source.fileno()

    def sent(self, count: int) -> None:
        self._watch.passed(count)
