"""The node: keeps the desired models in the store and reports their status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError, StoreError, UsageError
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.eviction import Evictor, map_index_names
from clowder_aimage.node.metric import NodeMetrics
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_state import PRESENT, Event, ModelStatus
from clowder_aimage.node.model_transition import (
    apply_crash,
    apply_retry,
    apply_spec,
    apply_store_change,
)
from clowder_aimage.node.pinner import SpecStore, list_credential_files
from clowder_aimage.node.reconciler import Reconciler
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.node.spec_files import SpecFiles, compute_fingerprint, read_directory
from clowder_aimage.oci import Reference

# Seconds between two turns.
TICK = 0.5
# Seconds that the desired state must be unchanged before names are pruned.
SETTLE = 3.0
# The same if all names would be pruned.
SETTLE_EMPTY = 10.0
_log = logging.getLogger("aimage.node")


class Node:
    """Reconciles the store of ``service`` with the desired state.

    Everything runs on one event loop; blocking calls run in threads. ``files`` is the last valid
    desired state.
    """

    def __init__(
        self,
        service: Service,
        settings: NodeSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.id, self.metrics = secrets.token_hex(16), NodeMetrics(service.metrics.registry)
        self.files = SpecFiles()
        self._service, self._settings, self._clock = service, settings, clock
        self._records = SpecStore(service.store.root, settings.desired)
        # Of the last read of the desired state.
        self._error: str | None = None
        self._loaded: datetime | None = None
        # Read from the files, or recorded by an earlier run.
        self._is_known = True
        # The fingerprint of the files.
        self._fingerprint: object = None
        self._models: dict[str, ModelStatus] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.evictor = Evictor(service, settings.marks, self.metrics)
        relieve = partial(self.evictor.make_room, keep=self._list_protected)
        self._reconciler = Reconciler(service, self._records, relieve, clock=clock, chance=chance)
        self._credentials = list_credential_files(service.connection)
        self._collected = self._followed_at = -math.inf
        self._followed: SpecFiles | None = None
        self._eviction: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        if settings.desired is None:
            self.metrics.config.set(1)

    def takes_part(self, reference: Reference) -> bool:
        """Return True if this node keeps or pulls any model of a repository."""
        specified = (model.spec.reference for model in list(self._models.values()))
        pulled = (pull.reference for pull in self._service.transfers.list_pulls())
        return any(desired.name == reference.name for desired in (*specified, *pulled))

    def list_missing(self) -> list[str]:
        """Return the names of the models that are not fully present."""
        return [model.spec.name for model in self._models.values() if not model.state.is_here]

    def list_reasons(self) -> list[dict[str, str]]:
        """Return the reasons, other than missing models, why the node is not ready."""
        return [] if self._is_known else [{"reason": "desired state never read"}]

    def list_warnings(self) -> list[str]:
        """Return the problems that do not affect readiness."""
        if self._error is not None:
            return ["desired state invalid"]
        return ["no desired models"] if self._settings.desired and not self._models else []

    def describe_models(self) -> list[dict[str, Any]]:
        """Return the status of each model by descending priority."""
        timestamp = self._clock()
        return [model.to_json(timestamp) for model in _sort_models(self._models.values())]

    def describe_disk(self) -> dict[str, Any]:
        """Return the usage of the disk, without numbers if it cannot be measured. Blocks."""
        marks, figures = self.evictor.marks, dict[str, Any].fromkeys(("total", "free", "used"))
        with contextlib.suppress(StoreError, OSError):
            if (reading := marks.measure(self._service.store.root)) is not None:
                used = round(reading.used_fraction, 4)
                figures = {"total": reading.total, "free": reading.free, "used": used}
        return figures | {"high": marks.high, "low": marks.low}

    def describe_desired(self) -> dict[str, Any]:
        """Return the source and the validity of the desired state."""
        directory = self._settings.desired
        return {
            "directory": str(directory) if directory else None,
            "valid": self._error is None,
            "error": self._error,
            "loaded": self._loaded.isoformat(timespec="seconds") if self._loaded else None,
            "files": len(self.files.files),
        }

    def retry(self, name: str | None = None) -> bool:
        """Retry failed and waiting models at once; return False if no model matches ``name``."""
        models = [
            model for model in self._models.values() if name is None or is_of(name, model.spec)
        ]
        self._signal(models, apply_retry)
        return bool(models)

    def look_again(self) -> None:
        """Schedule a read of the store for each model, as content may have been removed."""
        self._signal(list(self._models.values()), apply_store_change)

    def wake(self, *, reload: bool = False) -> None:
        """Start the next turn at once; with ``reload``, reload the desired state."""
        if reload:
            self._fingerprint = None
        self._woken.set()

    def _signal(self, models: list[ModelStatus], event: Event) -> None:
        for model in models:
            model.version += 1
            model.apply(event, self._clock())
        self.wake()

    async def begin(self) -> None:
        """Read the desired state for the first time; the node is not ready before."""
        self._followed_at = self._clock()
        await self._read()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                try:
                    await self.turn()
                except Exception:
                    _log.exception("reconciliation failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            # One that ends just now may begin others
            while tasks := {*self._tasks.values(), *([self._eviction] if self._eviction else [])}:
                self._eviction = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for model in self._models.values():
                model.close()

    async def turn(self) -> None:
        """Start all actions that are due."""
        await self._read()
        timestamp = self._clock()
        due = [
            model
            for name, model in self._models.items()
            if model.state.due <= timestamp and name not in self._tasks
        ]
        present = [model for model in due if model.state.phase == PRESENT]
        if present:
            self._begin_looks(present)
        for model in _sort_models(model for model in due if model.state.phase != PRESENT):
            self._begin(model)
        await self._check_credentials()
        if self._eviction is None or self._eviction.done():
            self._eviction = asyncio.create_task(self._evict(timestamp))
        self._measure()

    async def _read(self) -> None:
        if (directory := self._settings.desired) is not None:
            current = await run_io(compute_fingerprint, directory)
            if current != self._fingerprint:
                self._fingerprint = (
                    # Before the files are read, to detect changes during the read.
                    current
                )
                await self._load(directory)
        if self._followed is not self.files:
            self._followed = self.files
            await self._follow({spec.name: spec for spec in self.files.specs})

    async def _load(self, directory: Path) -> None:
        try:
            self.files = await run_io(read_directory, directory)
        except AImageError as error:
            self._followed_at = self._clock()
            self._error = error.message
            if self._loaded is None:
                recorded = await run_io(self._records.read_last, directory)
                self.files, self._is_known = SpecFiles(recorded or ()), recorded is not None
            self.metrics.config.set(0)
            _log.error("desired state rejected; last one kept", extra={"reason": error.message})
            self._service.events.record("desired", valid=False, reason=error.message)
            return
        self._error, self._loaded, self._is_known = None, datetime.now(UTC), True
        # A read-only store.
        with contextlib.suppress(AImageError):
            await run_locking(self._records.put_last, directory, self.files.specs)
        self.metrics.config.set(1)
        self.metrics.config_at.set(time.time())
        models = len(self.files.specs)
        _log.info("desired state loaded", extra={"models": models, "files": len(self.files.files)})
        self._service.events.record("desired", valid=True, models=models)

    async def _follow(self, specs: dict[str, ModelSpec]) -> None:
        """Add and remove models; models with a changed spec are due at once."""
        if specs != {name: model.spec for name, model in self._models.items()}:
            self._followed_at = self._clock()
        for name in [name for name in self._models if name not in specs]:
            self._cancel(name)
            model = self._models.pop(name)
            model.handover.close()
            await run_locking(model.close)
        for name, spec in specs.items():
            model = self._models.setdefault(name, ModelStatus(spec))
            if model.spec != spec:
                if model.spec.components != spec.components:
                    model.handover.close()
                elif model.transfer is not None:
                    model.handover.enter_context(model.transfer.using())
                self._cancel(name)
            model.apply(partial(apply_spec, spec=spec), self._clock())

    def _cancel(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    def _begin_looks(self, models: list[ModelStatus]) -> None:
        """Look at models that are present, and reconcile those that need it."""
        task = asyncio.create_task(self._reconciler.look_at(models))
        self._tasks |= dict.fromkeys((model.spec.name for model in models), task)

        def finish(task: asyncio.Task[list[ModelStatus]]) -> None:
            for model in models:
                if self._tasks.get(model.spec.name) is task:
                    del self._tasks[model.spec.name]
            if task.cancelled():
                return
            rest = models
            if (error := task.exception()) is not None:
                _log.error("cannot look at the store", exc_info=error)
            else:
                rest = task.result()
            names = {model.spec.name for model in rest}
            for model in _sort_models(models):
                name = model.spec.name
                if name not in names:
                    model.handover.close()
                elif self._models.get(name) is model and name not in self._tasks:
                    self._begin(model)

        task.add_done_callback(finish)

    def _begin(self, model: ModelStatus) -> None:
        name = model.spec.name
        task = asyncio.create_task(self._reconciler.reconcile(model))
        self._tasks[name] = task

        def finish(task: asyncio.Task[None]) -> None:
            if self._tasks.get(name) is task:
                del self._tasks[name]
                model.handover.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("cannot reconcile a model", extra={"model": name}, exc_info=error)
                model.apply(apply_crash, self._clock())

        task.add_done_callback(finish)

    async def _check_credentials(self) -> None:
        """Retry unauthorized models after the credential files have changed."""
        current = await run_io(list_credential_files, self._service.connection)
        if current == self._credentials:
            return
        self._credentials = current
        failures = ((model, model.state.failure) for model in self._models.values())
        unauthorized = [
            model for model, failure in failures if failure and failure.code == "unauthorized"
        ]
        self._signal(unauthorized, apply_retry)

    async def _evict(self, timestamp: float) -> None:
        # a file may be incomplete yet valid, and a directory may be mounted late
        is_settled = timestamp - self._followed_at >= (SETTLE if self._models else SETTLE_EMPTY)
        try:
            if self._may_prune and is_settled:
                await self.evictor.prune(self._list_names(), self._records)
            await run_locking(self.evictor.check_disk, self._list_protected)
            if timestamp - self._collected >= (period := self._settings.collect):
                self._collected = timestamp
                await run_locking(self.evictor.collect, "interval", period)
        except AImageError as error:
            _log.warning("garbage collection failed", extra={"reason": error.message})

    @property
    def _may_prune(self) -> bool:
        return self._settings.prune and self._error is None

    def _list_names(self) -> set[str]:
        return {index_name(model.state.name) for model in list(self._models.values())}

    def _list_protected(self) -> set[str]:
        """Return the names that are never evicted. Blocks.

        These are the models of this node and of other nodes, and the former models of this node
        unless they can be pruned.
        """
        names = self._list_names() | set(map_index_names(self._records.read_other_names()))
        return (
            names
            if self._may_prune
            else names | set(map_index_names(self._records.read_own_names()))
        )

    def _measure(self) -> None:
        metrics, states = self.metrics, [model.state for model in self._models.values()]
        metrics.wanted.set(len(states))
        metrics.missing.set(sum(not state.is_here for state in states))
        metrics.drifted.set(sum(state.drift is not None for state in states))
        metrics.set_failed(
            Counter(state.failure.code for state in states if state.failure and state.is_troubled)
        )


def _sort_models(models: Iterable[ModelStatus]) -> list[ModelStatus]:
    """Return models by descending priority, and then by their names."""
    return sorted(models, key=lambda model: (-model.spec.priority, model.spec.name))


def is_of(name: str, spec: ModelSpec) -> bool:
    """Return True if the client's ``name`` refers to a spec.

    ``name`` may lack the tag, or begin with ``oci://`` as in Clowder's API.
    """
    try:
        reference = Reference.parse(name.removeprefix("oci://"))
    except UsageError:
        return False
    digests = {reference.digest, spec.reference.digest} - {None}
    return len(digests) < 2 and index_name(reference) == index_name(spec.reference)
