"""A request in the engine and the model that serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import CALLER, FOR_EVER, IF_MISSING, DeadlineError, Pace
from clowder_aimage.engine.event import ModelRequest
from clowder_aimage.engine.frame import Message
from clowder_aimage.engine.runner import Runner
from clowder_aimage.engine.sent_text import SentText
from clowder_aimage.errors import AImageError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest, LoraUse
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Digest, Reference

# AImages of one loaded model that are remembered
MAX_VARIANTS = 1000
# Seconds; longer durations are unlimited
MAX_KEEP_ALIVE = 100 * 365 * 86400.0
MakeRequest = Callable[[AImage], ModelRequest]
_HINTS = {
    "waiting": "it was still queued; try again later",
    "pulling": "the model was still being pulled; pull it first",
    "loading": "the model was still being loaded; try again, or load it first",
    "drawing": "use fewer steps or a smaller picture",
    "writing": "request fewer tokens",
}


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The size and the steps of pictures; those of equal ones are computed at once.

    passes: the forward passes of a step, of all pictures of the request.
    """

    width: int
    height: int
    steps: int
    passes: int = field(compare=False)

    @classmethod
    def of(cls, request: GenerateRequest) -> BatchKey | None:
        """Return the key of a request; None if its pictures are computed alone.

        Those with a ControlNet, references or a cache of steps are, and those in tiles.
        """
        sampling, given = request.sampling, request.input
        if request.control.image is not None or given.references or given.upscale:
            return None
        if sampling.cache_threshold:
            return None
        passes = request.output.n * (2 if request.guidance.scale else 1)
        return cls(sampling.width, sampling.height, sampling.steps, passes)


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The key of a loaded model: a manifest, or the base that AImages share, with its backend.

    place: the number of the device, of those that the worker uses.
    """

    digest: Digest
    backend: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """An AImage that a loaded model serves, by the name of its last request."""

    reference: Reference
    stored: StoredAImage


@dataclass(slots=True, eq=False)
class ModelSlot:
    """A model that is or recently was in use.

    ``stored`` is the AImage that it is loaded from. AImages that differ in adapters only are
    ``variants`` of one model, by the digests of their manifests.
    ``served`` are the requests being served, ``users`` the number of requests that wait or are
    being served. ``arrival`` has the fields of the load command for a model with blobs that are
    still arriving. ``loras`` are the adapters of the last request. ``sleeper`` is the process of a
    model that has left its device, and is loaded there again sooner than by a new process.
    """

    reference: Reference
    stored: StoredAImage
    key: ModelKey
    keep_alive: float = 0.0
    arrival: Message = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    runner: Runner | None = None
    sleeper: Runner | None = None
    load: asyncio.Task[Runner] | None = None
    # Set if the model was stopped during the load
    unloading: asyncio.Task[None] | None = None
    served: set[QueuedRequest] = field(default_factory=set)
    loras: tuple[LoraUse, ...] = ()
    users: int = 0
    is_stopped: bool = False
    variants: dict[Digest, ModelVariant] = field(default_factory=dict)
    # Of its first load, and of its requests
    load_seconds: float = 0.0
    pace: Pace = field(default_factory=Pace)
    last_used: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_used = self.clock()

    @property
    def digest(self) -> Digest:
        """The digest of the manifest that it is loaded from."""
        return self.stored.descriptor.digest

    def add(self, reference: Reference, stored: StoredAImage) -> None:
        """Add a variant, or its newer name; the oldest of too many is forgotten."""
        digest = stored.descriptor.digest
        while digest not in self.variants and len(self.variants) >= MAX_VARIANTS:
            del self.variants[next(iter(self.variants))]
        self.variants[digest] = ModelVariant(reference, stored)

    def find_variants(self, reference: Reference, digest: Digest | None) -> frozenset[Digest]:
        """Return the digests of its variants that have a name or a digest."""
        return frozenset(
            each
            for each, variant in self.variants.items()
            if each == digest or variant.reference == reference
        )

    def forget(self, variants: frozenset[Digest]) -> None:
        """Forget variants: they are opened again for their next requests."""
        for digest in variants:
            self.variants.pop(digest, None)

    def list_names(self) -> list[str]:
        """Return the names of its variants, sorted; the name that it was loaded by is the first."""
        names = {str(variant.reference) for variant in self.variants.values()}
        first = str(self.reference)
        return [first, *sorted(names - {first})]

    @property
    def is_text(self) -> bool:
        """Return True if it is a language model."""
        return find_runtime(self.stored.aimage) is not None

    @property
    def is_ready(self) -> bool:
        """Return True if the model is in memory."""
        return self.runner is not None and self.runner.is_alive

    @property
    def is_free(self) -> bool:
        """Return True if the model is in memory and can serve a request at once."""
        runner = self.runner
        return runner is not None and len(self.served) < runner.parallel and runner.is_free

    def may_join(self, request: QueuedRequest) -> bool:
        """Return True if a request is served alone, or its pictures with those being served."""
        if request.is_text or not self.served or self.runner is None:
            return True
        keys = [each.batch for each in (*self.served, request)]
        same = [key for key in keys if key is not None and key == keys[0]]
        if len(same) < len(keys):
            return False
        limit = self.runner.batches.get_limit(same[0].width * same[0].height)
        return sum(key.passes for key in same) <= limit

    @property
    def is_idle(self) -> bool:
        """Return True if no request is served, nor are pictures of one encoded."""
        return not self.served and not (self.runner is not None and self.runner.is_encoding)

    @property
    def remaining(self) -> float:
        """The seconds until it expires."""
        if self.users:
            return self.keep_alive
        return max(0.0, self.last_used + self.keep_alive - self.clock())

    @property
    def until(self) -> datetime | None:
        """The time of its expiry; None if it never expires."""
        remaining = self.remaining
        return (
            None
            if remaining >= MAX_KEEP_ALIVE
            else datetime.now(UTC) + timedelta(seconds=remaining)
        )


def pin_name(reference: Reference, stored: StoredAImage) -> str:
    """Return ``reference`` with the digest of an AImage."""
    return f"{str(reference).partition('@')[0]}@{stored.descriptor.digest}"


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the engine.

    ``make`` returns the parameters once the AImage is in the store; it is None for a request
    that only loads the model. ``stage`` is one of waiting, pulling, loading, drawing, writing.
    ``moved`` is set when the load or the request begins, ``turn`` when the request begins.
    ``adapters`` are the names of AImages, by the index of the adapter in the request.
    ``is_text``: it is for a language model. ``stored`` is the AImage of the name at the arrival of
    the request, if the store had it, and the one that serves it from then on. ``sent`` has the text
    that was sent. ``seconds``: the estimated duration, updated after each step; 0 if unknown.
    ``begun_at``: when its process began with it, by the clock of the engine. ``computed``: the
    seconds in which earlier processes served it. ``deaths`` counts the processes that died while
    they served it with other requests. ``is_suspect``: it may have crashed a process, and is served
    alone. ``is_trial``: its schema is tried, which takes no place of the model. ``batch``: what its
    pictures have in common with others that are computed at once.
    """

    reference: Reference
    make: MakeRequest | None = None
    encoding: PictureEncoding = field(default_factory=PictureEncoding)
    keep_alive: float | None = None
    pull: str = IF_MISSING
    adapters: Mapping[int, Reference] = field(default_factory=dict)
    is_text: bool = False
    stored: StoredAImage | None = None

    caller: str = field(default_factory=CALLER.get)
    # True for a part of a request that was admitted before
    is_admitted: bool = False
    number: int = 0
    stage: str = "waiting"
    model: ModelSlot | None = None
    # Set together with turn
    runner: Runner | None = None
    error: AImageError | None = None
    limit: asyncio.Timeout | None = None
    deadline: float = FOR_EVER
    seconds: float = 0.0
    begun_at: float | None = None
    computed: float = 0.0
    sent: SentText = field(default_factory=SentText)
    has_output: bool = False
    deaths: int = 0
    is_suspect: bool = False
    is_trial: bool = False
    batch: BatchKey | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Event = field(default_factory=asyncio.Event)

    def is_for(self, variants: frozenset[Digest]) -> bool:
        """Return True if one of the AImages serves it, or if it is not known yet."""
        return self.stored is None or self.stored.descriptor.digest in variants

    @property
    def pinned_name(self) -> str:
        """Its name with the digest of the AImage that serves it."""
        assert self.stored is not None  # noqa: S101 - set when it enters the queue
        return pin_name(self.reference, self.stored)

    def begin_again(self) -> None:
        """Wait for another process, after one died for the sake of another request.

        The request is served before those that arrive later. Among suspects the newest is first:
        most probably it crashed the process.
        """
        self.deaths, self.number = self.deaths + 1, -abs(self.number)
        self.wait_again()

    def wait_again(self) -> None:
        """Wait for another turn."""
        self.begun_at = None
        self.runner, self.stage = None, "waiting"
        self.moved.clear()
        self.turn.clear()

    @property
    def is_begun(self) -> bool:
        """Return True once it is being served."""
        return self.turn.is_set()

    @property
    def is_interrupted(self) -> bool:
        """Return True if the deadline has passed or the request was interrupted."""
        return self.error is not None or (self.limit is not None and self.limit.expired())

    def count_step(self, step: Step, elapsed: float, pictures: int) -> None:
        """Estimate the seconds of the request from those of its steps so far."""
        self.seconds = elapsed * step.total * pictures / step.done

    def estimate_remaining(self, timestamp: float, mean: float | None) -> float | None:
        """Return the seconds that it will be computed from now on; None if they are unknown.

        mean: the seconds of other requests, None without any.
        """
        if self.make is None:
            return 0.0
        seconds = self.seconds or mean
        if seconds is None or self.begun_at is None:
            return seconds
        return max(0.0, seconds - (timestamp - self.begun_at))

    def create_timeout(self) -> asyncio.Timeout:
        """Return the context that ends at the deadline or on ``interrupt``."""
        self.limit = asyncio.timeout(None if self.deadline == FOR_EVER else self.deadline)
        return self.limit

    def interrupt(self, error: AImageError) -> None:
        """End the request with ``error``."""
        self.error = self.error or error
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def resolve_error(self, error: Exception) -> Exception:
        """Return the error that ended the request: an earlier interruption, else ``error``."""
        if self.error is not None:
            return self.error
        if self.limit is not None and self.limit.expired():
            message = f"the request exceeded the deadline of {self.deadline:g} seconds"
            return DeadlineError(message, hint=_HINTS[self.stage])
        return error
