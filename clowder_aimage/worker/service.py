"""What every route of the worker stands on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from clowder_aimage.errors import UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import Connection
from clowder_aimage.worker.engine import Engine
from clowder_aimage.worker.metric import Metrics
from clowder_aimage.worker.news import News


@dataclass(slots=True)
class Service:
    """A worker: its engine and store, and what clients' names for models stand for.

    ``aliases`` are names that clients have built in (``gpt-image-1``) to names of AImages;
    ``default`` is what a request means that names none, or one that is not here.
    """

    engine: Engine
    store: ImageLayout
    connection: Connection
    metrics: Metrics
    news: News
    aliases: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    started: float = field(default_factory=time.time)

    def reference(self, name: str | None) -> Reference:
        """The AImage that a client means by ``name``. Raises UsageError."""
        text = self.aliases.get(name, name) if name else self.default
        if not text:
            raise UsageError("the request names no model, and the worker has no default")
        return Reference.parse(text)
