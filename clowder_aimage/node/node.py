"""The node: keeps what it is told to keep, and says how that goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clowder_aimage.api.service import Service
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.layout.gc import Collection
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.disk_usage import Watermarks
from clowder_aimage.node.eviction import Evictor, indexed
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_status import FAILED, ModelStatus
from clowder_aimage.node.node_metric import NodeMetrics
from clowder_aimage.node.pinner import credentials
from clowder_aimage.node.reconciler import Reconciler
from clowder_aimage.node.spec_files import SpecFiles, SpecWatcher, read_directory
from clowder_aimage.node.spec_store import SpecStore
from clowder_aimage.oci import Reference

TICK = 0.5  # seconds between two looks at what is due
STILL = 3.0  # seconds that the desired state must be the same before anything goes for it
STILL_EMPTY = 10.0  # the same where all of it would go
PAUSE = 30.0  # seconds after a mistake of ours
_log = logging.getLogger("aimage.node")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """``desired`` is the directory of the desired state; ``may_prune`` whether what is wanted no
    more goes; ``collect``: seconds between two collections of what nothing needs."""

    desired: Path | None = None
    may_prune: bool = False
    marks: Watermarks = field(default_factory=Watermarks)
    collect: float = 600.0


@dataclass(slots=True)
class NodeConfig:
    """How the last reading of the desired state went. An invalid one changes nothing."""

    state: SpecFiles = field(default_factory=SpecFiles)
    error: str | None = None
    loaded: datetime | None = None
    is_known: bool = True  # by what is said now, or was said before the node began


class Node:
    """Reconciles the store of ``service`` with the desired state. All of it runs on one event
    loop; what takes long is in threads."""

    def __init__(
        self,
        service: Service,
        options: NodeOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        identity: str = "",
    ) -> None:
        self.id = identity or secrets.token_hex(16)
        self.options, self.metrics = options, NodeMetrics(service.metrics.registry)
        self.config = NodeConfig()
        self.records = SpecStore(service.store.root, options.desired)
        self._service, self._clock = service, clock
        self._tended: dict[str, ModelStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watcher = SpecWatcher(options.desired) if options.desired else None
        self._cleaner = Evictor(service, options.marks, self.metrics)
        self._tender = Reconciler(
            service.store,
            service.connection,
            service.transfers,
            service.news,
            clock=clock,
            chance=chance,
            relieve=self._relieve,
            records=self.records,
            metrics=service.metrics,
        )
        self._known = credentials(service.connection)
        self._collected = self._followed = -math.inf
        self._cleaning: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._followed_last: SpecFiles | None = None
        if options.desired is None:
            self.metrics.config.set(1)

    # -- what is asked

    def takes_part(self, reference: Reference) -> bool:
        """Whether this node has to do with a repository at all."""
        return any(
            one.want.reference.name == reference.name for one in list(self._tended.values())
        ) or any(pull.reference.name == reference.name for pull in self._service.transfers.pulls())

    def missing(self) -> list[str]:
        """The wanted models that are not here in full."""
        return [one.want.name for one in self._tended.values() if not one.is_here]

    def against(self) -> list[dict[str, str]]:
        """Why requests should go elsewhere, but for models that are missing."""
        return [] if self.config.is_known else [{"reason": "desired state never read"}]

    def warnings(self) -> list[str]:
        """What is wrong, though requests may be sent here."""
        found = []
        if self.config.error is not None:
            found.append("desired state invalid")
        if self.options.desired and not self.config.error and not self._tended:
            found.append("nothing is wanted")
        return found

    def models(self) -> list[dict[str, Any]]:
        """Each wanted model, for the status."""
        now = self._clock()
        found = sorted(self._tended.values(), key=lambda one: _order(one.want))
        return [one.to_json(now) for one in found]

    def disk(self) -> dict[str, Any]:
        """How full the disk is. Reads the file system."""
        marks = self.options.marks
        found = marks.measure(self._service.store.root)
        used = round(found.part, 4)
        return {
            "total": found.total,
            "free": found.free,
            "used": used,
            "high": marks.high,
            "low": marks.low,
        }

    def desired(self) -> dict[str, Any]:
        """Where the desired state comes from, and whether it is valid."""
        config, directory = self.config, self.options.desired
        return {
            "directory": str(directory) if directory else None,
            "valid": config.error is None,
            "error": config.error,
            "loaded": config.loaded.isoformat(timespec="seconds") if config.loaded else None,
            "files": len(config.state.files),
        }

    def spare(self, call: Callable[[], object]) -> None:
        """``call`` lets go of what is kept for others: where space is short, that goes first."""
        self._cleaner.spare = call

    # -- what is told

    def retry(self, name: str | None = None) -> bool:
        """Try again now what failed, or waits; whether there is such a model."""
        found = [one for one in self._tended.values() if name is None or is_of(name, one.want)]
        for one in found:
            one.begin_anew()
        self.wake()
        return bool(found)

    def look_again(self) -> None:
        """Something may have gone from the store: see what is there."""
        for one in self._tended.values():
            one.look_anew()
        self.wake()

    def wake(self, *, reload: bool = False) -> None:
        """Look at everything at once; ``reload``: read the desired state again."""
        if reload and self._watcher and self.options.desired:
            self._watcher = SpecWatcher(self.options.desired)
        self._woken.set()

    # -- the loop

    async def begin(self) -> None:
        """Learn what is wanted: before that nobody knows whether it is here."""
        self._service.news.attach()
        self._followed = self._clock()
        await self._read()

    async def run(self) -> None:
        """Reconcile until it is cancelled."""
        try:
            while True:
                try:
                    await self.turn()
                except Exception:
                    _log.exception("a turn of the node failed")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK):
                        await self._woken.wait()
                self._woken.clear()
        finally:
            tasks = [*self._tasks.values(), *([self._cleaning] if self._cleaning else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in self._tended.values():
                one.end()

    async def turn(self) -> None:
        """One look at everything that may have changed, or is due."""
        await self._read()
        now = self._clock()
        for one in sorted(self._tended.values(), key=lambda one: _order(one.want)):
            if one.due <= now and one.want.name not in self._tasks:
                self._begin(one)
        await self._look_at_credentials()
        if self._cleaning is None or self._cleaning.done():
            self._cleaning = asyncio.create_task(self._clean(now))
        self._measure()

    async def _read(self) -> None:
        """Read the desired state where it may have changed."""
        if self._watcher is not None and await asyncio.to_thread(self._watcher.changed):
            await self._load()
        if self._followed_last is not self.config.state:
            self._followed_last = self.config.state
            await self._follow({want.name: want for want in self.config.state.specs})

    async def _load(self) -> None:
        directory, config = self.options.desired, self.config
        assert directory is not None
        try:
            config.state = await asyncio.to_thread(read_directory, directory)
        except AImageError as error:
            self._followed = self._clock()
            config.error = error.message
            if config.loaded is None:
                last = await asyncio.to_thread(self.records.last, directory)
                config.state, config.is_known = SpecFiles(last or ()), last is not None
            self.metrics.config.set(0)
            _log.error("the desired state stays as it was", extra={"reason": error.message})
            await self._service.news.tell("desired", valid=False, reason=error.message)
            return
        config.error, config.loaded, config.is_known = None, datetime.now(UTC), True
        with contextlib.suppress(AImageError):  # a store that is only read
            await asyncio.to_thread(self.records.put_last, directory, config.state.specs)
        self.metrics.config.set(1)
        self.metrics.config_at.set(time.time())
        models = len(config.state.specs)
        _log.info("desired state", extra={"models": models, "files": len(config.state.files)})
        await self._service.news.tell("desired", valid=True, models=models)

    async def _follow(self, wants: dict[str, ModelSpec]) -> None:
        """Tend what is new, let go of what is gone; what has changed is looked at now."""
        if wants != {name: one.want for name, one in self._tended.items()}:
            self._followed = self._clock()
        for name in [name for name in self._tended if name not in wants]:
            gone = self._tended.pop(name)
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
            await asyncio.to_thread(gone.end)
        for name, want in wants.items():
            one = self._tended.get(name)
            if one is None:
                self._tended[name] = ModelStatus(want, want.reference)
            elif one.want != want:
                if (task := self._tasks.pop(name, None)) is not None:
                    task.cancel()
                one.want = want
                one.begin_anew()
            else:
                one.want = want  # from another file

    def _begin(self, one: ModelStatus) -> None:
        name = one.want.name
        task = asyncio.create_task(self._tender.tend(one))
        self._tasks[name] = task

        def ended(task: asyncio.Task[None]) -> None:
            if self._tasks.get(name) is task:
                del self._tasks[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a model cannot be tended", extra={"model": name}, exc_info=error)
                one.turn(FAILED, "the node failed; its log says at what")
                one.due = self._clock() + PAUSE

        task.add_done_callback(ended)

    async def _look_at_credentials(self) -> None:
        """Who was refused is tried again when the files with credentials are others."""
        now = await asyncio.to_thread(credentials, self._service.connection)
        if now == self._known:
            return
        self._known = now
        for one in self._tended.values():
            if one.again is not None and one.again.code == "unauthorized":
                one.begin_anew()

    # -- what goes

    async def _clean(self, now: float) -> None:
        """Let go of what is unwanted, see that the disk is not full, collect now and then."""
        wanted = {index_name(one.name) for one in self._tended.values()}
        # a file that is half written may be valid, and a directory may be mounted late
        is_still = now - self._followed >= (STILL if wanted else STILL_EMPTY)
        try:
            if self.options.may_prune and is_still and self._is_sure:
                await self._cleaner.prune(wanted, self.records)
            await asyncio.to_thread(self._cleaner.mind_the_disk, self._kept)
            if now - self._collected >= self.options.collect:
                self._collected = now
                await asyncio.to_thread(self._cleaner.collect, "interval", self.options.collect)
        except AImageError as error:
            _log.warning("nothing was collected", extra={"reason": error.message})

    @property
    def _is_sure(self) -> bool:
        """Whether it is known what is wanted."""
        return self.config.error is None

    def _kept(self) -> set[str]:
        """The names that lack of space does not take: what is wanted, and what was, unless it may
        be pruned anyway. In a thread."""
        wanted = {index_name(one.name) for one in list(self._tended.values())}
        wanted |= set(indexed(self.records.others()))
        may_go = self.options.may_prune and self._is_sure
        return wanted if may_go else wanted | set(indexed(self.records.ours()))

    def _relieve(self, needed: int) -> Collection | None:
        """Make room for a pull that had none. In a thread."""
        return self._cleaner.make_room(needed, self._kept)

    # -- what is counted

    def _measure(self) -> None:
        metrics, tended = self.metrics, list(self._tended.values())
        metrics.wanted.set(len(tended))
        metrics.missing.set(sum(not one.is_here for one in tended))
        metrics.drifted.set(sum(one.drift is not None for one in tended))
        failed = Counter(one.again.code for one in tended if one.again and one.is_troubled)
        for labels in list(metrics.failed._metrics):
            if labels[0] not in failed:
                metrics.failed.remove(*labels)
        for code, count in failed.items():
            metrics.failed.labels(code).set(count)


def is_of(name: str, want: ModelSpec) -> bool:
    """Whether a client means a want by ``name``: the tag may be left out, and oci:// may be there,
    as in Clowder's API."""
    try:
        reference = Reference.parse(name.removeprefix("oci://"))
    except UsageError:
        return False
    digests = {reference.digest, want.reference.digest} - {None}
    return len(digests) < 2 and index_name(reference) == index_name(want.reference)


def _order(want: ModelSpec) -> tuple[int, str]:
    return (-want.priority, want.name)
