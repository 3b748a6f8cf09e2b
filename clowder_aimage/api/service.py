"""The service behind every route of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from clowder_aimage.api.readiness import Readiness
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.limits import IF_MISSING, EngineLimits
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.settings import ServerSettings, Settings
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG
from clowder_aimage.registry import ClientOptions


class NodeState(Protocol):
    """The node's part of the readiness of its server."""

    def missing(self) -> Sequence[str]:
        """Return the models that are to be here and are not."""
        ...

    def against(self) -> list[dict[str, str]]:
        """Return other reasons to send requests elsewhere."""
        ...

    def warnings(self) -> Sequence[str]:
        """Return what is wrong although requests are accepted."""
        ...


@dataclass(slots=True)
class Service:
    """A worker: its engine and store, and the names that clients have for models.

    Args:
        aliases: Names that clients have built in (``gpt-image-1``), and the AImages they stand for.
        default: The model of a request that names none, or one that is not here.
        pull: if-missing, always or never, if a request does not say.
        stream_format: The form of streams, if a request does not say.
        facts: Pictures hold how they were made, if a request does not say.
        public_url: The base of links; None: the address of the request.
    """

    engine: Engine
    transfers: TransferQueue
    store: ImageLayout
    connection: ClientOptions
    metrics: Metrics
    news: EventLog
    aliases: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    pull: str = IF_MISSING
    stream_format: str = "auto"
    facts: bool = True
    public_url: str | None = None
    wanted: Sequence[str] = ()  # models to have before requests are accepted
    node: NodeState | None = None  # of a server that is a node, too
    has_gone: Callable[[], object] = lambda: None  # called when a name was removed
    started: float = field(default_factory=time.time)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.store)

    def reference(self, name: str | None) -> Reference:
        """Return the AImage that a client means by ``name``. Raises UsageError."""
        text = (self.alias(name) or name) if name else self.default
        if not text:
            raise UsageError("the request names no model, and the worker has no default")
        return Reference.parse(text)

    def alias(self, name: str) -> str | None:
        """Return the name that an alias stands for.

        ``:latest`` is what clients add to a name without a tag.
        """
        other = name.removesuffix(f":{DEFAULT_TAG}")
        other = other if other != name else f"{name}:{DEFAULT_TAG}"
        return self.aliases.get(name) or self.aliases.get(other)


def make_service(
    settings: ServerSettings, store: ImageLayout, connection: ClientOptions
) -> Service:
    """Return the service of a worker, or of a node that makes no pictures."""
    metrics, news = Metrics(), EventLog()
    transfers = TransferQueue(store, connection, metrics, news)
    limits = settings.limits if isinstance(settings, Settings) else EngineLimits()
    service = Service(
        engine=Engine(store, transfers, limits, metrics, news=news),
        transfers=transfers,
        store=store,
        connection=connection,
        metrics=metrics,
        news=news,
    )
    if not isinstance(settings, Settings):
        return service
    return replace(
        service,
        aliases=settings.aliases,
        default=settings.default_model,
        pull=settings.pull,
        stream_format=settings.stream_format,
        facts=settings.png_facts,
        public_url=settings.public_url,
        wanted=settings.wanted,
    )
