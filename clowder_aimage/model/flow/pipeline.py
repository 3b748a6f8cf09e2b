"""The pipeline of all families: encode, denoise, decode.

Follows the pipelines of diffusers 0.42, but makes pictures one after another, unless the device was
measured to gain by several at once: on a CPU two took 0.93 of the time of two, with twice the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.errors import NoMemoryError, UsageError
from clowder_aimage.generation.effect import compute_schedule_steps
from clowder_aimage.generation.request import GenerateRequest, compute_first_step
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.flow.array_library import ArrayLibrary
from clowder_aimage.model.flow.conditioning import Conditioning
from clowder_aimage.model.flow.denoiser import Denoiser, Drawing, plan_previews
from clowder_aimage.model.flow.family import FlowFamily, check_by_family, list_texts
from clowder_aimage.model.flow.forward_pass import PassRecord, StepPasses
from clowder_aimage.model.flow.memory_budget import Module, Stage
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.pass_computer import PassComputer
from clowder_aimage.model.flow.picture_encoder import PictureEncoder
from clowder_aimage.model.flow.picture_size import check_arrays
from clowder_aimage.model.flow.picture_start import find_painted_cells
from clowder_aimage.model.flow.prompt_encoder import PromptEncoder
from clowder_aimage.model.flow.scheduler import Schedule
from clowder_aimage.model.flow.stage_plan import (
    count_step_pixels,
    estimate_least_memory,
    plan_pictures,
    plan_stages,
)
from clowder_aimage.model.flow.state import PipelineState, UsedControl
from clowder_aimage.model.pipeline import (
    Image,
    PictureInput,
    PipelineEvent,
    Preview,
    Step,
    StoredControlNet,
)
from clowder_aimage.model.rounding import merge_forms

# The prompt of pictures that only measure, or load kernels
_WARM_UP = "a picture"
# Of a request whose pictures may be computed with those of others
OpenEvent = PipelineEvent | StepPasses


class FlowPipeline:
    """A model that makes the pictures of requests, step by step.

    ``family`` has the differences between models, and is frozen; ``networks`` computes; ``state``
    changes with requests.
    """

    def __init__(
        self, family: FlowFamily, networks: FlowNetworks, state: PipelineState | None = None
    ) -> None:
        self.family, self.networks = family, networks
        self.state = state or PipelineState()
        self.prompts = PromptEncoder(family, networks, self.state)
        self.pictures = PictureEncoder(networks, family.normalize)
        self.denoiser = Denoiser(family, networks)
        self.passes = PassComputer(family, networks)
        # The table of batches is measured once the code of passes is compiled
        self._is_unmeasured = False

    @property
    def library(self) -> ArrayLibrary:
        """Return the library that computes the networks."""
        return self.networks.library

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that adapters may change, by ``component/name``."""
        return self.networks.shapes

    def use_adapters(self, uses: Sequence[Use]) -> None:
        """Use exactly these adapters, each with a strength, from now on.

        They are applied on the next use of a network, which also raises as ``Adaptation.apply``
        does. Captions are cached for each combination of adapters that changes them.
        """
        self.state.adapters = tuple(uses)
        for module in (self.networks.text_encoder, self.networks.transformer):
            if module.adaptation is not None:
                module.adaptation.use(uses)

    @property
    def fixed_adapters(self) -> tuple[Use, ...]:
        """Return the adapters in use, if they change weights; an empty tuple otherwise.

        In turns with pictures that have others, weights would be changed at every step.
        """
        adapters, transformer = self.state.adapters, self.networks.transformer
        adaptation = transformer.adaptation
        can_mix = transformer.is_loaded and adaptation is not None and adaptation.can_mix(adapters)
        return () if can_mix or adaptation is None else adapters

    def use_control(self, stored: StoredControlNet) -> None:
        """Use a control network for requests that name one, from now on.

        Raises as ``FlowNetworks.open_control``.
        """
        before = self.state.control
        if before is not None and before.stored is stored:
            return
        # The old network is released last: an error here leaves it in use
        self.state.control = UsedControl(stored, self.networks.open_control(stored))
        if before is not None:
            self.networks.budget.forget(before.module)

    def set_memory(
        self,
        policy: str,
        memory: int | None,
        total: int | None = None,
        *,
        text_encoder: str | None = None,
        limit: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Set the policy of all networks, or another of the text encoder, and the budget."""
        budget = self.networks.budget
        budget.set_policies(policy, {self.networks.text_encoder: text_encoder or policy})
        budget.set_memory(memory, limit=limit, is_last=is_last)
        budget.total = total or budget.total

    def set_share(self, memory: int | None) -> None:
        """Change the memory for this process; it holds from the next request."""
        self.networks.budget.memory = memory

    def preload(self, request: GenerateRequest) -> str:
        """Load all networks if they can stay in memory while the request's pictures are made.

        A GPU makes one step of a picture then, as it loads its kernels when they are first used.
        Returns a description of the networks that stay. Raises as ``ModelWeights.apply`` does.
        """
        stages, budget = self._list_all_stages(request), self.networks.budget
        self._is_unmeasured = False
        if not budget.keeps(stages):
            # Pictures in turns would load networks again and again
            self.library.batches = BatchTable()
        elif budget.is_last:
            self._load_batches()
        else:
            for stage in stages:
                budget.use(stage)
            if self.library.is_warmed_up:
                self._warm_up(request)
            is_known = self._load_batches()
            self._is_unmeasured = self.library.is_warmed_up and not is_known
            self.measure_batches()
        return budget.describe(stages)

    def measure_batches(self) -> bool:
        """Measure how many passes to compute at once, if that is due, while no picture is made.

        It is once the code of passes is compiled; the form of passes would change otherwise.
        Returns True if it was measured.
        """
        transformer = self.networks.transformer
        if not (self._is_unmeasured and transformer.is_loaded and transformer.get().is_settled):
            return False
        self._is_unmeasured = False
        self.use_adapters(())
        return self._load_batches(self._time_passes)

    def _load_batches(self, time_passes: Callable[[int, int], float] | None = None) -> bool:
        weights = self.networks.weights["transformer"]
        codes = sorted({str(weights.get_code_type(name)) for name in weights})
        return self.library.load_batches(f"{self.family.transformer} {codes}", time_passes)

    def sleep(self) -> None:
        """Release all that the device has: networks, and captions. Requests load them again."""
        self.state.captions.clear()
        self._is_unmeasured = False
        for module in self.networks.budget.modules:
            module.release()

    def copy_to_host(self, room: int, is_stopped: Callable[[], bool]) -> None:
        """Copy weights to ``room`` bytes of the machine's memory, until ``is_stopped``.

        A load copies them to a discrete device from there. Raises StoreError.
        """
        self.library.host_room = room
        for module in self.networks.budget.modules:
            module.keep(is_stopped)

    def _warm_up(self, request: GenerateRequest) -> None:
        """Make a picture of the request's size in one step."""
        sides = {"width": request.sampling.width, "height": request.sampling.height}
        # The request for this size fails then, with the same error
        with suppress(NoMemoryError):
            for _ in self.generate(GenerateRequest.of(_WARM_UP, steps=1, **sides)):
                pass

    def _time_passes(self, side: int, count: int) -> float:
        """Return the seconds of passes at once, for pictures of a side.

        Raises NoMemoryError; UsageError if the model does not support the side.
        """
        request = GenerateRequest.of(_WARM_UP, steps=1, width=side, height=side)
        self.family.sides.check(request)
        conditioning, schedule = self.build_conditioning(request), self.schedule(request)
        drawings = [
            self.denoiser.begin(request, None, schedule, conditioning, seed)
            for seed in range(count)
        ]
        passes = [drawing.list_passes()[0] for drawing in drawings]
        return self.library.time(partial(self.passes.predict, passes))

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of a request; they are cached. Raises as ``generate`` does."""
        self.check(request)
        self.build_conditioning(request)

    def list_warnings(self, request: GenerateRequest) -> list[str]:
        """Return sentences about parameters without effect in a request. Raises as ``check``."""
        return self.prompts.list_cuts(request)

    def check(self, request: GenerateRequest, pictures: PictureInput | None = None) -> None:
        """Reject a request that this model does not support; change nothing. Raises UsageError.

        ``pictures`` are those of a request with an image.
        """
        family, budget = self.family, self.networks.budget
        needs = partial(estimate_least_memory, family, self.networks)
        check_by_family(family, request)
        check_arrays(request, family.sides, needs, budget.total)
        for text in list_texts(family, request):
            self.prompts.tokenize(text)
        if pictures is not None and pictures.mask is not None:
            find_painted_cells(pictures.mask, family.vae.scale)
        budget.check(self._list_all_stages(request))

    def _control(self, request: GenerateRequest) -> Module | None:
        """Return the control network of a request; None if it is not loaded, or not needed.

        Raises UsageError: the model has no packed control network.
        """
        if request.control.image is None:
            return None
        if request.control.network is not None:
            current = self.state.control
            return None if current is None else current.module
        if (packed := self.networks.packed_control) is None:
            raise UsageError(
                "this model has no ControlNet of its own",
                hint="name one that fits the model",
                parameter="controlnet",
            )
        return packed

    def list_stages(self, request: GenerateRequest) -> tuple[Stage, Stage, Stage]:
        """Return the parts of a generation, with estimates of their memory."""
        return plan_stages(self.family, self.networks, request, self._control(request))

    def _list_all_stages(self, request: GenerateRequest) -> list[Stage]:
        return [*plan_pictures(self.pictures, request), *self.list_stages(request)]

    def generate(
        self, request: GenerateRequest, pictures: PictureInput | None = None
    ) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        ``pictures`` has the picture to begin with, in the request's size, or references of any
        size.

        Raises:
            UsageError: Immediately, if this model does not support the request.
            ModelError: Later, if the model computes values that are not finite.
        """
        return self.complete(self.open(request, pictures))

    def complete(
        self, events: Generator[OpenEvent, None, None]
    ) -> Generator[PipelineEvent, None, None]:
        """Yield the events of ``open``; compute its passes."""
        for event in events:
            if isinstance(event, StepPasses):
                self.compute([event])
            else:
                yield event

    def compute(self, steps: Sequence[StepPasses]) -> None:
        """Compute the passes that generations wait for, those of several at once if it pays."""
        self.passes.compute(steps)

    def open(
        self, request: GenerateRequest, pictures: PictureInput | None = None
    ) -> Generator[OpenEvent, None, None]:
        """Yield as ``generate``; and passes, which ``compute`` computes before the next event.

        Raises as ``generate``.
        """
        # Not a generator: these errors are raised by the call, not by the first step
        self.check(request, pictures)
        count = 0 if pictures is None else len(pictures.references)
        if count < len(request.input.references):
            raise UsageError(
                f"{count} of {len(request.input.references)} reference pictures are given"
            )
        if request.control.image is not None and self._control(request) is None:
            raise UsageError(f"the ControlNet {request.control.network} is not loaded")
        pictures = None if pictures is None else self.family.fit(pictures)
        return self._generate(request, self.schedule(request), pictures, self.state.adapters)

    def _generate(
        self,
        request: GenerateRequest,
        schedule: Schedule,
        pictures: PictureInput | None,
        adapters: tuple[Use, ...],
    ) -> Generator[OpenEvent, None, None]:
        # Those of a later request may be in use
        self.use_adapters(adapters)
        conditioning, budget = self.build_conditioning(request), self.networks.budget
        encoded = None
        if pictures is not None:
            parts = request, pictures, self.pictures, self._control(request)
            encoded, inputs = self.family.encode_pictures(*parts)
            conditioning = replace(conditioning, inputs=inputs)
        _, denoise, decode = self.list_stages(request)
        begin = partial(self.denoiser.begin, request, encoded, schedule, conditioning)
        # Pictures that are finished, and are decoded later
        waiting: list[tuple[int, Drawing]] = []
        numbers, record = range(request.output.n), PassRecord()
        for some in _split(numbers, self._count_at_once(request, conditioning)):
            drawings = [begin(request.sampling.seed + number) for number in some]
            budget.use(denoise)
            step = StepPasses([], adapters, denoise, count_step_pixels(request), record)
            yield from self._draw(request, some, drawings, step)
            waiting += zip(some, drawings, strict=True)
            if some[-1] == numbers[-1]:
                budget.finish(*denoise.modules)
            elif not budget.keeps((denoise, decode)):
                # The transformer is released once, not after each picture
                continue
            budget.use(decode)
            for number, drawing in waiting:
                yield self._decode(request, number, drawing, decode, record)
            waiting.clear()

    def _count_at_once(self, request: GenerateRequest, conditioning: Conditioning) -> int:
        """Return how many pictures of a request are computed at once.

        Previews do not tell of which picture they are.
        """
        is_cached = bool(request.sampling.cache_threshold)
        if request.output.previews or is_cached or conditioning.inputs is not None:
            return 1
        limit = self.library.batches.get_limit(request.sampling.pixels)
        return max(1, limit // (1 if conditioning.negative is None else 2))

    def _draw(
        self, request: GenerateRequest, numbers: range, drawings: list[Drawing], step: StepPasses
    ) -> Iterator[OpenEvent]:
        """Take the steps of pictures, and yield them, each after its passes, as ``step``."""
        total, count = drawings[0].total, len(drawings)
        previewed = sorted(plan_previews(request.output.previews, total))
        for index in range(1, total + 1):
            step.passes = [each for drawing in drawings for each in drawing.list_passes()]
            yield step
            step.check()
            for place, (number, drawing) in enumerate(zip(numbers, drawings, strict=True), 1):
                drawing.take_step()
                done = numbers[0] * total + (index - 1) * count + place
                yield Step(index, total, number, done)
                if index in previewed:
                    yield self._preview(number, drawing, previewed.index(index), step)

    def _preview(self, picture: int, drawing: Drawing, number: int, step: StepPasses) -> Preview:
        parts = drawing.before, drawing.latents, drawing.schedule, drawing.count - 1
        with self.networks.budget.measure(step.stage, step.pixels):
            return Preview(self.denoiser.preview(*parts), number, picture)

    def _decode(
        self,
        request: GenerateRequest,
        number: int,
        drawing: Drawing,
        stage: Stage,
        record: PassRecord,
    ) -> Image:
        """Return a finished picture, which states how it was computed."""
        forms = self.library.forms
        forms.clear()
        with self.networks.budget.measure(stage, request.sampling.pixels):
            pixels = self.networks.decode(drawing.latents)
        form = merge_forms({*record.forms, *forms})
        return Image(pixels, request.sampling.seed + number, number, record.batch, form)

    def schedule(self, request: GenerateRequest) -> Schedule:
        """Return the noise levels of the request's steps, size and shift. Raises UsageError."""
        multiple, steps = self.family.sides.multiple, request.sampling.steps
        tokens = (request.sampling.height // multiple) * (request.sampling.width // multiple)
        if request.input.strength is None:
            return self.family.schedule(steps, tokens, request.sampling.shift)
        if request.input.fine:
            full_steps = compute_schedule_steps(steps, request.input.strength)
            return self.family.schedule(full_steps, tokens, request.sampling.shift).skip_steps(
                full_steps - steps
            )
        first_index = compute_first_step(steps, request.input.strength)
        return self.family.schedule(steps, tokens, request.sampling.shift).skip_steps(first_index)

    def build_conditioning(self, request: GenerateRequest) -> Conditioning:
        """Return the request's texts, encoded and refined. Raises as ``PromptEncoder.encode``."""
        encode, denoise, _ = self.list_stages(request)
        return self.prompts.build_conditioning(request, encode, denoise)


def _split(numbers: range, count: int) -> Iterator[range]:
    """Yield parts of at most ``count`` numbers."""
    for start in range(0, len(numbers), count):
        yield numbers[start : start + count]
