"""A plan carried out: hash every blob, store those that are new."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from clowder_aimage.content import Body, ContentStore, Lease
from clowder_aimage.content.parallel import StoppedError, in_parallel
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import ModelError, VerificationError
from clowder_aimage.importer.plan import Plan, PlannedLayer
from clowder_aimage.oci import Digest
from clowder_aimage.oci.digest import new_hasher

_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A layer in the store, and whether it was there before."""

    layer: Layer
    was_there: bool


OnWritten = Callable[[Written], None]


def write_layers(
    plan: Plan, store: ContentStore, lease: Lease, *, jobs: int, on_written: OnWritten
) -> list[Written]:
    """Store the plan's blobs, ``jobs`` at a time, and keep them by ``lease``.

    Each is hashed first: what the store has already is read once and not written.

    Raises:
        ModelError: a file changed while it was read.
        StoreError, NoSpaceError: the store cannot keep it.
    """
    stopped = threading.Event()

    written: dict[str, Written] = {}

    def one(planned: PlannedLayer) -> None:
        layer = planned.layer(_digest(planned, plan.algorithm, stopped))
        lease.add(layer.descriptor.digest)
        was_there = store.exists(layer.descriptor)
        if not was_there:
            try:
                store.push(layer.descriptor, _body(planned, stopped))
            except VerificationError:
                raise _changed(planned.path) from None
        written[planned.name] = Written(layer, was_there)
        on_written(written[planned.name])

    in_parallel([partial(one, planned) for planned in plan.layers], jobs, stopped.set)
    return [written[planned.name] for planned in plan.layers]


def _changed(path: Path) -> ModelError:
    return ModelError(
        f"{path} changed while it was read", hint="wait until it is written, then pack again"
    )


def _digest(planned: PlannedLayer, algorithm: str, stopped: threading.Event) -> Digest:
    hasher = new_hasher(algorithm)
    buffer = memoryview(bytearray(min(_CHUNK, planned.size + 1)))
    with _SpanReader(planned, stopped) as reader:
        while count := reader.readinto(buffer):
            hasher.update(buffer[:count])
    return Digest(algorithm, hasher.hexdigest())


def _body(planned: PlannedLayer, stopped: threading.Event) -> Body:
    def body(offset: int = 0, /) -> BinaryIO:
        return cast(BinaryIO, _SpanReader(planned, stopped, offset))

    return body


class _SpanReader(io.RawIOBase):
    """The planned prefix, then the span of the file, cut short when the user leaves."""

    def __init__(self, planned: PlannedLayer, stopped: threading.Event, offset: int = 0) -> None:
        self._planned = planned
        self._stopped = stopped
        self._prefix = planned.prefix[offset:]
        skip = max(0, offset - len(planned.prefix))
        self._left = planned.nbytes - skip
        with self._errors():
            self._file = planned.path.open("rb", buffering=0)
            self._file.seek(planned.offset + skip)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._stopped.is_set():
            raise StoppedError
        view = memoryview(buffer)
        if self._prefix:
            count = min(len(view), len(self._prefix))
            view[:count] = self._prefix[:count]
            self._prefix = self._prefix[count:]
            return count
        with self._errors():
            if not self._left:
                self._check_unchanged()
                return 0
            read = self._file.readinto(view[: self._left])
        if not read:
            raise _changed(self._planned.path)
        self._left -= read
        return read

    def _check_unchanged(self) -> None:
        """It must be the file whose header was read: another's bytes would fit it as well."""
        if os.fstat(self._file.fileno()).st_mtime_ns != self._planned.modified:
            raise _changed(self._planned.path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"cannot read {self._planned.path}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()
        super().close()
