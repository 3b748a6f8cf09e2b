"""Workers as they report themselves, and the models that a fleet has."""

from __future__ import annotations

import contextlib
import json
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import tenacity
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyNotFoundError, NoKeysError

from clowder_aimage.api.service import parse_model
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.stream import STATUS_TTL
from clowder_aimage.oci import Reference, read_json
from clowder_aimage.oci.reference import DEFAULT_TAG


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's report: its models and its load.

    ``models`` are the digests of complete models by name, ``kinds`` the kinds of digests ("image",
    "text" or "embedder"), ``loaded`` the digests in memory, ``at_work`` those that jobs use or
    load. ``slots`` jobs run at once. ``rate`` is jobs per minute.
    """

    id: str
    version: str = ""
    address: str = ""
    slots: int = 1
    running: int = 0
    loaded: tuple[str, ...] = ()
    at_work: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    default_model: str | None = None
    default_for: tuple[str, ...] = ()
    may_pull: bool = False
    is_draining: bool = False
    done: int = 0
    failed: int = 0
    rate: float = 0.0

    def encode(self) -> bytes:
        """Return the status as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> WorkerStatus:
        """Return the status in JSON; unknown fields are of a later version. Raises FormatError."""
        document = read_json(raw, "the status of a worker")
        try:
            fields = {name: document[name] for name in cls.__dataclass_fields__ if name in document}
            for name in ("loaded", "at_work", "default_for"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except (AttributeError, TypeError):
            raise FormatError("the status of a worker cannot be read") from None


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model of the fleet: its full name, and the digest that most workers have under it."""

    name: str
    digest: str
    kind: str = ""


class WorkerRegistry:
    """The workers of a fleet by their statuses; a status is current for STATUS_TTL seconds.

    The time is that of this machine alone: the clocks of workers do not matter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._statuses: dict[str, tuple[WorkerStatus, float]] = {}
        # Changes with each status.
        self.revision = 0

    def put(self, status: WorkerStatus) -> None:
        """Take a status that arrived now."""
        self._statuses[status.id] = status, self._clock()
        self.revision += 1

    def remove(self, worker: str) -> None:
        """Remove a worker that has left."""
        self._statuses.pop(worker, None)
        self.revision += 1

    def list_statuses(self) -> list[WorkerStatus]:
        """Return the statuses of the workers that are there, by id."""
        oldest = self._clock() - STATUS_TTL
        self._statuses = {key: entry for key, entry in self._statuses.items() if entry[1] >= oldest}
        return [status for _, (status, _) in sorted(self._statuses.items())]

    def list_others(self, worker: str) -> list[WorkerStatus]:
        """Return the statuses of the other workers that take jobs."""
        return [
            status
            for status in self.list_statuses()
            if not status.is_draining and status.id != worker
        ]

    def on_disk_elsewhere(self, digest: str, worker: str, *past: str) -> bool:
        """Return True if another worker that takes jobs, not in ``past``, has a model on disk."""
        statuses = (status for status in self.list_others(worker) if status.id not in past)
        return any(digest in status.models.values() for status in statuses)

    def may_pull(self) -> bool:
        """Return True if a worker may pull missing models."""
        return any(status.may_pull and not status.is_draining for status in self.list_statuses())

    def resolve_reference(self, name: str | None) -> Reference:
        """Return the reference of a client's name for a model.

        Raises UsageError without a name; NotFoundError if it is neither an alias nor a reference.
        """
        statuses = self.list_statuses()
        text = (_find_alias(statuses, name) or name) if name else _find_default(statuses, None)
        if not text:
            raise UsageError("the request has no model, and the workers have no default model")
        return parse_model(text)

    def find(self, name: str | None) -> FleetModel | None:
        """Return the model that a client names; None if no worker has it.

        A name without a model means the default model. Raises as ``reference``.
        """
        statuses, reference = self.list_statuses(), self.resolve_reference(name)
        match = _resolve(statuses, reference)
        is_exact = reference.registry is not None or reference.digest is not None
        is_literal = name is None or _find_alias(statuses, name) is None
        default = None if is_exact and is_literal else _find_default(statuses, name)
        if match is None and default is not None:
            match = _resolve(statuses, Reference.parse(default))
        if match is None:
            return None
        kind = next((status.kinds[match[1]] for status in statuses if match[1] in status.kinds), "")
        return FleetModel(*match, kind)

    @property
    def default_model(self) -> str | None:
        """The model of requests without one."""
        return _find_default(self.list_statuses(), None)

    def list_names(self, *kinds: str) -> list[str]:
        """Return the names of the models of some kinds."""
        return sorted(
            {
                name
                for status in self.list_statuses()
                for name, digest in status.models.items()
                if status.kinds.get(digest) in kinds
            }
        )


def _resolve(statuses: Iterable[WorkerStatus], reference: Reference) -> tuple[str, str] | None:
    """Return a name and its digest; of several digests that of most workers, then the lowest."""
    name = str(reference)
    if reference.digest is not None:
        digest = str(reference.digest)
        is_here = any(digest in status.models.values() for status in statuses)
        return (name, digest) if is_here else None
    counts = Counter(status.models[name] for status in statuses if name in status.models)
    if not counts:
        return None
    return name, min(counts, key=lambda digest: (-counts[digest], digest))


def _find_alias(statuses: Iterable[WorkerStatus], name: str) -> str | None:
    variant = name.removesuffix(f":{DEFAULT_TAG}")
    variant = variant if variant != name else f"{name}:{DEFAULT_TAG}"
    aliases = (status.aliases.get(name) or status.aliases.get(variant) for status in statuses)
    return next(filter(None, aliases), None)


def _find_default(statuses: Iterable[WorkerStatus], name: str | None) -> str | None:
    """Return the default model that replaces a name that clients have built in."""
    plain = (name or "").removesuffix(f":{DEFAULT_TAG}")
    for status in statuses:
        is_built_in = name is None or any(
            fnmatchcase(plain, pattern) for pattern in status.default_for
        )
        if status.default_model and is_built_in:
            return status.default_model
    return None


class WorkerWatch:
    """Keeps a registry up to date: a status arrives as a message of the bucket when it changes.

    Workers report again every few seconds, so a status that was missed is not missed for long.
    """

    def __init__(self, link: FleetLink) -> None:
        self.workers = WorkerRegistry()
        self._link = link
        self._subject = f"$KV.{link.names.workers}."

    async def run(self) -> None:
        """Listen to the fleet once connected, and read the statuses that are there."""
        is_lost = tenacity.retry_if_exception_type((*LOST, JetStreamError))
        is_early = tenacity.retry_if_result(operator.not_)
        retryer = tenacity.AsyncRetrying(retry=is_lost | is_early, wait=tenacity.wait_fixed(0.1))
        await retryer(self._subscribe)

    async def _subscribe(self) -> bool:
        """Return False if the fleet cannot be used yet."""
        if not self._link.is_ready:
            return False
        await self._link.client.subscribe(f"{self._subject}*", cb=self._take)
        # Workers report again.
        with contextlib.suppress(*LOST, JetStreamError):
            for status in (await read_workers(self._link)).list_statuses():
                self.workers.put(status)
        return True

    async def _take(self, message: Msg) -> None:
        if (message.headers or {}).get("KV-Operation") in ("DEL", "PURGE"):
            self.workers.remove(message.subject.removeprefix(self._subject))
            return
        with contextlib.suppress(FormatError):
            self.workers.put(WorkerStatus.decode(message.data))


async def read_workers(link: FleetLink) -> WorkerRegistry:
    """Return the workers that are there now. Raises NatsError, TimeoutError."""
    workers = WorkerRegistry()
    bucket = await link.streams.key_value(link.names.workers)
    with contextlib.suppress(NoKeysError):
        for key in await bucket.keys():
            with contextlib.suppress(KeyNotFoundError, FormatError):
                workers.put(WorkerStatus.decode((await bucket.get(key)).value or b""))
    return workers


async def give_order(link: FleetLink, worker: str, order: str) -> dict[str, Any]:
    """Send an order to a worker, and return its status.

    Raises NotFoundError: there is no such worker.
    """
    data = json.dumps({"order": order}).encode()
    try:
        message = await link.client.request(
            link.names.build_control_subject(worker), data, timeout=5.0
        )
    except NoRespondersError:
        raise NotFoundError(f"no worker {worker!r} is in the fleet") from None
    return asdict(WorkerStatus.decode(message.data))
