"""The reconciler: performs the actions of a model's state machine and returns their outcomes.

It reads the store, resolves tags in the registry, pulls, and frees space. All decisions are made
in ``model_transition``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from copy import copy
from functools import partial

from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import StoppedError
from clowder_aimage.engine.backoff import TIME, again
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.engine.transfer_queue import DESIRED, PREFETCH
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, VerificationError
from clowder_aimage.http.background import run_in_daemon_thread
from clowder_aimage.layout.completeness import CompletenessCache
from clowder_aimage.node import model_transition as after
from clowder_aimage.node.model_state import (
    UNKNOWN,
    Action,
    Announce,
    Check,
    Event,
    Evict,
    ModelStatus,
    Work,
)
from clowder_aimage.node.model_transition import CRASHED, LOOK, Failure
from clowder_aimage.node.pinner import Pinner, SpecStore, check_model
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import resolve_changed, stored_name
from clowder_aimage.registry import ClientOptions

MAX_EACH, MAX_ALL = 8, 32  # concurrent requests: to one registry, and in total
_log = logging.getLogger("aimage.node")


class CrowdedError(Exception):
    """Too many requests to the registry are in progress."""


class RegistryLimiter:
    """Resolves tags in registries with a limited number of concurrent requests.

    An unresponsive registry occupies a few threads, not one for each tag, and none of another
    registry's.
    """

    def __init__(self, connection: ClientOptions) -> None:
        self._connection = connection
        self._each: dict[str | None, asyncio.Semaphore] = {}
        self._all = asyncio.Semaphore(MAX_ALL)

    async def ask(
        self, reference: Reference, known: Digest | None, timeout: float | None = None
    ) -> tuple[Descriptor, Descriptor] | None:
        """Resolve as ``resolve_changed``. Raises CrowdedError if queued for ``timeout`` seconds."""
        each = self._each.setdefault(reference.registry, asyncio.Semaphore(MAX_EACH))

        async def resolve() -> tuple[Descriptor, Descriptor] | None:
            try:
                return await run_in_daemon_thread(
                    lambda: resolve_changed(reference, self._connection, known)
                )
            finally:
                self._all.release()
                each.release()

        try:
            async with asyncio.timeout(timeout):
                await each.acquire()  # first: an unresponsive registry must not fill the total
                try:
                    await self._all.acquire()
                except BaseException:
                    each.release()
                    raise
        except TimeoutError:
            raise CrowdedError from None
        question = asyncio.ensure_future(resolve())
        question.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(question)  # the thread continues if the caller is cancelled


class Reconciler:
    """Reconciles one model at a time with its spec.

    ``relieve(count)`` evicts other models until ``count`` bytes are free; it blocks. ``clock`` is
    monotonic; ``chance`` returns a random number in [0, 1).
    """

    def __init__(
        self,
        service: Service,
        records: SpecStore,
        relieve: Callable[[int], object],
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._service, self._store = service, service.store
        self._clock, self._chance, self._relieve = clock, chance, relieve
        self._completeness = CompletenessCache(service.store, clock=clock, chance=chance)
        self._registries = RegistryLimiter(service.connection)
        self._pinner = Pinner(service.store, records)

    async def reconcile(self, model: ModelStatus) -> None:
        """Perform the actions due for a model. Raises only on internal errors of the node."""
        event: Event | None = await self._look(model)
        while event is not None:
            actions, event = model.apply(event, self._clock()), None
            for action in actions:
                if (event := await self._perform(model, action)) is not None:
                    break

    async def _perform(self, model: ModelStatus, action: Action) -> Event | None:
        """Perform an action; return the resulting event, if any."""
        try:
            match action:
                case Work.KEEP:
                    await run_locking(self._pinner.keep, model)
                case Work.MEASURE:
                    return partial(after.measured, free=await run_io(self._store.free))
                case Work.PULL:
                    return await self._pull(model)
                case Check():
                    return await self._check(model, action.known)
                case Evict():
                    await run_locking(self._relieve, action.room)
                case Announce():
                    self._service.events.record(action.kind, model=model.spec.name, **action.facts)
        except CrowdedError:
            return after.store_changed
        except StoppedError as error:
            return partial(after.stopped, reason=error.message)
        except AImageError as error:
            return await self._failed(model, error)
        return None

    async def _look(self, model: ModelStatus) -> Event:
        try:
            return await run_io(self._read, model)
        except AImageError as error:
            shown = _without_path(error).message
            if shown != model.state.reason:
                facts = {"model": model.spec.name, "reason": error.message}
                _log.warning("cannot read the store", extra=facts)
            return partial(after.unreadable, reason=shown)
        except Exception:
            model.apply(partial(after.unreadable, reason=CRASHED), self._clock())
            raise

    def _read(self, model: ModelStatus) -> Event:
        """Read the state of a model in the store.

        A complete model is not read again while the store's fingerprint is unchanged: otherwise
        each of hundreds of models would read the whole index and check all of its blobs.
        """
        spec, name = model.spec, model.state.name
        if model.state.phase == UNKNOWN and (known := self._pinner.stored(spec)):
            name = Reference.parse(known)
        check, version = partial(check_model, self._store, spec, name), (spec, name, model.version)
        found = self._completeness.find(spec.name, check, version)
        return partial(after.store_read, name=name, found=found)

    async def _check(self, model: ModelStatus, known: Digest | None) -> Event:
        """Resolve the tag in the registry; count the outcome for a model that is present."""
        reference, outcome = model.spec.reference, ""
        try:
            found = await self._registries.ask(reference, known, LOOK)
            is_same = found is None or found[1].digest == model.state.digest
            outcome = "unchanged" if is_same else "moved"
        except StoppedError:
            raise
        except AImageError as error:
            outcome = "failed" if again(error, 1, 0.0, 0.0).after == TIME else "refused"
            raise
        finally:
            if model.state.is_here and outcome:
                self._service.metrics.tag_checked(reference.registry or "", outcome)
        if found is None:
            return after.checked
        return partial(after.checked, root=found[0].digest, chosen=found[1].digest)

    async def _pull(self, model: ModelStatus) -> Event:
        spec, came, total = model.spec, False, 0
        try:
            await run_locking(self._pinner.remember, spec, model.state.name)
            with self._service.transfers.pull(
                spec.reference,
                components=spec.components,
                urgency=DESIRED if spec.priority >= 0 else PREFETCH,
                priority=spec.priority,
            ) as transfer:
                model.transfer = transfer
                model.handover.close()
                try:
                    root = await transfer.end()
                finally:
                    counts = (n for source, n in transfer.sources.items() if source != "cache")
                    came, total = any(counts), transfer.total
                    model.transfer = None
        except NoSpaceError as error:
            return await self._failed(model, error, needed=total, began=came)
        model.version += 1
        name = stored_name(spec.reference, root)
        found = await run_io(check_model, self._store, spec, name)
        sources, chance = dict(transfer.sources), self._chance()
        return partial(after.pulled, name=name, found=found, sources=sources, chance=chance)

    async def _failed(
        self, model: ModelStatus, error: AImageError, needed: int = 0, *, began: bool = False
    ) -> Event:
        free, root = 0, None
        if isinstance(error, NoSpaceError):
            free = await run_io(self._store.free)
        elif isinstance(error, VerificationError) and model.state.root is None:
            with contextlib.suppress(AImageError):
                found = await self._registries.ask(model.spec.reference, None)
                root = found[0].digest if found else None
        chance = self._chance()
        delay = again(error, model.state.attempts + 1, chance, model.spec.refresh).delay
        facts = {"model": model.spec.name, "reason": error.message, "again": delay}
        _log.warning("pull failed", extra=facts)
        event = Failure(_without_path(error), free, needed, began, root)
        return partial(after.failed, event=event, chance=chance)


def _without_path(error: AImageError) -> AImageError:
    """Return an error for the status, which callers read: messages about the store have paths."""
    if isinstance(error, StoreError):
        error = copy(error)
        error.message = "cannot access the store; see the node's log"
    return error
