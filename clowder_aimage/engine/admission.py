"""Admission of requests: the limits of an engine, its pull policies and its errors."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.model.library_choice import list_places
from clowder_aimage.pictures.provenance.signing_settings import SigningSettings

FOR_EVER = math.inf
# Parts of a request in the end of a process
GUILTY, SUSPECT, INNOCENT = "guilty", "suspect", "innocent"
_UNKNOWN, _LONGEST = 5, 300  # seconds to wait
_LOAD_OPTIONS = (
    *("dtype", "text_encoder"),
    *("memory", "lora_dir", "context", "parallel", "mark"),
)
_TUNING = ("compile", "attention", "device", "compute", "reproducible", "batch")
# Requests that wait at most, however short the wait is estimated
MAX_WAITING = 256
# The caller of a request, if its server tells callers apart: a name of its token
CALLER: ContextVar[str] = ContextVar("caller", default="")
# Pull policies, named as those of Kubernetes
NEVER, IF_MISSING, ALWAYS = "never", "if-missing", "always"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine.

    queue: maximum number of waiting requests. max_wait: seconds; further requests may wait while
    the estimated wait is shorter. models: maximum number of loaded
    models, or None for as many as the memory has room for. keep_alive:
    seconds that an idle model stays in memory; FOR_EVER, or 0. deadline: seconds from a
    request's arrival to its last picture. text_deadline: seconds that a text may compute.
    picture_deadline: the same of pictures, as a multiple of the estimated time; 0 for no limit.
    backend: the library of image models, "auto", "mlx" or "torch"; backends: those of models by
    their names. compile, attention, device, compute, reproducible, batch: as in
    ``TorchTuning``.
    text_encoder: after a request, "keep" it in memory, "release" it and load it again for new
    prompts, or "auto" to keep it if it fits. memory: bytes for all models; None for the machine's
    memory. first: the
    precision of variants that are used while the AImage is fetched, or None. load_timeout:
    seconds that a load may make no progress. cancel_timeout: seconds for a process to end a
    cancelled request before it is killed. lora_dir: a directory of adapters, or None. parallel:
    requests that a language model serves at once. context: tokens of a request to a language
    model at most, or None for the model's. enhancer: the reference of a language model that is
    loaded beside others, and is not one of ``models``. mark: say in picture files that a machine
    made them. signing: with which key they are signed, or None.
    """

    queue: int = 8
    max_wait: float = 0.0
    models: int | None = None
    keep_alive: float = 300.0
    deadline: float = FOR_EVER
    text_deadline: float = 600.0
    picture_deadline: float = 20.0
    backend: str = "auto"
    backends: Mapping[str, str] = field(default_factory=dict)
    compile: str | None = None
    attention: str | None = None
    device: str | None = None
    compute: str | None = None
    reproducible: bool = False
    batch: int | None = None
    dtype: str | None = None
    text_encoder: str = "auto"
    memory: int | None = None
    first: str | None = None
    load_timeout: float = 300.0
    cancel_timeout: float = 30.0
    lora_dir: str | None = None
    parallel: int = 16
    context: int | None = None
    enhancer: str | None = None
    mark: bool = True
    signing: SigningSettings | None = None

    @property
    def places(self) -> tuple[str | None, ...]:
        """The devices of image models: the named one, or the default and all other GPUs."""
        return (self.device,) if self.device is not None else list_places(self.backend)

    def get_backend(self, reference: str) -> str:
        """Return the library of an image model. Backends are configured by name, without digest."""
        return self.backends.get(reference.partition("@")[0], self.backend)

    def load_options(self, reference: str) -> dict[str, Any]:
        """Return the options of a process to load the model ``reference``.

        The entry ``library`` has the options of the library that computes pictures.
        """
        options = {name: getattr(self, name) for name in _LOAD_OPTIONS}
        library = {
            "backend": self.get_backend(reference),
            "dtype": self.dtype,
            "tuning": {field: getattr(self, field) for field in _TUNING},
        }
        signing = None if self.signing is None else asdict(self.signing)
        return options | {"library": library, "signing": signing}


@dataclass(slots=True)
class Pace:
    """The mean ``seconds`` of what was observed; None if there was nothing yet."""

    seconds: float | None = None

    def observe(self, seconds: float) -> None:
        """Count a duration; later ones weigh more."""
        previous = seconds if self.seconds is None else self.seconds
        self.seconds = 0.7 * previous + 0.3 * seconds


def compute_retry(wait: float | None, max_wait: float = 0.0) -> int:
    """Return the seconds after which a request may be admitted.

    wait: the estimated wait, None if it is unknown. max_wait: the wait at which requests are
    refused.
    """
    return _UNKNOWN if wait is None else max(1, min(_LONGEST, math.ceil(wait - max_wait)))


class BusyError(AImageError):
    """Too many requests are waiting; ``retry_after`` is in seconds.

    ``wait`` is the estimated time in seconds until they have been served; None if it is unknown.
    """

    def __init__(self, waiting: int, retry_after: int, wait: float | None = None) -> None:
        hint = f"try again in {retry_after} seconds"
        about = "" if wait is None else f", which takes about {math.ceil(wait)} seconds"
        super().__init__(f"the queue is full: {waiting} requests are waiting{about}", hint=hint)
        self.retry_after, self.wait = retry_after, wait


class CallerBusyError(BusyError):
    """Too many requests of one caller are waiting: the other places are those of others."""

    def __init__(self, waiting: int, retry_after: int, wait: float | None = None) -> None:
        super().__init__(waiting, retry_after, wait)
        self.message = f"{waiting} requests of this client are waiting, as many as it may have"


def compute_share(places: int) -> int:
    """Return the number of a queue's places that one caller may have: others have the rest."""
    return max(1, places - max(1, places // 4)) if places else 0


class PlaceCounter:
    """Counts the places that requests take, by the callers of their contexts."""

    def __init__(self) -> None:
        self._callers = Counter[str]()

    def enter(self, limit: int, refuse: Callable[[int], BusyError]) -> None:
        """Take one of ``limit`` places. Raises BusyError: that of ``refuse`` if all are taken."""
        caller, taken = CALLER.get(), self._callers.total()
        if taken >= limit:
            raise refuse(taken)
        count = self._callers[caller]
        if caller and count >= compute_share(limit):
            raise CallerBusyError(count, refuse(count).retry_after)
        self._callers[caller] += 1

    def leave(self) -> None:
        """Leave a place, in the context of the request that took it."""
        self._callers[CALLER.get()] -= 1


class CallerSemaphore:
    """Limits concurrent work: ``count`` in all, of which a caller has its share."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._all = asyncio.Semaphore(count)
        self._callers: dict[str, asyncio.Semaphore] = {}

    async def __aenter__(self) -> None:
        caller = self._find_caller()
        await caller.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            caller.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._all.release()
        self._find_caller().release()

    def _find_caller(self) -> asyncio.Semaphore:
        name = CALLER.get()
        if name not in self._callers:
            # Without tokens all are one caller, who has all
            share = compute_share(self._count) if name else self._count
            self._callers[name] = asyncio.Semaphore(share)
        return self._callers[name]


class DeadlineError(AImageError):
    """A request exceeded its deadline."""


class ComputeDeadlineError(DeadlineError):
    """A request was computed for longer than its limit, and would be again."""


class DiedError(ModelError):
    """The process of a model died.

    ``part`` of the request in that: GUILTY if the process died for its sake, or may have been
    killed for its sake; SUSPECT if it crashed while it served this request with others; INNOCENT if
    it died for the sake of another one.
    """

    part = GUILTY


class StoppedError(AImageError):
    """A model or a transfer was stopped, or the worker is shutting down."""


def shutdown_error() -> StoppedError:
    """Return the error for requests to a worker that is shutting down."""
    return StoppedError("the worker is shutting down", hint="try another worker")
