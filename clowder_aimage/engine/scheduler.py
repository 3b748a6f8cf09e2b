"""The scheduler: selects the next request, and the models to load and to unload.

Requests wait in one queue in order of arrival. A request is served once its model is in memory and
free. While a request waits for memory, later requests are not served by a model that would have
to be unloaded. Everything runs on one event loop; ``arrange`` is called after each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from clowder_aimage.engine import machine
from clowder_aimage.engine.admission import EngineLimits, Pace, compute_share
from clowder_aimage.engine.event import EventLog, ModelRequest
from clowder_aimage.engine.measurement import Measurement
from clowder_aimage.engine.memory_plan import (
    LoadedModel,
    LoadPlan,
    MemoryRoom,
    estimate_need,
    plan_load,
)
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.queued_request import ModelKey, ModelSlot, QueuedRequest, pin_name
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import AImageError, ModelError, NoMemoryError, UnrunnableError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.library_choice import choose_dtype_name, may_have_gpu
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Digest, Reference

# A memory of models: that of the machine, or the place of a GPU with its own
Memory = int | None
_log = logging.getLogger("aimage.worker")
# Models that sleep; each has a context on the GPU, and copies in the machine's memory
_MAX_ASLEEP = 2
# Models whose refusal is remembered
_MAX_REFUSED = 1000


@dataclass(slots=True, eq=False)
class ModelScheduler:
    """The models of a worker, each in its own process. AImages of one base are one model.

    On several GPUs a model may be loaded on each, while requests for it wait.

    ``_free`` returns the bytes of memory for another model; None if there is enough. The model of
    the least ``eviction_cost`` is unloaded first. ``enhancer`` is the AImage of the enhancer, for
    which memory is reserved, if the store has it. ``_loads`` includes cancelled loads until they
    end.
    """

    _roots: Sequence[Path]
    _limits: EngineLimits
    _metrics: Metrics
    _events: EventLog
    _clock: Callable[[], float]
    _free: Callable[[], int | None]
    eviction_cost: Callable[[Digest], float] = lambda _: 0.0
    # What was measured of a manifest under a name
    get_measured: Callable[[Digest, Reference], Measurement] = lambda _, __: Measurement()
    enhancer: StoredAImage | None = None
    _models: dict[ModelKey, ModelSlot] = field(default_factory=dict)
    _queue: list[QueuedRequest] = field(default_factory=list)
    _loads: set[asyncio.Task[Runner]] = field(default_factory=set)
    _unloads: set[asyncio.Task[None]] = field(default_factory=set)
    _refused: dict[Digest, UnrunnableError] = field(default_factory=dict)
    # Bytes of GPUs, by place
    _device_memory: dict[int, int] = field(default_factory=dict)
    # GPUs that are not used, by place
    _broken: set[int] = field(default_factory=set)
    # Models of pictures take memory that this machine's models do not share: that of a GPU
    _is_discrete: bool = False
    # The compute type of image models, once one was loaded
    _dtype: str | None = None
    # The seconds of loads
    _loading: Pace = field(default_factory=Pace)
    # A lack of memory for the enhancer was logged.
    _is_reported: bool = False

    @property
    def models(self) -> list[ModelSlot]:
        """The models that are loaded or requested."""
        return list(self._models.values())

    def list_loaded(self) -> list[ModelSlot]:
        """Return the models in memory, most recently used first."""
        return sorted(
            (model for model in self.models if model.is_ready), key=lambda model: -model.last_used
        )

    def find_loaded(self, digest: Digest) -> StoredAImage | None:
        """Return an AImage that a model in memory has served."""
        for model in self._models.values():
            if model.is_ready and (variant := model.variants.get(digest)) is not None:
                return variant.stored
        return None

    def build_key(self, reference: Reference, stored: StoredAImage) -> ModelKey:
        """Return the key of the model that serves an AImage."""
        if find_runtime(stored.aimage) is not None:
            return ModelKey(stored.descriptor.digest)
        return ModelKey(stored.aimage.base_digest, self._limits.get_backend(str(reference)))

    # -- the queue

    def enter(self, request: QueuedRequest, stored: StoredAImage) -> ModelSlot:
        """Queue a request, ordered by its number.

        Raises UnrunnableError: the files of the model were refused before.
        """
        if (refused := self._refused.get(stored.descriptor.digest)) is not None:
            raise UnrunnableError(refused.message, **refused.advice)
        model = self._get_slot(request, stored)
        if model.arrival and model.digest != stored.descriptor.digest:
            # The blobs of this AImage are there: it does not wait for those of the other one
            self.unload(model, "room")
            model.reference, model.stored = request.reference, stored
        model.add(request.reference, stored)
        request.stored, model.arrival = stored, {}
        model.users += 1
        if (prepared := request.model) is not None:
            self._forget(prepared)
        request.model = model
        if model.load is not None:
            request.stage = "loading"
            request.moved.set()
        self._queue.append(request)
        self._queue.sort(key=lambda queued: queued.number)
        self.arrange()
        return model

    def prepare(
        self, request: QueuedRequest, stored: StoredAImage, parameters: ModelRequest | None
    ) -> None:
        """Begin to load the model of a request whose blobs are arriving, if there is room.

        Other models have priority: their loads end this one, and their requests come first.
        """
        key = self.build_key(request.reference, stored)
        existing = [each for each in self.models if replace(each.key, place=0) == key]
        is_loading = any(each.load or each.runner for each in existing)
        if not is_loading and not self._has_room(request.reference, stored):
            return
        model = self._get_slot(request, stored)
        model.users += 1
        request.model = model
        if not is_loading:
            model.add(request.reference, stored)
            model.arrival = {"document": stored.manifest.raw.decode()}
            if isinstance(parameters, GenerateRequest):
                model.arrival["request"] = parameters.to_json()
            plan = self._plan(model)
            self._load(model, 0 if plan is None else plan.reserved)

    def _has_room(self, reference: Reference, stored: StoredAImage) -> bool:
        """Return True if a model can be loaded at once, without unloading another."""
        if self._loads or self._queue or self._unloads:
            return False
        key = self.build_key(reference, stored)
        plan = self._plan(ModelSlot(reference, stored, key, clock=self._clock))
        return plan is not None and not plan.evicted

    def _is_enhancer(self, model: ModelSlot) -> bool:
        return str(model.reference) == self._limits.enhancer

    @property
    def capacity(self) -> int:
        """The number of models that can serve requests at once."""
        loaded = sum(not self._is_enhancer(model) for model in self.list_loaded())
        return self._limits.models or max(1, loaded)

    @property
    def room(self) -> int | None:
        """The bytes for a further model beside the loaded ones; None if they are unknown."""
        most = self._limits.models
        if most is not None and sum(map(self._counts, self.list_loaded())) >= most:
            return 0
        rooms = [self._find_room(memory) for memory in self._list_memories()]
        return None if None in rooms else max(room or 0 for room in rooms)

    def _find_room(self, memory: Memory) -> int | None:
        budget = self._find_budget(memory)
        if budget is None:
            return None
        models = [self._describe_beside(each, memory) for each in self.list_loaded()]
        reserve = self._compute_reserve(*self.list_loaded()) if memory is None else 0
        return max(0, budget - reserve - sum(model.need for model in models))

    @property
    def budget(self) -> int | None:
        """The bytes of memory for all models of pictures, on all GPUs; None if unknown."""
        budgets = [self._find_budget(memory) for memory in self._list_memories()]
        return None if None in budgets else sum(budget or 0 for budget in budgets)

    def _list_memories(self) -> list[Memory]:
        """Return the memories that models of pictures take."""
        return [*range(len(self._limits.places))] if self._is_discrete else [None]

    def _find_budget(self, memory: Memory) -> int | None:
        """Return the bytes for models in a memory."""
        if self._limits.memory is not None:
            return self._limits.memory
        known = self._device_memory
        if self._is_discrete and memory is None:
            return machine.read_memory_limit()
        # The GPUs of a machine are most often alike
        size = known.get(memory or 0) or max(known.values(), default=0)
        return size or machine.read_memory_limit()

    def _find_memory(self, model: ModelSlot) -> Memory:
        """Return the memory that a model takes."""
        if model.runner is not None:
            return model.key.place if model.runner.is_discrete else None
        return model.key.place if self._is_discrete and not model.is_text else None

    def _list_beside(self, model: ModelSlot) -> list[ModelSlot]:
        """Return the loaded models that take the same memory."""
        memory = self._find_memory(model)
        return [each for each in self.list_loaded() if self._find_memory(each) == memory]

    def _describe_beside(self, model: ModelSlot, memory: Memory) -> LoadedModel:
        """Describe a model; its need is 0 if it takes other memory."""
        description = self._describe(model)
        is_same = self._find_memory(model) == memory
        return description if is_same else replace(description, need=0)

    def _counts(self, model: ModelSlot) -> bool:
        """Return True if a model counts for the largest number."""
        return not self._is_enhancer(model)

    def _get_slot(self, request: QueuedRequest, stored: StoredAImage) -> ModelSlot:
        """Return the model for a request: on several GPUs, the one that is free soonest."""
        reference, keep_alive = request.reference, self._limits.keep_alive
        key = self.build_key(reference, stored)
        if self._is_discrete and find_runtime(stored.aimage) is None:
            keys = (replace(key, place=place) for place in range(len(self._limits.places)))
            key = min(
                (each for each in keys if each.place not in self._broken), key=self._rate_place
            )
        if (model := self._models.get(key)) is None:
            model = ModelSlot(reference, stored, key, keep_alive, clock=self._clock)
            self._models[key] = model
        return model

    def _rate_place(self, key: ModelKey) -> tuple[int, bool, int]:
        """Rate the place of a model: the requests there, if it must be loaded, and its number."""
        model = self._models.get(key)
        there = (each for each in self.models if each.key.place == key.place and not each.is_text)
        users, is_loaded = sum(each.users for each in there), model is not None and model.is_ready
        return users, not is_loaded, key.place

    def _list_copies(self, model: ModelSlot) -> list[ModelSlot]:
        """Return the models of the same AImages on other GPUs."""
        keys = (replace(model.key, place=place) for place in range(len(self._limits.places)))
        copies = (self._models.get(key) for key in keys)
        return [copy for copy in copies if copy is not None and copy is not model]

    def _move(self, request: QueuedRequest, model: ModelSlot) -> ModelSlot:
        """Move a request that waits to a model on another GPU that is free; return its model."""
        if request.is_trial or request.make is None or model.arrival:
            return model
        if model.is_free and model.may_join(request):
            return model
        copies = self._list_copies(model)
        free = [copy for copy in copies if copy.is_free and copy.may_join(request)]
        if not free or request.stored is None:
            return model
        copy = free[0]
        copy.add(request.reference, request.stored)
        # Its load goes on: there may be more requests
        model.users, copy.users, request.model = model.users - 1, copy.users + 1, copy
        self._drop(model)
        return copy

    def _forget(self, model: ModelSlot) -> None:
        """Remove a user of a model, and the model if it was loaded for this user's pull only."""
        model.users -= 1
        is_alone = model.load is not None or bool(model.arrival) or model.keep_alive <= 0
        if not model.users and is_alone:
            self.unload(model, "idle")
        self._drop(model)

    def estimate_loads(self) -> float | None:
        """Return the seconds to load what requests wait for; None if they are unknown."""
        total, models = 0.0, {request.model for request in self._queue}
        for model in models:
            if model is None or model.is_ready:
                continue
            measured = self.get_measured(model.digest, model.reference).load
            seconds = measured or self._loading.seconds
            if seconds is None:
                return None
            total += seconds
        return total

    def count_ahead(self, request: QueuedRequest) -> int:
        """Return the number of requests ahead of this one."""
        return sum(queued.number < request.number for queued in self._queue)

    def free(self, request: QueuedRequest) -> None:
        """Serve the next request: of this one, only pictures are still encoded."""
        if request.model is not None:
            request.model.served.discard(request)
            self.arrange()

    def leave(self, request: QueuedRequest) -> None:
        """Remove a request that has ended."""
        model, request.model = request.model, None
        if model is None:
            return
        if request in self._queue:
            self._queue.remove(request)
        model.served.discard(request)
        model.last_used = self._clock()
        if request.keep_alive is not None:
            model.keep_alive = request.keep_alive
        for cancellation in model.runner.cancellations if model.runner is not None else ():
            cancellation.add_done_callback(lambda _: self.arrange())
        self._forget(model)
        self._release_excess()
        self.arrange()

    def arrange(self) -> None:
        """Serve the next requests and begin the next load."""
        # Memories for which a request waits, and models that first serve one alone
        full: set[Memory] = set()
        closed: set[ModelSlot] = set()
        for request in list(self._queue):
            model = request.model
            if model is None or request.error is not None:
                continue
            model = self._move(request, model)
            memory = self._find_memory(model)
            if model.is_ready and (request.make is None or request.is_trial):
                self._start(request, model)
            elif model.is_ready:
                if not model.may_join(request):
                    closed.add(model)
                is_open = model.is_free and memory not in full and model not in closed
                if is_open and self._may_start(request, model):
                    model.served.add(request)
                    self._start(request, model)
            elif model.load is None and memory not in full and not self._begin(model):
                full.add(memory)
        self._metrics.show_models(model.reference.repository for model in self.list_loaded())

    def _may_start(self, request: QueuedRequest, model: ModelSlot) -> bool:
        """Return True unless others come first, or a suspect would be served with another one."""
        if self._has_share(request, model):
            return False
        if request.is_suspect:
            return not (model.served or (model.runner is not None and model.runner.cancellations))
        return not any(
            other_request.is_suspect
            for other_request in (*model.served, *self._list_waiting(model))
        )

    def _has_share(self, request: QueuedRequest, model: ModelSlot) -> bool:
        """Return True if the caller has as many places as it may while another caller waits."""
        caller = request.caller
        count = sum(served.caller == caller for served in model.served)
        is_full = model.runner is not None and count >= compute_share(model.runner.parallel)
        return is_full and any(
            waiting.caller != caller and not waiting.is_trial
            for waiting in self._list_waiting(model)
        )

    def clear_suspects(self, model: ModelSlot) -> None:
        """Serve the suspects of a model together again, as another request crashed its process."""
        for request in self._list_waiting(model):
            request.is_suspect = False

    def _start(self, request: QueuedRequest, model: ModelSlot) -> None:
        self._queue.remove(request)
        request.runner = model.runner
        request.stage = "writing" if request.is_text else "drawing"
        request.turn.set()
        request.moved.set()

    # -- loads and unloads

    def _begin(self, model: ModelSlot) -> bool:
        """Load a model, or unload an idle one for it; return False if all models are busy."""
        if self._loads:
            for loading in self.models:
                if loading.arrival and loading.load is not None:
                    self.unload(loading, "room")
            # One load at a time; this model is next
            return True
        if self._unloads:
            # Their memory will be free
            return True
        if (plan := self._plan(model)) is None:
            # Copies of models that sleep take the machine's memory
            return self._find_memory(model) is None and self._end_sleepers()
        models: dict[Hashable, ModelSlot] = {each.key: each for each in self.list_loaded()}
        for evicted in plan.evicted:
            self._evict(models[evicted.key], model)
        if not plan.evicted:
            self._load(model, plan.reserved)
        return True

    def _plan(self, model: ModelSlot) -> LoadPlan | None:
        """Plan the load of a model beside those that are loaded."""
        memory = self._find_memory(model)
        loaded = [self._describe_beside(each, memory) for each in self._list_in_order()]
        # What other programs take of a GPU is not known: a load that fails unloads others
        free = self._free() if memory is None else None
        reserve = self._compute_reserve(model, *self.list_loaded()) if memory is None else 0
        room = MemoryRoom(self._find_budget(memory), free, self._limits.models)
        return plan_load(self._describe(model), loaded, room, reserve)

    def _compute_reserve(self, *models: ModelSlot) -> int:
        """Return the bytes to reserve for the enhancer; 0 if it is one of the models."""
        enhancer = self.enhancer
        if enhancer is None or any(each.digest == enhancer.descriptor.digest for each in models):
            return 0
        return estimate_need(enhancer, self._dtype)

    def _predict_dtype(self) -> str:
        """Return the compute type of image models: that of one that was loaded, or the default."""
        limits = self._limits
        is_gpu = may_have_gpu() and limits.device != "cpu"
        return self._dtype or choose_dtype_name(limits.dtype, is_gpu=is_gpu)

    def _describe(self, model: ModelSlot) -> LoadedModel:
        size = 0 if model.runner is None else model.runner.size
        measured = self.get_measured(model.digest, model.reference).size
        dtype = self._dtype if model.is_text else self._predict_dtype()
        need = max(size, measured, estimate_need(model.stored, dtype))
        return LoadedModel(model.key, need, model.is_idle, self._counts(model))

    def _list_in_order(self) -> list[ModelSlot]:
        """Return the loaded models in the order of eviction; the enhancer is the last.

        That of the least cost is the first, then the one idle for longest.
        """
        return sorted(
            self.list_loaded(),
            key=lambda model: (
                self._is_enhancer(model),
                max(map(self.eviction_cost, model.variants), default=0.0),
                model.last_used,
            ),
        )

    def _select_idle(self, memory: Memory = None) -> ModelSlot | None:
        """Return the model to unload from a memory; None if all are busy."""
        models = (each for each in self._list_in_order() if self._find_memory(each) == memory)
        return next((model for model in models if model.is_idle), None)

    def _load(self, model: ModelSlot, reserved: int) -> None:
        _log.info("loading", extra={"model": str(model.reference)})
        model.load = load = asyncio.create_task(self._run(model, reserved))
        self._share_memory(model)
        self._loads.add(load)
        load.add_done_callback(partial(self._finish_load, model, self._clock()))
        for request in self._list_waiting(model):
            request.stage = "loading"
            request.moved.set()

    def _release_excess(self) -> None:
        """Unload an idle model if the processes take more memory than was estimated."""
        in_order = self._list_in_order()
        for memory in {self._find_memory(model) for model in in_order}:
            models = [model for model in in_order if self._find_memory(model) == memory]
            if len(models) < 2:
                continue
            # It may be read from files
            budget = self._find_budget(memory)
            if budget is None or sum(self._describe(model).need for model in models) <= budget:
                continue
            if idle := next((model for model in models[:-1] if not model.users), None):
                self.unload(idle, "memory")

    def _share_memory(self, *loading: ModelSlot) -> None:
        """Leave the memory of each loaded model to it, and the rest to any of them."""
        models = [*self.list_loaded(), *loading]
        for memory in {self._find_memory(model) for model in models}:
            own = [model for model in models if self._find_memory(model) == memory]
            needs = {model.key: self._describe(model).need for model in own}
            reserve = self._compute_reserve(*models) if memory is None else 0
            total, budget = sum(needs.values()), self._find_budget(memory)
            if budget is None or total + reserve <= budget:
                total += reserve
            for model in own:
                if model.runner is not None and not model.is_text:
                    model.runner.reserve(total - needs[model.key])

    async def _run(self, model: ModelSlot, reserved: int) -> Runner:
        name = pin_name(model.reference, model.stored)
        if (sleeper := await self._wake_up(model, name, reserved)) is not None:
            return sleeper
        content = self._roots, name, model.stored.descriptor
        limits = replace(self._limits, device=self._limits.places[model.key.place])
        start = partial(Runner.start, *content, limits, model.arrival)
        try:
            return await start(reserved)
        except NoMemoryError:
            if not await self._unload_idle(model):
                raise
            while await self._unload_idle(model):
                pass
            return await start(sum(self._describe(busy).need for busy in self._list_beside(model)))

    async def _wake_up(self, model: ModelSlot, name: str, reserved: int) -> Runner | None:
        """Return the process of a sleeping model once it is loaded; None if there is none."""
        sleeper, model.sleeper = model.sleeper, None
        if sleeper is not None and sleeper.is_alive:
            # Otherwise a new process is started, and tells why it fails
            with contextlib.suppress(AImageError):
                await sleeper.wake_up(name, self._limits, reserved)
                return sleeper
        return None

    async def _unload_idle(self, successor: ModelSlot) -> bool:
        """Unload the model that was idle longest for another one; return False if none is idle."""
        if (idle := self._select_idle(self._find_memory(successor))) is None:
            return False
        await _wait([self._evict(idle, successor)])
        return True

    def _evict(self, idle: ModelSlot, successor: ModelSlot) -> asyncio.Task[Any] | None:
        """Unload a model for another one."""
        if not self._is_reported and (self._is_enhancer(idle) or self._is_enhancer(successor)):
            self._is_reported = True
            text = "the memory has no room for the enhancer beside a model: each unloads the other"
            facts = {"loading": str(successor.reference), "unloading": str(idle.reference)}
            _log.warning(text, extra=facts)
        count = sum(not self._is_enhancer(model) for model in self.list_loaded())
        is_full = self._limits.models is not None and count >= self._limits.models
        return self.unload(idle, "room" if is_full else "memory")

    def _finish_load(self, model: ModelSlot, started: float, load: asyncio.Task[Runner]) -> None:
        self._loads.discard(load)
        model.load = None
        if load.cancelled():
            pass
        elif (error := load.exception()) is not None:
            if not isinstance(error, AImageError):
                _log.error("cannot load a model", exc_info=error)
                error = ModelError(f"cannot load the model: {type(error).__name__}")
            if isinstance(error, UnrunnableError):
                self._refused[model.digest] = error
                while len(self._refused) > _MAX_REFUSED:
                    del self._refused[next(iter(self._refused))]
            if not self._leave_place(model, error):
                self._refuse_waiting(model, error)
        else:
            self._finish_start(model, load.result(), self._clock() - started)
        self._drop(model)
        self.arrange()

    def _leave_place(self, model: ModelSlot, error: AImageError) -> bool:
        """Use a GPU no more on which a load failed, unless another one may not do better.

        The first one remains. Returns False if the requests for the model have to end.
        """
        place = model.key.place
        if not place or isinstance(error, (UnrunnableError, NoMemoryError)):
            return False
        self._broken.add(place)
        facts = {"device": str(self._limits.places[place]), "reason": error.message}
        _log.warning("a GPU is not used any more", extra=facts)
        for request in self._list_waiting(model):
            if request.stored is not None:
                model.users -= 1
                request.model = copy = self._get_slot(request, request.stored)
                copy.add(request.reference, request.stored)
                copy.users += 1
        return True

    def _refuse_waiting(self, model: ModelSlot, error: AImageError) -> None:
        """End the requests for the AImage that cannot be loaded; its base may be loaded for others.

        An adapter that is packed with it may be damaged.
        """
        digest, others = model.digest, list[QueuedRequest]()
        for request in self._list_waiting(model):
            is_same = request.stored is None or request.stored.descriptor.digest == digest
            if is_same or isinstance(error, NoMemoryError):
                request.interrupt(error)
            else:
                others.append(request)
        if others and others[0].stored is not None:
            model.reference, model.stored = others[0].reference, others[0].stored
        model.variants.pop(digest, None)

    def _finish_start(self, model: ModelSlot, runner: Runner, seconds: float) -> None:
        model.runner, model.last_used = runner, self._clock()
        if runner.total:
            self._device_memory[model.key.place] = runner.total
        if not model.is_text:
            self._dtype, self._is_discrete = runner.dtype, runner.is_discrete
        runner.ended.add_done_callback(lambda _: self._handle_exit(model, runner))
        self._metrics.loads.observe(seconds)
        self._loading.observe(seconds)
        # A process that slept is ready sooner
        model.load_seconds = model.load_seconds or seconds
        self._events.record("load", model=str(model.reference), seconds=round(seconds, 3))
        if model.is_stopped:
            model.unloading = self.unload(model, "stopped")

    def _handle_exit(self, model: ModelSlot, runner: Runner) -> None:
        if model.sleeper is runner:
            model.sleeper = None
            self._drop(model)
        if model.runner is not runner:
            # It was unloaded on purpose
            return
        model.runner = None
        model.served.clear()
        self._metrics.evictions.labels("died").inc()
        self._events.record("evict", model=str(model.reference), reason="died")
        self._drop(model)
        self.arrange()

    def unload(
        self, model: ModelSlot, reason: str, *, may_sleep: bool = True
    ) -> asyncio.Task[Any] | None:
        """Unload a model or cancel its load; return the task that ends when its memory is free.

        One that is unloaded for another one may sleep, if it is on a GPU with its own memory.
        """
        load, runner = model.load, model.runner
        # A second cancellation would not wait for the process
        if load is not None and not load.cancelling():
            load.cancel()
        model.runner = None
        model.served.clear()
        is_for_other = reason in ("room", "memory") and not model.is_stopped
        may_sleep = may_sleep and is_for_other and runner is not None and runner.is_discrete
        if may_sleep or reason == "sleep":
            model.sleeper = runner
        self._drop(model)
        if runner is None:
            return load
        self._metrics.evictions.labels(reason).inc()
        self._events.record("evict", model=str(model.reference), reason=reason)
        self._share_memory()
        leave = self._put_to_sleep(model, runner) if model.sleeper is runner else runner.stop()
        task = asyncio.create_task(leave)
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        task.add_done_callback(lambda _: self.arrange())
        return task

    async def _put_to_sleep(self, model: ModelSlot, runner: Runner) -> None:
        """Let a model leave its GPU; of too many that sleep, the one used least recently ends."""
        # Elsewhere the files of the weights are in the same memory
        room = (self._free() or 0) // 2 if runner.is_discrete else 0
        if not await runner.sleep(room):
            model.sleeper = None
            await runner.stop()
        asleep = [each for each in self.models if each.sleeper is not None]
        asleep.sort(key=lambda each: -each.last_used)
        await _wait([self._end_sleep(each) for each in asleep[_MAX_ASLEEP:]])
        self._drop(model)

    def _end_sleep(self, model: ModelSlot) -> asyncio.Task[None] | None:
        """End the process of a sleeping model; return the task that ends with it."""
        sleeper, model.sleeper = model.sleeper, None
        self._drop(model)
        if sleeper is None:
            return None
        task = asyncio.create_task(sleeper.stop())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        task.add_done_callback(lambda _: self.arrange())
        return task

    def _end_sleepers(self) -> bool:
        """End the processes of all models that sleep; return True if there are any."""
        asleep = [model for model in self.models if model.sleeper is not None]
        for model in asleep:
            self._end_sleep(model)
        return bool(asleep)

    async def sleep(self, model: ModelSlot) -> None:
        """Let a model leave its device; its process remains until its keep-alive is over."""
        model.last_used = self._clock()
        await _wait([self.unload(model, "sleep")])

    async def stop(self, model: ModelSlot) -> None:
        """Unload a model at once; it serves no further requests."""
        model.is_stopped = True
        if self._models.get(model.key) is model:
            # A new request gets a new slot, and loads it again
            del self._models[model.key]
        await _wait([self.unload(model, "stopped"), self._end_sleep(model)])
        # Set if the load ended during the cancellation
        await _wait([model.unloading])

    async def expire(self) -> None:
        """Unload idle models whose keep-alive has expired."""
        idle = [model for model in self.list_loaded() if not model.users and not model.remaining]
        asleep = [each for each in self.models if each.sleeper is not None]
        expired = [model for model in asleep if not model.users and not model.remaining]
        tasks = [self.unload(model, "idle") for model in idle]
        await _wait([*tasks, *map(self._end_sleep, expired)])

    async def end(self) -> None:
        """Unload all models and wait until they have ended."""
        for model in self.models:
            self.unload(model, "shutdown")
            self._end_sleep(model)
        while tasks := [*self._loads, *self._unloads]:
            await _wait(tasks)

    def _drop(self, model: ModelSlot) -> None:
        """Remove a model that is neither in memory nor requested."""
        has_process = model.runner is not None or model.sleeper is not None
        is_needed = model.users or model.load is not None or has_process
        if not is_needed and self._models.get(model.key) is model:
            del self._models[model.key]

    def _list_waiting(self, model: ModelSlot) -> list[QueuedRequest]:
        return [request for request in self._queue if request.model is model]


async def _wait(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Wait for all tasks without raising their errors; cancellation does not cancel them."""
    if waited := [task for task in tasks if task is not None]:
        await asyncio.wait(waited)
