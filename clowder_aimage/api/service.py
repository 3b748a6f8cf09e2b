"""The service behind every route of a worker, and its readiness for requests."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.settings import ServerSettings, Settings
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, CompletenessCache, check_completeness
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG
from clowder_aimage.registry import ClientOptions

BY_NODE = "node"  # whose pins the node itself checks: it may need a part alone


class NodeState(Protocol):
    """The node's part of the readiness of its server."""

    def missing(self) -> Sequence[str]:
        """Return the models that are to be here and are not."""

    def against(self) -> list[dict[str, str]]:
        """Return other reasons to send requests elsewhere."""

    def warnings(self) -> Sequence[str]:
        """Return what is wrong although requests are accepted."""


class Readiness:
    """The readiness of one store. Threads may share it."""

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._completeness = CompletenessCache(store)

    def against(
        self, wanted: Sequence[str] = (), missing: Sequence[str] = ()
    ) -> list[dict[str, str]]:
        """Return the reasons to send requests elsewhere: the store, and missing models.

        A store that fails is a reason, not an error. ``missing`` are known not to be here.
        """
        found = [] if _is_writable(self._store) else [{"reason": "store not writable"}]
        try:
            pins = self._store.pins.items()
            pinned = sorted(name for name, value in pins if value.get("by") != BY_NODE)
        except (AImageError, OSError):  # which models are to be here is unknown
            pinned = []
            found = found or [{"reason": "store not readable"}]
        others = [name for name in (*wanted, *pinned) if not self._is_complete(name)]
        for name in dict.fromkeys((*missing, *others)):
            found.append({"reason": "model missing", "model": name})
        return found

    def _is_complete(self, name: str) -> bool:
        def check() -> Completeness:
            return check_completeness(self._store, self._store.resolve(Reference.parse(name)))

        try:
            return self._completeness.find(name, check).is_complete
        except (AImageError, OSError):
            return False


def _is_writable(store: ImageLayout) -> bool:
    """Return True if a byte can be written where the store is, or will be. No file is left."""
    place = store.root / ".aimage"
    try:
        while not place.exists() and place != place.parent:  # it may not even be looked at
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


@dataclass(slots=True)
class Service:
    """A worker: its engine and store, and the names that clients have for models.

    ``node`` is the state of a server that is a node, too; ``has_gone`` is called when a name was
    removed; ``wanted`` are models to have before requests are accepted.
    """

    engine: Engine
    transfers: TransferQueue
    store: ImageLayout
    connection: ClientOptions
    metrics: Metrics
    news: EventLog
    settings: Settings
    readiness: Readiness
    wanted: Sequence[str]
    node: NodeState | None = None
    has_gone: Callable[[], object] = lambda: None
    started: float = field(default_factory=time.time)

    def reference(self, name: str | None) -> Reference:
        """Return the AImage that a client means by ``name``. Raises UsageError."""
        text = (self.alias(name) or name) if name else self.settings.default_model
        if not text:
            raise UsageError("the request names no model, and the worker has no default")
        return Reference.parse(text)

    def alias(self, name: str) -> str | None:
        """Return the name that an alias stands for.

        ``:latest`` is what clients add to a name without a tag.
        """
        other = name.removesuffix(f":{DEFAULT_TAG}")
        other = other if other != name else f"{name}:{DEFAULT_TAG}"
        return self.settings.aliases.get(name) or self.settings.aliases.get(other)


def make_service(
    settings: ServerSettings, store: ImageLayout, connection: ClientOptions
) -> Service:
    """Return the service of a worker, or of a node that makes no pictures."""
    metrics, news = Metrics(), EventLog()
    transfers = TransferQueue(store, connection, metrics, news)
    if not isinstance(settings, Settings):
        settings = Settings()
    return Service(
        engine=Engine(store, transfers, settings.limits, metrics, news=news),
        transfers=transfers,
        store=store,
        connection=connection,
        metrics=metrics,
        news=news,
        settings=settings,
        readiness=Readiness(store),
        wanted=settings.wanted,
    )
