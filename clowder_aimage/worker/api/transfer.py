"""Pulls and pushes under way: begun once, watched by all who asked for the same.

A transfer runs in a thread of its own. What it tells is noted there, and looked at from the event
loop every now and then: a copy has thousands of events a second, and nobody reads that many lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from clowder_aimage.content import Rate
from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.event import Event, OnEvent
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    ContentError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UsageError,
)
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import pull
from clowder_aimage.push import push
from clowder_aimage.worker.api.told import Credentials, connection_with
from clowder_aimage.worker.engine import BusyError, DeadlineError, Engine, StoppedError
from clowder_aimage.worker.error import ApiError
from clowder_aimage.worker.service import Service

EVERY = 0.1  # seconds between two looks at a transfer
MOST = 32  # transfers at once: each has threads and connections of its own
PULL, PUSH = "pull", "push"
_Work = Callable[["Transfer", OnEvent], Descriptor]
_Key = tuple[str, str, object]


@dataclass(slots=True)
class Blob:
    """How far a blob is. One that was there (``is_here``) did not move at all."""

    digest: Digest
    total: int
    completed: int = 0
    is_here: bool = False


class Transfer:
    """A pull or a push under way, or one that has ended. Whoever waits for it counts as a user;
    one that has no user and is not ``is_kept`` gives up, and what it has fetched stays."""

    def __init__(self, kind: str, reference: Reference, is_over: Callable[[], bool]) -> None:
        self.kind, self.reference = kind, reference
        self.is_kept = self.is_stopped = False
        self.users = 0
        self.total = 0
        self.result: asyncio.Future[Descriptor] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(_look)
        self._is_over = is_over
        self._blobs: dict[Digest, Blob] = {}
        self._lock = threading.Lock()

    @property
    def completed(self) -> int:
        """The bytes that are here."""
        return sum(blob.completed for blob in self.blobs())

    def blobs(self) -> list[Blob]:
        """All blobs that were spoken of, as they are now."""
        with self._lock:
            return [replace(blob) for blob in self._blobs.values()]

    def start(self, work: _Work) -> None:
        """Run ``work`` in a thread that does not keep the process alive."""
        loop = asyncio.get_running_loop()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(set_it, value)

        def run() -> None:
            try:
                root = work(self, self._hear)
            except BaseException as error:
                settle(self.result.set_exception, error)
            else:
                settle(self.result.set_result, root)

        threading.Thread(target=run, daemon=True, name=f"aimage-{self.kind}").start()

    def go_on(self) -> None:
        """Raise StoppedError where this is to be given up; asked in whatever thread is at it."""
        if self.is_stopped or self._is_over() or not (self.users or self.is_kept):
            self.is_stopped = True
            raise StoppedError(f"the {self.kind} of {self.reference} was given up")

    def _hear(self, event: Event) -> None:
        """Note an event, in whatever thread it comes."""
        if self.kind == PUSH:  # a pull may stop only between bytes of a blob: see _Gate
            self.go_on()
        with self._lock:
            self._note(event)

    def _note(self, event: Event) -> None:
        if event.kind == "plan":
            self.total = event.count
        if event.kind == "plan" or event.content is None:
            return
        content = event.content
        blob = self._blobs.setdefault(content.digest, Blob(content.digest, content.size))
        if event.kind == "progress":
            blob.completed = max(0, min(blob.total, blob.completed + event.count))
        elif event.kind == "skip":
            blob.completed, blob.is_here = blob.total, True
        elif event.kind == "done":
            blob.completed = blob.total

    async def watch(self) -> AsyncGenerator[Blob, None]:
        """Blobs whose state is another than was told, until the transfer ends.

        Raises:
            whatever ``pull`` or ``push`` raises; StoppedError: it was given up.
        """
        told: dict[Digest, int] = {}
        while True:
            is_done = self.result.done()  # before looking: what comes later is seen next time
            for blob in self.blobs():
                if told.get(blob.digest) != blob.completed:
                    told[blob.digest] = blob.completed
                    yield blob
            if is_done:
                break
            await asyncio.wait([self.result], timeout=EVERY)
        self.result.result()

    async def end(self) -> Descriptor:
        """What was moved. Raises as ``watch``."""
        return await asyncio.shield(self.result)


class _Gate(Rate):
    """Bytes of a pull pass here, as fast as they may; none does once the pull is given up.

    Where bytes pass, what came is kept for the next pull, and nothing is left locked.
    """

    def __init__(self, transfer: Transfer, limit: int) -> None:
        super().__init__(limit or 1.0)
        self._transfer, self._is_limited = transfer, limit > 0

    @property
    def burst(self) -> int:
        return super().burst if self._is_limited else CHUNK_SIZE

    def passed(self, count: int) -> None:
        self._transfer.go_on()
        if self._is_limited:
            super().passed(count)


class Transfers:
    """The transfers of one worker."""

    def __init__(self) -> None:
        self._running: dict[_Key, Transfer] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def of(self, reference: Reference) -> Transfer | None:
        """The pull of ``reference`` that is under way."""
        return next((one for one in self.pulls() if one.reference == reference), None)

    def pulls(self) -> list[Transfer]:
        """All pulls that are under way."""
        return [one for one in self._running.values() if one.kind == PULL and not one.is_stopped]

    @contextlib.contextmanager
    def pull(
        self, service: Service, reference: Reference, credentials: Credentials | None = None
    ) -> Iterator[Transfer]:
        """Take part in the pull of ``reference``; begin it where nobody has.

        Only those who show the same credentials share one: nobody fails with another's.

        Raises:
            StoppedError, BusyError: the worker is about to end; too many are under way.
            UsageError: the reference names no registry.
        """
        if reference.registry is None:
            raise UsageError(
                f"{reference} names no registry to pull from",
                hint=f"name one, such as registry.example.com/team/{reference}",
            )
        connection = connection_with(service.connection, reference, credentials)

        def work(transfer: Transfer, hear: OnEvent) -> Descriptor:
            gate = _Gate(transfer, connection.limit(reference.registry))
            return pull(reference, service.store, connection, on_event=hear, rate=gate)

        with self._joined(service, (PULL, str(reference), credentials), reference, work) as found:
            yield found

    @contextlib.contextmanager
    def push(self, service: Service, reference: Reference) -> Iterator[Transfer]:
        """Take part in the push of ``reference``. Raises as ``pull``."""

        def work(_: Transfer, hear: OnEvent) -> Descriptor:
            return push(service.store, reference, service.connection, on_event=hear)

        with self._joined(service, (PUSH, str(reference), None), reference, work) as found:
            yield found

    @contextlib.contextmanager
    def _joined(
        self, service: Service, key: _Key, reference: Reference, work: _Work
    ) -> Iterator[Transfer]:
        engine, found = service.engine, self._running.get(key)
        if engine.is_draining:
            raise StoppedError("the worker is about to end", hint="ask another one")
        if found is None or found.is_stopped:
            if len(self._running) >= MOST:
                raise BusyError(len(self._running), 5)
            found = Transfer(key[0], reference, lambda: engine.is_draining)
            self._running[key] = found
            found.result.add_done_callback(self._ended(service, key, found))
            found.users += 1
            found.start(work)
        else:
            found.users += 1
        try:
            yield found
        finally:
            found.users -= 1

    def _ended(
        self, service: Service, key: _Key, transfer: Transfer
    ) -> Callable[[asyncio.Future[Descriptor]], None]:
        def ended(result: asyncio.Future[Descriptor]) -> None:
            if self._running.get(key) is transfer:
                del self._running[key]
            error = result.exception()
            outcome = "done" if error is None else "stopped" if transfer.is_stopped else "failed"
            if transfer.kind == PULL:
                blobs = transfer.blobs()
                moved = sum(blob.completed for blob in blobs if not blob.is_here)
                service.metrics.pulls.labels(outcome).inc()
                service.metrics.pull_bytes.inc(moved)
            news = service.news.tell(
                transfer.kind, reference=str(transfer.reference), outcome=outcome
            )
            task = asyncio.ensure_future(news)
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

        return ended


_OF: WeakKeyDictionary[Engine, Transfers] = WeakKeyDictionary()


def transfers(service: Service) -> Transfers:
    """The transfers of a worker, which all of its interfaces share."""
    return _OF.setdefault(service.engine, Transfers())


def of_registry(error: AImageError) -> AImageError:
    """An error of a pull or push, told from one of this worker: 502 where the registry, or what it
    sent, is at fault."""
    own = (ApiError, BusyError, DeadlineError, StoppedError, UsageError, NotFoundError)
    if isinstance(error, (*own, StoreError, NoSpaceError)):
        return error
    if isinstance(error, AccessError | ContentError):
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        return ApiError(502, message, code="registry_failed")
    return error


def _look(result: asyncio.Future[Descriptor]) -> None:
    """Have an error count as seen, although nobody may be left who waits for it."""
    result.exception()
