"""The service behind all routes of a worker and its readiness."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.content.file_system import sync_file
from clowder_aimage.content.platform import ManifestSelector
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.executor import run_probe
from clowder_aimage.engine.job_queue import JobQueue
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.model_fetch import find
from clowder_aimage.engine.settings import ServerSettings, Settings
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, CompletenessCache, check_completeness
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.model.adapter_source import AdapterFinder
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.web_file import InputHosts

if TYPE_CHECKING:
    from clowder_aimage.pictures.input_source import InputSource

# Pins checked by the node, which may need only some components
BY_NODE = "node"


class NodeState(Protocol):
    """The node's contribution to the readiness of its server."""

    def list_missing(self) -> Sequence[str]:
        """Return the desired models that are not present."""

    def list_reasons(self) -> list[dict[str, str]]:
        """Return the other reasons against the readiness of the server."""

    def list_warnings(self) -> Sequence[str]:
        """Return the problems that do not affect readiness."""


class FleetState(Protocol):
    """The contribution of a fleet to the readiness of a worker that takes its jobs."""

    def list_reasons(self) -> list[dict[str, str]]:
        """Return the reasons why this worker cannot take jobs of the fleet."""


class Readiness:
    """The readiness of one store. Thread-safe."""

    def __init__(self, store: ImageLayout) -> None:
        self._store = store
        self._completeness = CompletenessCache(store)
        # The fingerprint of the store at the last successful read
        self._readable: Hashable = None

    def list_reasons(
        self, models: Sequence[str] = (), missing: Sequence[str] = ()
    ) -> list[dict[str, str]]:
        """Return the reasons against the readiness of the server: the store and missing models.

        A store failure is a reason, not an error. ``missing`` are models known to be missing.
        """
        reasons = [] if _is_writable(self._store) else [{"reason": "store not writable"}]
        try:
            self._check_names()
            pins = self._store.pins.iter_items()
            pinned = sorted(name for name, value in pins if value.get("by") != BY_NODE)
            incomplete = [name for name in (*models, *pinned) if not self._is_complete(name)]
        except (AImageError, OSError):
            # The pinned models are unknown
            reasons = reasons or [{"reason": "store not readable"}]
            incomplete = [*models]
        for name in dict.fromkeys((*missing, *incomplete)):
            reasons.append({"reason": "model missing", "model": name})
        return reasons

    def _check_names(self) -> None:
        """Read the names unless the store is unchanged. Raises StoreError."""
        before = self._store.compute_fingerprint()
        if before is None or before != self._readable:
            self._store.check()
            self._readable = before

    def _is_complete(self, name: str) -> bool:
        def check(_: StoreSnapshot) -> Completeness:
            return check_completeness(self._store, self._store.resolve(Reference.parse(name)))

        try:
            return self._completeness.find(name, check).is_complete
        except (AImageError, OSError):
            return False


def _is_writable(store: ImageLayout) -> bool:
    """Return True if the location of the store is writable. The test leaves no file."""
    directory = store.root / ".aimage"
    try:
        # A missing directory is writable if its first existing parent is
        while not directory.exists() and directory != directory.parent:
            directory = directory.parent
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
            sync_file(file.fileno(), directory)
    except OSError:
        return False
    return True


def parse_model(name: str) -> Reference:
    """Parse the name of a model. Raises NotFoundError: no model can have this name."""
    try:
        return Reference.parse(name)
    except UsageError as error:
        reason = error.message.encode("ascii", "backslashreplace").decode()
        raise NotFoundError(f"model not found: {reason[:300]}", **error.advice) from None


@dataclass(slots=True)
class Service:
    """A worker: its engine and store, and the aliases of models.

    ``node`` is the state of a server that is also a node, ``fleet`` that of one which takes jobs of
    a fleet; ``on_removed`` is called after a name was removed; ``wanted`` are the models required
    for readiness. ``adapters`` finds those in the store and in the directory of the settings,
    ``jobs`` make AImages from others.
    """

    engine: Engine
    transfers: TransferQueue
    store: ImageLayout
    connection: ClientOptions
    metrics: Metrics
    events: EventLog
    settings: Settings
    readiness: Readiness
    wanted: Sequence[str]
    node: NodeState | None = None
    fleet: FleetState | None = None
    on_removed: Callable[[], object] = lambda: None
    started: float = field(default_factory=time.time)
    adapters: AdapterFinder = field(init=False)
    jobs: JobQueue = field(init=False)
    descriptions: ModelDescriptions = field(init=False)

    def __post_init__(self) -> None:
        directory = self.settings.lora_dir
        self.adapters = AdapterFinder(self.store, partial(find, self.store), directory)
        self.jobs = JobQueue(self.store.roots, self.events, lora_dir=directory)
        self.descriptions = ModelDescriptions(self.store)

    def build_input_source(self, *, may_pull: bool) -> InputSource:
        """Return the reader of pictures that requests name by URL or artifact.

        With ``may_pull`` also those in the registries that are configured for models, unless this
        worker pulls nothing.
        """
        # Imported here, as it imports numpy
        from clowder_aimage.pictures.input_source import InputSource

        hosts = InputHosts.parse(self.settings.allow_inputs)
        may_pull = may_pull and self.settings.pull != NEVER
        registries = self._list_registries() if may_pull else frozenset[str]()
        return InputSource(self.store, lambda: self.connection, hosts, registries)

    def _list_registries(self) -> frozenset[str]:
        """Return the hosts of the configuration, and those of the models in the settings."""
        names = (self.settings.default_model, *self.settings.aliases.values(), *self.wanted)
        models = (Reference.parse(name).registry for name in names if name is not None)
        default = self.connection.default_registry.partition("/")[0]
        return frozenset(filter(None, (*self.connection.registries, default, *models)))

    @property
    def required(self) -> Sequence[str]:
        """Return the models required for readiness: also a default model that no request pulls."""
        name, can_pull = self.settings.default_model, self.settings.pull != NEVER
        if name is None or (can_pull and Reference.parse(name).registry is not None):
            return self.wanted
        return (name, *self.wanted)

    async def list_reasons(self) -> list[dict[str, str]]:
        """Return the reasons against the readiness of the server."""
        missing = self.node.list_missing() if self.node is not None else ()
        try:
            reasons = await run_probe(self.readiness.list_reasons, self.required, missing)
        except TimeoutError:
            reasons = [{"reason": "store not readable"}]
        for part in (self.node, self.fleet):
            reasons = (part.list_reasons() if part is not None else []) + reasons
        if self.engine.is_draining:
            reasons.insert(0, {"reason": "draining"})
        return reasons

    def resolve_reference(self, name: str | None) -> Reference:
        """Return the AImage of a client's ``name``.

        Raises UsageError without a name; NotFoundError if it is neither an alias nor a reference.
        """
        text = (self.resolve_alias(name) or name) if name else self.settings.default_model
        if not text:
            raise UsageError("the request has no model, and the worker has no default model")
        return parse_model(text)

    def resolve_alias(self, name: str) -> str | None:
        """Return the target of an alias.

        Clients append ``:latest`` to a name without a tag.
        """
        variant = name.removesuffix(f":{DEFAULT_TAG}")
        variant = variant if variant != name else f"{name}:{DEFAULT_TAG}"
        return self.settings.aliases.get(name) or self.settings.aliases.get(variant)


def make_service(
    settings: ServerSettings, store: ImageLayout, connection: ClientOptions
) -> Service:
    """Create the service of a worker, or of a node without image generation."""
    metrics, events = Metrics(), EventLog()
    if not isinstance(settings, Settings):
        settings = Settings()
    selector = ManifestSelector(fallback_variant=settings.first)
    transfers = TransferQueue(store, connection, metrics, events, selector=selector)
    return Service(
        engine=Engine(store, transfers, settings.limits, metrics, events=events),
        transfers=transfers,
        store=store,
        connection=connection,
        metrics=metrics,
        events=events,
        settings=settings,
        readiness=Readiness(store),
        wanted=settings.wanted,
    )
