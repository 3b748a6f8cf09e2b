"""A plan carried out: hash every blob, store those that are new."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import BinaryIO, cast

from clowder_aimage.content import Body, ContentStore
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import ModelError
from clowder_aimage.importer.plan import Plan, PlannedLayer
from clowder_aimage.oci import Digest

_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A layer in the store, and whether it was there before."""

    layer: Layer
    was_there: bool


OnWritten = Callable[[Written], None]


def write_layers(
    plan: Plan, store: ContentStore, *, jobs: int, on_written: OnWritten
) -> list[Written]:
    """Store the plan's blobs, ``jobs`` at a time.

    Each is hashed first: what the store has already is read once and not written.

    Raises:
        ModelError: a file changed while it was read.
        StoreError, NoSpaceError: the store cannot keep it.
    """
    stopped = threading.Event()

    def one(planned: PlannedLayer) -> Written:
        if stopped.is_set():
            raise ModelError("stopped")
        layer = planned.layer(_digest(planned))
        was_there = store.exists(layer.descriptor)
        if not was_there:
            store.push(layer.descriptor, _body(planned))
        written = Written(layer, was_there)
        on_written(written)
        return written

    with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="create") as pool:
        try:
            futures = [pool.submit(one, planned) for planned in plan.layers]
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done() and (error := future.exception()) is not None:
                    raise error
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _digest(planned: PlannedLayer) -> Digest:
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK, planned.size + 1)))
    with _SpanReader(planned) as reader:
        while count := reader.readinto(buffer):
            hasher.update(buffer[:count])
    return Digest("sha256", hasher.hexdigest())


def _body(planned: PlannedLayer) -> Body:
    def body(offset: int = 0, /) -> BinaryIO:
        return cast(BinaryIO, _SpanReader(planned, offset))

    return body


class _SpanReader(io.RawIOBase):
    """The planned prefix, then the span of the file."""

    def __init__(self, planned: PlannedLayer, offset: int = 0) -> None:
        self._prefix = planned.prefix[offset:]
        skip = max(0, offset - len(planned.prefix))
        self._left = planned.nbytes - skip
        self._path = planned.path
        self._file = planned.path.open("rb", buffering=0)
        self._file.seek(planned.offset + skip)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)
        if self._prefix:
            count = min(len(view), len(self._prefix))
            view[:count] = self._prefix[:count]
            self._prefix = self._prefix[count:]
            return count
        if not self._left:
            return 0
        read = self._file.readinto(view[: self._left])
        if not read:
            raise ModelError(f"{self._path} became shorter while it was read")
        self._left -= read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
