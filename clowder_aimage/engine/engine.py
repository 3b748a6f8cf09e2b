"""The engine: admits requests, fetches models, and serves the requests in order.

A request is admitted, its AImage is fetched if necessary, and it is queued for the model
(``scheduler``). The engine runs on one event loop; long work runs in other threads and processes.
A deadline, a stop or the shutdown of the worker ends a request at once, in any stage; the model
finishes its current step or is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial

from clowder_aimage.content.gate import find_gate
from clowder_aimage.content.telemetry import record, start_span
from clowder_aimage.engine import admission
from clowder_aimage.engine.admission import (
    GUILTY,
    IF_MISSING,
    SUSPECT,
    BusyError,
    DiedError,
    EngineLimits,
    StoppedError,
)
from clowder_aimage.engine.compute_deadline import (
    ComputeDeadline,
    PictureTimes,
    compute_picture_limit,
)
from clowder_aimage.engine.event import (
    ComputedEvent,
    Event,
    EventLog,
    ImageEvent,
    LoadingEvent,
    ModelRequest,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.engine.first_variant import FirstVariant
from clowder_aimage.engine.machine import read_available_memory
from clowder_aimage.engine.measurement import Measurement, Measurements
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.model_fetch import fetch, find
from clowder_aimage.engine.queued_request import BatchKey, MakeRequest, ModelSlot, QueuedRequest
from clowder_aimage.engine.scheduler import ModelScheduler
from clowder_aimage.engine.schema_trials import SchemaTrials
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import AImageError, NoMemoryError, NotFoundError, UsageError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.ability import PIPELINES, Ability
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.request_check import check_unloaded
from clowder_aimage.model.runnable import read_model
from clowder_aimage.model.stored_ability import find_ability
from clowder_aimage.model.text.language_model import (
    COMPLETION,
    EMBEDDING,
    EmbeddingRequest,
    TextDelta,
    TextEnd,
    TextRequest,
    ToolCall,
    require,
)
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Descriptor, Digest, Reference

Emit = Callable[[Event], None]

# Seconds between two checks of the position of a waiting request
POSITION_INTERVAL = 1.0
# Of the bound of the estimated wait, for one caller
_CALLER_SHARE = 0.75
_NONE: Mapping[int, Reference] = {}
_log = logging.getLogger("aimage.worker")


class Engine:
    """Serves requests with the models of one store."""

    def __init__(
        self,
        store: ImageLayout,
        transfers: TransferQueue,
        limits: EngineLimits,
        metrics: Metrics,
        *,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int | None] = read_available_memory,
    ) -> None:
        self.store, self.limits, self.metrics = store, limits, metrics
        self._events = events or EventLog()
        self._transfers = transfers
        self._first = FirstVariant(store, transfers, limits.first)
        self._clock = clock
        self._scheduler = ModelScheduler(store.roots, limits, metrics, self._events, clock, free)
        self._measurements = Measurements(store, limits)
        self._scheduler.get_measured = self._measurements.get
        self._trials = SchemaTrials(clock)
        self._requests: set[QueuedRequest] = set()
        self._numbers = itertools.count(1)
        self._times = PictureTimes()
        # The seconds of pictures, and of texts
        self._paces = {False: admission.Pace(), True: admission.Pace()}
        # Set when a request has ended
        self._request_ended = asyncio.Event()
        self.is_draining = False

    def list_loaded(self) -> list[ModelSlot]:
        """Return the models in memory, most recently used first."""
        return self._scheduler.list_loaded()

    def set_eviction_cost(self, cost: Callable[[Digest], float]) -> None:
        """Unload the models of the least cost first, in place of those that are idle longest."""
        self._scheduler.eviction_cost = cost

    @property
    def capacity(self) -> int:
        """The number of models that can serve requests at once."""
        return self._scheduler.capacity

    @property
    def budget(self) -> int | None:
        """The bytes of memory for all models; None if unknown."""
        return self._scheduler.budget

    @property
    def room(self) -> int | None:
        """The bytes for a further model beside the loaded ones; None if they are unknown."""
        return self._scheduler.room

    @property
    def planned(self) -> int:
        """The bytes of the blobs of models that are being loaded."""
        return sum(model.stored.size for model in self._scheduler.models if model.load is not None)

    @property
    def waiting(self) -> int:
        """The number of requests not yet being served."""
        return sum(not request.is_begun for request in self._requests)

    # -- serving

    def generate(
        self,
        reference: Reference,
        make: MakeRequest,
        *,
        encoding: PictureEncoding | None = None,
        keep_alive: float | None = None,
        pull: str = IF_MISSING,
        adapters: Mapping[int, Reference] = _NONE,
        is_text: bool = False,
        is_admitted: bool = False,
        stored: StoredAImage | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a generation; closing the generator cancels it between two steps.

        ``make`` returns the parameters and is called once the AImage and those of ``adapters`` are
        in the store. An error of an adapter has its index as the fact ``adapter``. ``is_text``: the
        model is a language model and serves several requests at once. ``is_admitted``: it belongs
        to a request that was admitted before, and is not refused if the queue is full. ``stored``
        is the result of ``read`` for the request: the name is resolved again, and its blobs are
        checked, only if the model is not in memory.

        Raises:
            BusyError, DeadlineError, StoppedError: The request was refused or ended.
            NotFoundError: The AImage is incomplete in the store and is not or cannot be pulled.
            UsageError, ModelError: The model cannot serve the request, or failed.
            AImageError: An error of ``make``, of a pull or of loading.
        """
        request = QueuedRequest(
            reference,
            make,
            encoding or PictureEncoding(),
            keep_alive,
            pull,
            adapters,
            is_text,
            stored,
            is_admitted=is_admitted,
        )
        return self._stream(request)

    def load(
        self,
        reference: Reference,
        *,
        keep_alive: float | None = None,
        pull: str = IF_MISSING,
        stored: StoredAImage | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield events until the model is in memory. Raises as ``generate``."""
        request = QueuedRequest(reference, keep_alive=keep_alive, pull=pull, stored=stored)
        return self._stream(request)

    async def read(self, reference: Reference) -> StoredAImage:
        """Return the AImage of a name; that of a model in memory is not read again.

        Its blobs may be missing. Raises NotFoundError, ContentError.
        """
        root = await run_generation(self._resolve, reference)
        if (loaded := self._scheduler.find_loaded(root.digest)) is not None:
            return loaded
        return await run_generation(self._read, reference, root)

    def _read(self, reference: Reference, root: Descriptor) -> StoredAImage:
        stored = read_model(self.store, root, unpacks=True)
        self._measurements.read(stored.descriptor.digest, reference)
        return stored

    def _resolve(self, reference: Reference) -> Descriptor:
        root = self.store.resolve(reference)
        # The policy may have changed since a model in memory was read.
        if (gate := find_gate()) is not None:
            gate.admit_asked(self.store, root, reference)
        return root

    async def _stream(self, request: QueuedRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a request. A separate task serves it until the generator is closed.

        Events are queued, so that a slow consumer does not block the model.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def end(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                # Raised below, unless the consumer has closed the generator
                task.exception()
            events.put_nowait(None)

        task = asyncio.create_task(self._serve(request, events.put_nowait))
        task.add_done_callback(end)
        try:
            while (event := await events.get()) is not None:
                yield event
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    def check_room(self, *, is_text: bool = False) -> None:
        """Raise BusyError or StoppedError if a request would be refused now."""
        if self.is_draining:
            raise admission.shutdown_error()
        busy = sum(request.is_begun for request in self._requests)
        capacity = self._scheduler.capacity * (self.limits.parallel if is_text else 1)
        # Further requests that would start at once do not count for the queue
        idle = max(0, capacity - busy)
        self._check_queue("waiting", self.limits.queue + idle)

    def refuse(self, count: int) -> BusyError:
        """Count a refusal, because of ``count`` other requests, and return its error."""
        self.metrics.refused.inc()
        wait = self.estimate_wait()
        return BusyError(count, admission.compute_retry(wait, self.limits.max_wait), wait)

    def estimate_wait(self) -> float | None:
        """Return the seconds until a request that arrives now would begin; None if unknown.

        They follow from measured steps, and from earlier requests and loads, of this worker or of
        one before.
        """
        timestamp, total = self._clock(), self._scheduler.estimate_loads()
        at_work = set[object]()
        for request in self._requests:
            if request.stage == "pulling":
                continue
            remaining = request.estimate_remaining(timestamp, self._get_mean(request))
            if total is None or remaining is None:
                return None
            total += remaining / self._count_beside(request)
            if request.is_begun:
                at_work.add(request.model)
        return None if total is None else total / max(1, len(at_work))

    def _count_beside(self, request: QueuedRequest) -> int:
        """Return how many requests like this one are computed at once, and end together."""
        model, key = request.model, request.batch
        if request.is_text:
            return self.limits.parallel
        if request.is_begun and model is not None:
            return max(1, len(model.served))
        if model is None or model.runner is None or key is None:
            return 1
        return max(1, model.runner.batches.get_limit(key.width * key.height) // key.passes)

    def _get_mean(self, request: QueuedRequest) -> float | None:
        """Return the mean seconds of requests like this one; None if none was measured."""
        mean = self._paces[request.is_text].seconds
        if mean is None and (stored := request.stored) is not None:
            digest = stored.descriptor.digest
            mean = self._measurements.get(digest, request.reference).request or None
        return mean

    def may_wait(self, share: float = 1.0) -> bool:
        """Return True if the estimated wait is below a share of the bound for further requests."""
        if not self.limits.max_wait or self.waiting >= admission.MAX_WAITING:
            return False
        wait = self.estimate_wait()
        return wait is not None and wait < self.limits.max_wait * share

    async def _serve(self, request: QueuedRequest, emit: Emit) -> None:
        if not request.is_admitted or self.is_draining:
            self.check_room(is_text=request.is_text)
        request.number, request.deadline = next(self._numbers), self.limits.deadline
        self._requests.add(request)
        self.metrics.queue.set(self.waiting)
        try:
            async with request.create_timeout():
                await self._run(request, emit)
        except (TimeoutError, AImageError) as error:
            if (cause := request.resolve_error(error)) is not error:
                raise cause from None
            raise
        finally:
            self._requests.discard(request)
            self._scheduler.leave(request)
            self.metrics.queue.set(self.waiting)
            self._request_ended.set()

    def _check_queue(self, stage: str, limit: int) -> None:
        """Raise BusyError if a stage has ``limit`` requests already, unless the wait is short.

        Requests that wait for a download are counted separately, so that they do not block requests
        whose model is in the store.
        """
        is_pulling = stage == "pulling"
        waiting = [
            request for request in self._requests if not request.is_begun and not request.deaths
        ]
        callers = [
            request.caller for request in waiting if (request.stage == "pulling") == is_pulling
        ]
        if len(callers) >= limit and (is_pulling or not self.may_wait()):
            raise self.refuse(len(callers))
        caller = admission.CALLER.get()
        if caller and (count := callers.count(caller)) >= admission.compute_share(limit):
            if not is_pulling and self.may_wait(_CALLER_SHARE):
                return
            error = self.refuse(count)
            raise admission.CallerBusyError(count, error.retry_after, error.wait)

    async def _run(self, request: QueuedRequest, emit: Emit) -> None:
        stored = await self._find(request)
        await self._fetch_adapters(request, emit)
        if stored is not None:
            try:
                await self._serve_stored(request, stored, emit)
                return
            except NotFoundError:
                # The model may read a blob again that was removed since it was loaded
                if request.has_output or await self._find_complete(request.reference, request.pull):
                    raise
            self._scheduler.leave(request)
            request.wait_again()
        await self._serve_stored(request, await self._pull(request, emit), emit)

    async def _serve_stored(self, request: QueuedRequest, stored: StoredAImage, emit: Emit) -> None:
        """Serve a request; repeat it if its process dies because of another request."""
        parameters = await self._make_parameters(request, stored)
        if self._scheduler.find_loaded(digest := stored.descriptor.digest) is None:
            ability = await run_generation(find_ability, self.store, digest, stored.aimage)
            ability.check(request.reference)
            _check_capability(ability, parameters)
            if isinstance(parameters, GenerateRequest):
                check = partial(check_unloaded, self.store, stored, parameters)
                await run_generation(check, self.limits.lora_dir)
            await self._find_enhancer()
            await run_generation(self._measurements.read, digest, request.reference)
        while True:
            try:
                await self._take_turn(request, stored, parameters, emit)
                return
            except DiedError as error:
                if request.sent.is_ended:
                    # The client has the whole text: only the last frame is missing
                    return
                if request.is_suspect and error.part == GUILTY and request.model is not None:
                    self._scheduler.clear_suspects(request.model)
                # A picture that was sent is not sent again
                is_sent = not request.is_text and request.has_output
                if is_sent or error.part == GUILTY or request.is_interrupted:
                    raise
                # A request that is begun for the third time could go on for ever
                if request.deaths:
                    raise
                request.is_suspect = error.part == SUSPECT
            self._scheduler.leave(request)
            request.begin_again()
            if isinstance(parameters, TextRequest):
                parameters = request.sent.continue_request(parameters)

    async def _make_parameters(
        self, request: QueuedRequest, stored: StoredAImage
    ) -> ModelRequest | None:
        """Return the parameters of a request, and estimate its time."""
        make = request.make
        if make is not None and request.is_text:
            # That of a picture may read files
            parameters: ModelRequest | None = make(stored.aimage)
        else:
            parameters = await run_generation(make, stored.aimage) if make else None
        if isinstance(parameters, TextRequest):
            return _set_seed(parameters)
        if isinstance(parameters, GenerateRequest):
            key = self._scheduler.build_key(request.reference, stored)
            request.seconds = self._times.estimate(key, parameters)
            request.batch = BatchKey.of(parameters)
        return parameters

    async def _find_enhancer(self) -> None:
        """Reserve memory for the enhancer, if the store has it."""
        stored = None
        if self.limits.enhancer is not None:
            with contextlib.suppress(AImageError):
                stored = await self.read(Reference.parse(self.limits.enhancer))
        self._scheduler.enhancer = stored

    async def _pull(self, request: QueuedRequest, emit: Emit) -> StoredAImage:
        """Pull the model of a request, or its variant; it waits in the queue from then on."""
        self._check_queue("pulling", self.limits.queue + self._scheduler.capacity)
        request.stage = "pulling"
        emit(QueuedEvent(self._scheduler.count_ahead(request)))
        begin = partial(self._prepare, request)
        stored = await self._first.fetch(request.reference, emit, begin)
        request.stage, request.number = "waiting", next(self._numbers)
        return stored

    async def _wait_in_queue(self, request: QueuedRequest, emit: Emit) -> None:
        """Wait until the request may begin; emit its position, and again when it has changed."""
        position = None
        while True:
            if (ahead := self._scheduler.count_ahead(request)) != position:
                position = ahead
                emit(QueuedEvent(ahead))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POSITION_INTERVAL):
                    await request.moved.wait()
                return

    async def _take_turn(
        self,
        request: QueuedRequest,
        stored: StoredAImage,
        parameters: ModelRequest | None,
        emit: Emit,
    ) -> None:
        """Wait for the model and serve the request; raise DiedError if its process dies."""
        if isinstance(parameters, TextRequest) and parameters.has_grammar:
            await self._try_schema(request, stored, parameters, emit)
        model = await self._wait_for_turn(request, stored, emit)
        if parameters is not None:
            await self._generate(model, request, parameters, emit)
            await self._record_measurement(model)

    async def _try_schema(
        self, request: QueuedRequest, stored: StoredAImage, parameters: TextRequest, emit: Emit
    ) -> None:
        """Try the schema of a request, which keeps its position in the queue.

        Raises UsageError, SchemaBudgetError; DiedError if the process of the model dies.
        """
        async with self._trials.hold(request.caller):
            request.is_trial = True
            try:
                await self._wait_for_turn(request, stored, emit)
                assert request.runner is not None  # noqa: S101 - set when the turn has come
                name = request.pinned_name
                with self._trials.charge(request.caller):
                    await request.runner.try_schema(name, parameters)
            finally:
                request.is_trial = False
        request.wait_again()

    async def _wait_for_turn(
        self, request: QueuedRequest, stored: StoredAImage, emit: Emit
    ) -> ModelSlot:
        """Wait for the model, and for a place unless the request is a trial; return the model."""
        model = self._scheduler.enter(request, stored)
        with start_span("queue"):
            await self._wait_in_queue(request, emit)
        if not request.is_begun:
            emit(LoadingEvent())
            with start_span("load", model=str(model.reference)):
                await request.turn.wait()
        self.metrics.queue.set(self.waiting)
        # It may have moved to another GPU
        return request.model or model

    async def _prepare(self, request: QueuedRequest, stored: StoredAImage) -> None:
        """Load a model while its blobs arrive. Raises the errors of ``make``."""
        make = request.make
        parameters = await run_generation(make, stored.aimage) if make else None
        # Language models are loaded when they are complete
        if find_runtime(stored.aimage) is None:
            self._scheduler.prepare(request, stored, parameters)

    async def _fetch_adapters(self, request: QueuedRequest, emit: Emit) -> None:
        """Pull the adapters that the store lacks."""
        for index, reference in request.adapters.items():
            try:
                if await self._find_complete(reference, request.pull) is None:
                    self._check_queue("pulling", self.limits.queue + self._scheduler.capacity)
                    request.stage = "pulling"
                    await fetch(self._transfers, reference, emit)
            except AImageError as error:
                error.facts["adapter"] = str(index)
                raise
            finally:
                request.stage = "waiting"

    async def _find(self, request: QueuedRequest) -> StoredAImage | None:
        """Return the AImage if its model is in memory; otherwise as ``_find_complete``."""
        if request.reference.registry is None or request.pull != admission.ALWAYS:
            with contextlib.suppress(NotFoundError):
                resolve = partial(self._resolve, request.reference)
                stored = request.stored
                root = stored.descriptor if stored else await run_generation(resolve)
                if (loaded := self._scheduler.find_loaded(root.digest)) is not None:
                    return loaded
        return await self._find_complete(request.reference, request.pull)

    async def _find_complete(self, reference: Reference, pull: str) -> StoredAImage | None:
        """Return the AImage if it is complete in the store; None if it must be pulled."""
        may_pull = pull != admission.NEVER and reference.registry is not None
        if may_pull and pull == admission.ALWAYS:
            return None
        try:
            return await run_generation(find, self.store, reference)
        except NotFoundError:
            if not may_pull:
                raise
            return None

    async def _generate(
        self, model: ModelSlot, request: QueuedRequest, parameters: ModelRequest, emit: Emit
    ) -> None:
        assert request.runner is not None  # noqa: S101 - set when the turn has come
        _log.info("generating", extra={"model": str(request.reference)})
        outcome, started = "cancelled", self._clock()
        request.begun_at = started
        deadline = ComputeDeadline(request.interrupt, request.computed)
        if isinstance(parameters, GenerateRequest):
            observed = self._observe_steps(model, request, parameters, deadline, emit)
        else:
            deadline.set(self.limits.text_deadline, "text", "request fewer tokens")
            observed = self._observe_text(model, request, emit)
            if isinstance(parameters, TextRequest):
                parameters = replace(parameters, owner=request.caller)
        assert request.stored is not None  # noqa: S101 - set when it entered the queue
        manifest, name = request.stored.descriptor, request.pinned_name
        try:
            with start_span("generate", model=str(request.reference)):
                await request.runner.generate(
                    name, manifest, parameters, request.encoding, observed
                )
            outcome, seconds = "done", self._clock() - started
            model.pace.observe(seconds)
            if isinstance(parameters, GenerateRequest):
                self._times.observe(replace(model.key, place=0), parameters, seconds)
        except AImageError as error:
            outcome = "refused" if isinstance(error, UsageError) else "failed"
            lacks_memory = isinstance(error, NoMemoryError)
            is_alone = model.served <= {request} and not request.runner.is_encoding
            if lacks_memory and is_alone and isinstance(parameters, GenerateRequest):
                # Its process frees all memory; the next request loads the model again
                self._scheduler.unload(model, "memory", may_sleep=False)
            raise
        finally:
            deadline.cancel()
            request.computed += self._clock() - started
            if outcome == "cancelled" and request.is_interrupted:
                outcome = "failed"
            self._observe(request, outcome, self._clock() - started)

    async def _record_measurement(self, model: ModelSlot) -> None:
        """Keep the memory of a model, which has grown by its requests, and its seconds."""
        size, name = 0 if model.runner is None else model.runner.size, model.reference
        measured = Measurement(size, model.load_seconds, model.pace.seconds or 0.0)
        if measured.differs(self._measurements.get(model.digest, name)):
            await run_generation(self._measurements.record, model.digest, name, measured)

    def _observe_steps(
        self,
        model: ModelSlot,
        request: QueuedRequest,
        parameters: GenerateRequest,
        deadline: ComputeDeadline,
        emit: Emit,
    ) -> Emit:
        """Return a function that counts the events of pictures and passes them on."""
        started = previous = drawn = self._clock()
        # The index of the last step
        last = 0
        # When the last step of a picture ended
        finished: dict[int, float] = {}
        measured = self._times.estimate(replace(model.key, place=0), parameters)
        digest = str(request.stored.descriptor.digest) if request.stored is not None else ""

        def limit(estimate: float) -> None:
            seconds = compute_picture_limit(self.limits.picture_deadline, estimate)
            deadline.set(seconds, "picture", "use fewer steps or a smaller picture")

        limit(measured)

        def on_event(event: Event) -> None:
            nonlocal previous, last, drawn
            timestamp = self._clock()
            if isinstance(event, StartedEvent):
                model.loras = parameters.adapters.loras
            elif isinstance(event, ComputedEvent):
                self._scheduler.free(request)
                return
            elif isinstance(event, Step):
                finished[event.picture] = timestamp
                # Pictures that are computed at once end a step together
                if event.index != last or event.total == 1:
                    self.metrics.steps.observe(timestamp - previous)
                last = event.index
                request.count_step(event, timestamp - started, parameters.output.n)
                limit(max(measured, request.seconds))
            elif isinstance(event, ImageEvent):
                # Several are decoded one after another
                record("decode", timestamp - max(drawn, finished.pop(event.picture, previous)))
                drawn = timestamp
                request.has_output = True
                self.metrics.batches.observe(event.facts.get("batch", 1))
                event = replace(event, digest=digest)
            previous = timestamp
            emit(event)

        return on_event

    def _observe_text(self, model: ModelSlot, request: QueuedRequest, emit: Emit) -> Emit:
        """Return a function that counts the events of a text and passes them on."""
        started = self._clock()
        metrics, label = self.metrics, self.metrics.model(model.reference.repository)

        def on_event(event: Event) -> None:
            if not isinstance(event, TextDelta | ToolCall | TextEnd):
                emit(event)
                return
            for complete_event in request.sent.add(event, self._clock()):
                if not request.has_output and isinstance(complete_event, TextDelta | ToolCall):
                    metrics.first_tokens.observe(self._clock() - started)
                    request.has_output = True
                elif isinstance(complete_event, TextEnd):
                    metrics.tokens.labels(label, "prompt").inc(complete_event.prompt_tokens)
                    metrics.tokens.labels(label, "text").inc(complete_event.tokens)
                    if complete_event.tokens > 1 and complete_event.seconds > 0:
                        metrics.token_rates.observe(complete_event.tokens / complete_event.seconds)
                emit(complete_event)

        return on_event

    def _observe(self, request: QueuedRequest, outcome: str, seconds: float) -> None:
        if outcome == "done":
            self._paces[request.is_text].observe(seconds)
        if outcome == "cancelled":
            self.metrics.cancelled.inc()
        label = self.metrics.model(request.reference.repository)
        self.metrics.generations.labels(label, outcome).observe(seconds)
        facts = {"outcome": outcome, "seconds": round(seconds, 3)}
        self._events.record("generate", model=str(request.reference), **facts)

    # -- ending

    async def stop(self, reference: Reference) -> bool:
        """End the requests for ``reference``, and unload its model unless others use it.

        Returns False if it was not in memory.
        """
        digest = None
        with contextlib.suppress(NotFoundError):
            digest = (await run_generation(self.store.resolve, reference)).digest
        matches = {
            model: variants
            for model in self._scheduler.models
            if (variants := model.find_variants(reference, digest))
        }
        unused = set(matches)
        for request in self._requests:
            variants = matches.get(request.model, frozenset()) if request.model else frozenset()
            if request.model in matches and request.is_for(variants):
                request.interrupt(StoppedError(f"{reference} was stopped"))
            else:
                unused.discard(request.model)
        for model, variants in matches.items():
            model.forget(variants)
        await asyncio.gather(*(self._scheduler.stop(model) for model in unused))
        return bool(matches)

    async def release(self, reference: Reference, digest: Digest | None) -> bool:
        """Unload the models of a name or a digest: at once if unused, else after the last request.

        Returns False if none was in memory.
        """
        models = self._scheduler.list_loaded()
        matches = [model for model in models if model.find_variants(reference, digest)]
        for model in matches:
            model.keep_alive = 0.0
        await self.expire()
        return bool(matches)

    async def sleep(self, reference: Reference, digest: Digest | None) -> bool:
        """Let the models of a name or a digest leave their devices.

        Returns False if none was in memory. Raises UsageError: one serves requests, or cannot.
        """
        models = self._scheduler.list_loaded()
        matches = [model for model in models if model.find_variants(reference, digest)]
        if any(model.is_text for model in matches):
            raise UsageError(f"{reference} is a language model, which cannot sleep", hint="stop it")
        if count := sum(model.users for model in matches):
            raise UsageError(
                f"{reference} serves {count} requests",
                hint="wait until they have ended, or stop it",
            )
        await asyncio.gather(*(self._scheduler.sleep(model) for model in matches))
        return bool(matches)

    async def forget(self, digest: Digest) -> None:
        """Unload the model of an AImage that was removed, unless it serves others of its base."""
        for model in self._scheduler.list_loaded():
            if digest in model.variants:
                model.forget(frozenset((digest,)))
                model.keep_alive = model.keep_alive if model.variants else 0.0
        await self.expire()

    async def expire(self) -> None:
        """Unload idle models whose keep-alive has expired; call this periodically."""
        await self._scheduler.expire()

    async def close(self, grace: float) -> None:
        """End running requests within ``grace`` seconds and all others at once."""
        self.is_draining = True
        self._interrupt(lambda request: not request.is_begun)
        self._transfers.close()
        self._first.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any(request.is_begun for request in self._requests):
                    self._request_ended.clear()
                    await self._request_ended.wait()
        self._interrupt(lambda _: True)
        await self._scheduler.end()

    def _interrupt(self, matches: Callable[[QueuedRequest], bool]) -> None:
        for request in filter(matches, self._requests):
            request.interrupt(admission.shutdown_error())


def _set_seed(request: TextRequest) -> TextRequest:
    """Return a request with a seed, so that its draws can go on in another process."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))


def _check_capability(ability: Ability, parameters: ModelRequest | None) -> None:
    """Raise UsageError if a language model cannot serve a request, before it is loaded for it."""
    if ability.runtime in ("", PIPELINES):
        return
    if isinstance(parameters, EmbeddingRequest):
        require(ability.capabilities, EMBEDDING, "model")
    elif isinstance(parameters, TextRequest):
        require(ability.capabilities, COMPLETION, "model")
