"""Workers as they report themselves, and the models that a fleet has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

import tenacity
from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError as StreamEntryNotFoundError
from pydantic import Field, TypeAdapter

from clowder_aimage.api.service import parse_model
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.fleet.field import (
    STRICT,
    Count,
    DigestText,
    Id,
    Line,
    ReferenceText,
    escape_text,
    is_id,
    read_fields,
)
from clowder_aimage.fleet.link import LOST, FleetLink
from clowder_aimage.fleet.stream import STATUS_TTL
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG

# Models in a status, and workers in a registry.
MAX_MODELS, MAX_WORKERS = 4096, 1000
# Seconds in which a worker answers to an order.
ANSWERED = 5.0
# Seconds between two reports of a worker that has not changed, and the age of a report that came
# just now.
REPORT, FRESH = 3.0, 3.5
# Jobs that a worker may run at once.
MAX_SLOTS = 1024
_Digests = Annotated[tuple[DigestText, ...], Field(max_length=MAX_SLOTS)]
_Models = Annotated[Mapping[ReferenceText, DigestText], Field(max_length=MAX_MODELS)]
_Kinds = Annotated[Mapping[DigestText, Line], Field(max_length=MAX_MODELS)]
_Aliases = Annotated[Mapping[Line, ReferenceText], Field(max_length=MAX_MODELS)]
# A gateway compares the names of requests with all of them.
_Patterns = Annotated[tuple[Annotated[Line, Field(max_length=128)], ...], Field(max_length=32)]
_log = logging.getLogger("aimage.fleet")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's report: its models and its load.

    ``models`` are the digests of complete models by name, ``kinds`` the kinds of digests ("image",
    "text" or "embedder"), ``loaded`` the digests in memory, ``at_work`` those that jobs use or
    load. ``room`` are the bytes of memory for a further model beside the loaded ones, None if
    unknown. ``slots`` jobs run at once; ``jobs`` are the ids of those that it serves. ``rate`` is
    jobs per minute, in the last five minutes.
    """

    __pydantic_config__ = STRICT

    id: Id
    version: Line = ""
    address: Line = ""
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 1
    running: Count = 0
    jobs: Annotated[tuple[Id, ...], Field(max_length=MAX_SLOTS)] = ()
    loaded: _Digests = ()
    at_work: _Digests = ()
    room: Count | None = None
    models: _Models = field(default_factory=dict)
    kinds: _Kinds = field(default_factory=dict)
    aliases: _Aliases = field(default_factory=dict)
    default_model: ReferenceText | None = None
    default_for: _Patterns = ()
    may_pull: bool = False
    is_draining: bool = False
    done: Count = 0
    failed: Count = 0
    rate: Annotated[float, Field(ge=0)] = 0.0

    def encode(self) -> bytes:
        """Return the status as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes, worker: str) -> WorkerStatus:
        """Return the status of a worker in JSON. Raises FormatError."""
        status = read_fields(_STATUS, raw, "the status of a worker")
        if status.id != worker:
            raise FormatError(f"the status of a worker has the id of another one: {status.id}")
        return status


_STATUS = TypeAdapter(WorkerStatus)


@dataclass(frozen=True, slots=True)
class RejectedStatus:
    """The last status of a worker that is left out, and the reason."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model of the fleet: its full name, and the digest that most workers have under it."""

    name: str
    digest: str
    kind: str = ""


class WorkerRegistry:
    """The workers of a fleet by their statuses; a status is current for STATUS_TTL seconds.

    The time is that of this machine alone: the clocks of workers do not matter. A status that is
    not valid is left out; ``on_reject`` is called for each.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_reject: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock, self._on_reject = clock, on_reject
        self._statuses: dict[str, tuple[WorkerStatus, float]] = {}
        self._rejected: dict[str, tuple[RejectedStatus, float]] = {}
        # Workers whose rejected status was logged.
        self._logged: set[str] = set()
        # Changes with each status.
        self.revision = 0

    def put(self, status: WorkerStatus) -> None:
        """Take a status that arrived now."""
        self._statuses[status.id] = status, self._clock()
        self._rejected.pop(status.id, None)
        self.revision += 1

    def read(self, worker: str, raw: bytes) -> None:
        """Take a status as its worker wrote it; one that is not valid is left out."""
        try:
            status = WorkerStatus.decode(raw, worker)
            if len(self.list_statuses()) >= MAX_WORKERS and worker not in self._statuses:
                raise FormatError(f"there are {MAX_WORKERS} workers")
        except FormatError as error:
            self._reject(escape_text(worker), error.message)
        else:
            self.put(status)

    def _reject(self, worker: str, reason: str) -> None:
        self._on_reject()
        if len(self._rejected) < MAX_WORKERS:
            self._rejected[worker] = RejectedStatus(worker, reason), self._clock()
        if worker not in self._logged and len(self._logged) < MAX_WORKERS:
            self._logged.add(worker)
            _log.warning("a worker is left out", extra={"worker": worker, "reason": reason})

    def remove(self, worker: str) -> None:
        """Remove a worker that has left."""
        self._statuses.pop(worker, None)
        self._rejected.pop(escape_text(worker), None)
        self.revision += 1

    def list_statuses(self) -> list[WorkerStatus]:
        """Return the statuses of the workers that are there, by id."""
        self._statuses = self._select_current(self._statuses)
        return [status for _, (status, _) in sorted(self._statuses.items())]

    def list_rejected(self) -> list[RejectedStatus]:
        """Return the last statuses of workers that are left out, by worker."""
        self._rejected = self._select_current(self._rejected)
        return [rejected for _, (rejected, _) in sorted(self._rejected.items())]

    def _select_current(self, entries: dict[str, tuple[_T, float]]) -> dict[str, tuple[_T, float]]:
        oldest = self._clock() - STATUS_TTL
        return {key: entry for key, entry in entries.items() if entry[1] >= oldest}

    def has_fresh(self, worker: str) -> bool:
        """Return True if a worker has reported just now."""
        entry = self._statuses.get(worker)
        return entry is not None and self._clock() - entry[1] <= FRESH

    def is_serving(self, worker: str, job: str) -> bool:
        """Return True if a worker has reported just now that it serves a job."""
        return self.has_fresh(worker) and job in self._statuses[worker][0].jobs

    def has(self, worker: str) -> bool:
        """Return True if a worker is there."""
        return any(status.id == worker for status in self.list_statuses())

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

    def __init__(self, link: FleetLink, on_reject: Callable[[], object] = lambda: None) -> None:
        self.workers = WorkerRegistry(on_reject=on_reject)
        self._link = link
        self._subject = f"$KV.{link.names.workers}."
        link.listen(f"{self._subject}*", self._take)

    async def run(self) -> None:
        """Read the statuses that are there, once connected."""
        is_lost = tenacity.retry_if_exception_type((*LOST, JetStreamError))
        is_early = tenacity.retry_if_result(operator.not_)
        retryer = tenacity.AsyncRetrying(retry=is_lost | is_early, wait=tenacity.wait_fixed(0.1))
        await retryer(self._read)

    async def _read(self) -> bool:
        """Return False if the fleet cannot be used yet."""
        if not self._link.is_ready:
            return False
        # Workers report again.
        with contextlib.suppress(*LOST, JetStreamError):
            await _read_bucket(self._link, self.workers)
        return True

    async def _take(self, message: Msg) -> None:
        worker = message.subject.removeprefix(self._subject)
        if _is_removal(message.headers):
            self.workers.remove(worker)
            return
        self.workers.read(worker, message.data)


async def read_workers(link: FleetLink) -> WorkerRegistry:
    """Return the workers that are there now. Raises NatsError, TimeoutError."""
    workers = WorkerRegistry()
    await _read_bucket(link, workers)
    return workers


async def _read_bucket(link: FleetLink, workers: WorkerRegistry) -> None:
    bucket = link.names.workers
    stream, prefix = f"KV_{bucket}", f"$KV.{bucket}."
    info = await link.streams.stream_info(stream, subjects_filter=f"{prefix}*")
    for subject in info.state.subjects or {}:
        worker, raw = subject.removeprefix(prefix), b""
        # A long key would end the connection: it is a part of the subject of the request.
        if is_id(worker):
            try:
                message = await link.streams.get_msg(stream, subject=subject, direct=True)
            except StreamEntryNotFoundError:
                continue
            if _is_removal(message.headers):
                continue
            raw = message.data or b""
        # A status that arrived meanwhile is newer.
        if not workers.has_fresh(worker):
            workers.read(worker, raw)


def _is_removal(headers: Mapping[str, str] | None) -> bool:
    return (headers or {}).get("KV-Operation") in ("DEL", "PURGE")


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """An operator's order that the worker takes jobs, or takes none."""

    __pydantic_config__ = STRICT

    order: Literal["drain", "resume"]


_ORDER = TypeAdapter(WorkerOrder)


def parse_order(raw: bytes) -> bool:
    """Return True for the order to take jobs, False for that to take none. Raises FormatError."""
    return read_fields(_ORDER, raw, "an order").order == "resume"


async def give_order(link: FleetLink, worker: str, order: str) -> dict[str, Any]:
    """Send an order to a worker, and return its status.

    Raises NotFoundError: there is no such worker; FormatError: its answer is not valid.
    """
    data = json.dumps({"order": order}).encode()
    if not is_id(worker):
        raise NotFoundError(f"no worker {escape_text(worker)!r} is in the fleet")
    subject = link.names.build_control_subject(worker)
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = link.build_answer_subject()
    async with link.listening(inbox, arrived.put), asyncio.timeout(ANSWERED):
        await link.client.publish(subject, data, reply=inbox, headers=link.sign(subject, data))
        message = await arrived.get()
    if (message.headers or {}).get("Status") == "503":
        raise NotFoundError(f"no worker {worker!r} is in the fleet")
    return asdict(WorkerStatus.decode(message.data, worker))
