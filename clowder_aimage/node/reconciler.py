"""The reconciler: performs the actions of a model's state machine and returns their outcomes.

It reads the store, resolves tags in the registry, pulls, and frees space. All decisions are made
in ``model_transition``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import StoppedError
from clowder_aimage.engine.backoff import TIME, compute_backoff
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.engine.transfer_queue import DESIRED, PREFETCH
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, VerificationError
from clowder_aimage.http.background import run_in_daemon_thread
from clowder_aimage.layout.completeness import CompletenessCache
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.node import model_transition as transition
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
from clowder_aimage.pull import resolve_changed, resolve_stored_name
from clowder_aimage.registry import ClientOptions

# Concurrent requests: to one registry, and in total.
MAX_EACH, MAX_ALL = 8, 32
# Seconds between two reads of the store's fingerprint, which hundreds of models look at
_INTERVAL = 0.25
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
        self._by_registry: dict[str | None, asyncio.Semaphore] = {}
        self._total = asyncio.Semaphore(MAX_ALL)

    async def ask(
        self, reference: Reference, last_digest: Digest | None, timeout: float | None = None
    ) -> tuple[Descriptor, Descriptor] | None:
        """Resolve as ``resolve_changed``. Raises CrowdedError if queued for ``timeout`` seconds."""
        slots = self._by_registry.setdefault(reference.registry, asyncio.Semaphore(MAX_EACH))

        async def resolve() -> tuple[Descriptor, Descriptor] | None:
            try:
                return await run_in_daemon_thread(
                    lambda: resolve_changed(reference, self._connection, last_digest)
                )
            finally:
                self._total.release()
                slots.release()

        try:
            async with asyncio.timeout(timeout):
                # First: an unresponsive registry must not fill the total.
                await slots.acquire()
                try:
                    await self._total.acquire()
                except BaseException:
                    slots.release()
                    raise
        except TimeoutError:
            raise CrowdedError from None
        question = asyncio.ensure_future(resolve())
        question.add_done_callback(lambda done: done.cancelled() or done.exception())
        # The thread continues if the caller is cancelled.
        return await asyncio.shield(question)


class Reconciler:
    """Reconciles one model at a time with its spec.

    ``relieve(count)`` evicts other models until ``count`` bytes are free; it blocks, and returns
    what the rest may wait for, if that becomes free without a change. ``clock`` is monotonic;
    ``chance`` returns a random number in [0, 1).
    """

    def __init__(
        self,
        service: Service,
        records: SpecStore,
        relieve: Callable[[int], str],
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._service, self._store = service, service.store
        self._clock, self._chance, self._relieve = clock, chance, relieve
        self._completeness = CompletenessCache(
            service.store, clock=clock, chance=chance, interval=_INTERVAL
        )
        self._refreshing = asyncio.Lock()
        self._registries = RegistryLimiter(service.connection)
        self._pinner = Pinner(service.store, records)

    async def look_at(self, models: Sequence[ModelStatus]) -> list[ModelStatus]:
        """Look at models that are present; return those that need to be reconciled.

        In an unchanged store that takes a thread for all of them, and no task for each.
        """
        await self._refresh()
        settled = [model for model in models if self._settle(model)]
        unused = [model for model in settled if not self._pinner.is_used(model)]
        if unused:
            await run_io(self._pinner.record_uses, unused)
        names = {model.spec.name for model in settled}
        return [model for model in models if model.spec.name not in names]

    def _settle(self, model: ModelStatus) -> bool:
        """Apply a look at a model if there is nothing to do for it; return False otherwise."""
        event = self._find_event(model)
        if event is None or not self._pinner.is_kept(model):
            return False
        before, timestamp = model.state, self._clock()
        after, actions = event(before, timestamp)
        is_same = (after.name, after.manifest) == (before.name, before.manifest)
        if actions != (Work.KEEP,) or not is_same:
            return False
        model.apply(lambda *_: (after, actions), timestamp)
        return True

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
                    await self._keep(model)
                case Work.MEASURE:
                    return partial(
                        transition.apply_measurement, free=await run_io(self._store.measure_free)
                    )
                case Work.PULL:
                    return await self._pull(model)
                case Check():
                    return await self._check(model, action.known)
                case Evict():
                    return await self._evict(action)
                case Announce():
                    self._service.events.record(action.kind, model=model.spec.name, **action.facts)
        except CrowdedError:
            return transition.apply_store_change
        except StoppedError as error:
            return partial(transition.apply_stop, reason=error.message)
        except AImageError as error:
            return await self._make_failure(model, error)
        return None

    async def _keep(self, model: ModelStatus) -> None:
        if not (self._pinner.is_kept(model) and self._pinner.is_used(model)):
            await run_locking(self._pinner.keep, model)

    async def _evict(self, action: Evict) -> Event | None:
        expected = await run_locking(self._relieve, action.room)
        if not expected or not action.may_wait:
            return None
        return partial(transition.apply_wait_for_space, expected=expected)

    async def _look(self, model: ModelStatus) -> Event:
        try:
            if (event := await self._find_recent(model)) is not None:
                return event
            return await run_io(self._read, model)
        except AImageError as error:
            shown = _without_path(error).message
            if shown != model.state.reason:
                facts = {"model": model.spec.name, "reason": error.message}
                _log.warning("cannot read the store", extra=facts)
            return partial(transition.apply_store_error, reason=shown)
        except Exception:
            model.apply(partial(transition.apply_store_error, reason=CRASHED), self._clock())
            raise

    async def _find_recent(self, model: ModelStatus) -> Event | None:
        """Return the state of a known model in an unchanged store.

        Most of hundreds of models that are looked at together need neither a thread nor a read.
        """
        if model.state.phase == UNKNOWN:
            return None
        await self._refresh()
        return self._find_event(model)

    def _find_event(self, model: ModelStatus) -> Event | None:
        """Return the state of a model as of the last refresh, if that is recent."""
        version = model.spec, model.state.name, model.version
        completeness = self._completeness.find_recent(model.spec.name, version)
        if completeness is None:
            return None
        return partial(
            transition.apply_store_read, name=model.state.name, completeness=completeness
        )

    async def _refresh(self) -> None:
        def refresh() -> None:
            self._pinner.read_stamp()
            self._completeness.refresh()

        async with self._refreshing:
            if not self._completeness.is_recent:
                await run_io(refresh)

    def _read(self, model: ModelStatus) -> Event:
        """Read the state of a model in the store.

        A complete model is not read again while the store's fingerprint is unchanged: otherwise
        each of hundreds of models would read the whole index and check all of its blobs.
        """
        spec, name = model.spec, model.state.name
        self._pinner.read_stamp()
        if model.state.phase == UNKNOWN and (recorded := self._pinner.get_stored_name(spec)):
            name = Reference.parse(recorded)
        completeness = self._completeness.find(
            spec.name,
            lambda snapshot: check_model(snapshot, spec, name),
            (spec, name, model.version),
        )
        return partial(transition.apply_store_read, name=name, completeness=completeness)

    async def _check(self, model: ModelStatus, last_digest: Digest | None) -> Event:
        """Resolve the tag in the registry; count the outcome for a model that is present."""
        reference, outcome = model.spec.reference, ""
        try:
            resolved = await self._registries.ask(reference, last_digest, LOOK)
            is_same = resolved is None or resolved[1].digest == model.state.digest
            outcome = "unchanged" if is_same else "moved"
        except StoppedError:
            raise
        except AImageError as error:
            outcome = "failed" if compute_backoff(error, 1, 0.0, 0.0).after == TIME else "refused"
            raise
        finally:
            if model.state.is_here and outcome:
                self._service.metrics.count_tag_check(reference.registry or "", outcome)
        if resolved is None:
            return transition.apply_check
        return partial(transition.apply_check, root=resolved[0].digest, chosen=resolved[1].digest)

    async def _pull(self, model: ModelStatus) -> Event:
        spec, has_begun, total = model.spec, False, 0
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
                    root = await transfer.wait()
                finally:
                    counts = (n for source, n in transfer.sources.items() if source != "cache")
                    has_begun, total = any(counts), transfer.total
                    model.transfer = None
        except NoSpaceError as error:
            return await self._make_failure(model, error, needed=total, began=has_begun)
        model.version += 1
        name = resolve_stored_name(spec.reference, root)
        completeness = await run_io(check_model, StoreSnapshot(self._store), spec, name)
        sources, chance = dict(transfer.sources), self._chance()
        return partial(
            transition.apply_pull,
            name=name,
            completeness=completeness,
            sources=sources,
            chance=chance,
        )

    async def _make_failure(
        self, model: ModelStatus, error: AImageError, needed: int = 0, *, began: bool = False
    ) -> Event:
        free, root = 0, None
        if isinstance(error, NoSpaceError):
            free = await run_io(self._store.measure_free)
        elif isinstance(error, VerificationError) and model.state.root is None:
            with contextlib.suppress(AImageError):
                resolved = await self._registries.ask(model.spec.reference, None)
                root = resolved[0].digest if resolved else None
        chance = self._chance()
        delay = compute_backoff(error, model.state.attempts + 1, chance, model.spec.refresh).delay
        facts: dict[str, object] = {"model": model.spec.name, "reason": error.message}
        facts["again"] = delay
        if places := error.facts.get("credentials"):
            facts["places"] = places
        _log.warning("pull failed", extra=facts)
        event = Failure(_without_path(error), free, needed, began, root)
        return partial(transition.apply_failure, event=event, chance=chance)


def _without_path(error: AImageError) -> AImageError:
    """Return an error without paths of this machine: clients read the message in the status."""
    if isinstance(error, StoreError):
        error = copy(error)
        error.message = "cannot access the store; see the node's log"
    return error
