"""The Z-Image pipeline: encode, denoise, decode.

Follows ``ZImagePipeline`` of diffusers 0.42, but makes pictures one after another and never
pads texts (the reference masks its padding). Latents are float32 between steps, whatever the
dtype of the networks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.adaptation import Adaptation, Use
from clowder_aimage.model.backend import mx
from clowder_aimage.model.memory_budget import (
    MemoryBudget,
    Module,
    OffloadedModule,
    Stage,
    decoding,
    transforming,
)
from clowder_aimage.model.pipeline import (
    GenerateRequest,
    Image,
    PictureInput,
    PipelineEvent,
    Preview,
    Sides,
    Step,
    StoredControlNet,
    check_request,
    downsample,
    first_step,
    previews_after,
    to_pixels,
    whole_steps,
)
from clowder_aimage.model.step_cache import StepCache
from clowder_aimage.model.weights import ModelWeights, read_object
from clowder_aimage.model.zimage.config import (
    PATCH,
    TextEncoderConfig,
    TransformerConfig,
    VaeConfig,
)
from clowder_aimage.model.zimage.control import (
    Control,
    ControlModule,
    open_controlnet,
    own_controlnet,
    to_input,
)
from clowder_aimage.model.zimage.flow_scheduler import FlowScheduler, Schedule
from clowder_aimage.model.zimage.latent_colour import colours, has_colours
from clowder_aimage.model.zimage.noise import randn
from clowder_aimage.model.zimage.picture_start import (
    EncodedPicture,
    cells_of,
    start,
)
from clowder_aimage.model.zimage.text_encoder import TextEncoder
from clowder_aimage.model.zimage.tokenizer import Tokenizer
from clowder_aimage.model.zimage.transformer import Caption, Hints, Transformer, padded
from clowder_aimage.model.zimage.vae import Vae, VaeEncoder

K = TypeVar("K")
T = TypeVar("T")
C = TypeVar("C", TextEncoderConfig, TransformerConfig, VaeConfig)
N = TypeVar("N", TextEncoder, Transformer, Vae, VaeEncoder)
CACHED_TEXTS = 32  # the most recently used
CaptionKey = tuple[str, tuple[tuple[str, float], ...]]  # a text, and the adapters that touch it
_CAPTIONING = (
    "text_encoder/",
    *(f"transformer/{part}" for part in ("context_refiner.", "cap_embedder.", "cap_pad_token")),
)
Keep = Callable[[mx.array, float], mx.array]
Caches = tuple[StepCache | None, StepCache | None]
_NO_CACHES: Caches = (None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The captions of a generation; ``negative`` only with guidance.

    ``weight`` is that of the guidance, which is off at times after ``end``; its result is at most
    ``normalization`` times as long as the positive velocity, if that is not 0. ``control`` gives
    hints for both captions.
    """

    positive: Caption
    negative: Caption | None = None
    weight: float = 0.0
    end: float = 1.0
    normalization: float = 0.0
    control: Control | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ZImagePipeline:
    """The networks, loaded when they are used.

    ``skipped`` names the tensors that were left out; ``budget`` decides which networks stay in
    memory after use; ``weights`` are those of the components that adapters may change. ``controls``
    opens a control network, None for the model's own; None if it has none.
    """

    tokenizer: Tokenizer
    text_encoder_module: OffloadedModule[TextEncoder, TextEncoderConfig]
    transformer_module: OffloadedModule[Transformer, TransformerConfig]
    vae_module: OffloadedModule[Vae, VaeConfig]
    picture_encoder: Callable[[], OffloadedModule[VaeEncoder, VaeConfig]]
    controls: Callable[[StoredControlNet | None], ControlModule | None]
    scheduler: FlowScheduler
    dtype: mx.Dtype
    budget: MemoryBudget
    skipped: tuple[str, ...] = ()
    weights: Mapping[str, ModelWeights] = field(default_factory=dict)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _captions: dict[CaptionKey, Caption] = field(default_factory=dict)
    _adapters: list[Use] = field(default_factory=list)
    _control: list[ControlModule] = field(default_factory=list)  # the one that is used, or none

    @classmethod
    def load(
        cls,
        store: BlobFiles,
        aimage: AImage,
        dtype: mx.Dtype,
        *,
        keep_quantized: bool | None = None,
        request: GenerateRequest | None = None,
    ) -> ZImagePipeline:
        """Check every component strictly; ``keep_quantized`` is as in ``ModelWeights.apply``.

        The sides of the first ``request`` are checked first. Headers are read and checked; weights
        are read when a network is used.

        Raises:
            UsageError: The model does not support the sides.
            ModelError: Configurations or weights are invalid, or do not match each other.
            FormatError: A blob is invalid.
        """
        if request is not None:
            _check_sides(store, aimage, request)
        scheduler_file = "scheduler/scheduler_config.json"
        scheduler = FlowScheduler.parse(scheduler_file, read_object(store, aimage, scheduler_file))
        tokenizer = Tokenizer.load(store, aimage)
        skipped: list[str] = []
        opened: dict[str, ModelWeights] = {}

        def module(
            component: str, kind: Callable[[C], N], parse: Callable[..., C]
        ) -> OffloadedModule[N, C]:
            weights = ModelWeights.open(store, aimage, component)
            config = parse(f"{component}/config.json", weights.config)
            how: dict[str, Any] = {"dtype": dtype, "keep_quantized": keep_quantized}
            opened[component] = weights

            def load() -> N:
                network = kind(config)
                weights.apply(network, skip=network.skip, **how)
                return network

            unloaded = kind(config)  # its arrays are never computed
            size, left_out = weights.check(unloaded, skip=unloaded.skip, **how)
            skipped.extend(f"{component}/{name}" for name in left_out)
            adaptation = Adaptation(component, unloaded.sanitize, unloaded.skip, dtype)
            return OffloadedModule(config, size, load, adaptation)

        text_encoder = module("text_encoder", TextEncoder, TextEncoderConfig.parse)
        transformer = module("transformer", Transformer, TransformerConfig.parse)
        vae = module("vae", Vae, VaeConfig.parse)
        _check_fit(text_encoder.config, transformer.config, vae.config)
        budget = MemoryBudget(text_encoder, vae, transformer)

        @cache
        def picture_encoder() -> OffloadedModule[VaeEncoder, VaeConfig]:
            loaded = module("vae", VaeEncoder, VaeConfig.parse)
            budget.modules = (loaded, *budget.modules)
            return loaded

        own = own_controlnet(store, aimage)

        @lru_cache(maxsize=1)  # another network takes its memory
        def control(stored: StoredControlNet | None) -> ControlModule | None:
            found = stored or own
            if found is None:
                return None
            shapes = {
                f"transformer/{name}": shape
                for name, shape in opened["transformer"].shapes().items()
            }
            return open_controlnet(found, transformer.config, shapes, dtype, keep_quantized)

        modules = (text_encoder, transformer, vae, picture_encoder, control)
        del opened["vae"]
        return cls(tokenizer, *modules, scheduler, dtype, budget, tuple(skipped), opened)

    @property
    def text_encoder(self) -> TextEncoder:
        """Return the text encoder, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.text_encoder_module.get()

    @property
    def transformer(self) -> Transformer:
        """Return the transformer, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.transformer_module.get()

    @property
    def vae(self) -> Vae:
        """Return the decoder, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.vae_module.get()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that adapters may change, by ``component/name``."""
        if not self._shapes:
            for component, weights in self.weights.items():
                shapes = weights.shapes().items()
                self._shapes.update({f"{component}/{name}": shape for name, shape in shapes})
        return self._shapes

    def use_adapters(self, uses: Sequence[Use]) -> None:
        """Use these adapters, each with a strength, and no others from now on.

        They are applied when a network is used next. Captions are cached for each combination of
        adapters that changes them. Raises, from then on, also as ``Adaptation.apply`` does.
        """
        self._adapters[:] = uses
        for module in self.budget.modules:
            if module.adaptation is not None:
                module.adaptation.use(uses)

    def use_control(self, stored: StoredControlNet | None) -> None:
        """Use a control network from now on, or the model's own.

        Raises:
            UsageError: The model has none of its own.
            FormatError: The network is of another base model, or damaged.
        """
        found = self.controls(stored)
        if found is None:
            raise UsageError(
                "this model has no ControlNet of its own", hint="name one that fits the model"
            )
        if self._control == [found]:
            return
        found.policy = self.transformer_module.policy
        others = (module for module in self.budget.modules if module not in self._control)
        self.budget.modules = (found, *others)
        self._control[:] = [found]

    def _caption_key(self, text: str) -> CaptionKey:
        """Return the key of a text's caption: adapters of the other layers do not change it."""
        return text, tuple(
            (adapter.key, strength)
            for adapter, strength in self._adapters
            if strength and adapter.touches(_CAPTIONING)
        )

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
        for module in self.budget.modules:
            module.policy = policy
        self.text_encoder_module.policy = text_encoder or policy
        self.budget.set_memory(memory, limit=limit, is_last=is_last)
        self.budget.total = total or self.budget.total

    def preload(self, request: GenerateRequest) -> str:
        """Load all networks if they can stay in memory while the request's pictures are made.

        Returns what stays in memory. Raises as ``ModelWeights.apply`` does.
        """
        stages = self.stages(request)
        if self.budget.keeps(stages) and not self.budget.is_last:
            for stage in stages:
                self.budget.use(stage)
        return self.budget.describe(stages)

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of a request; they are cached. Raises as ``generate`` does."""
        self.check(request)
        self.conditioning(request)

    @property
    def sides(self) -> Sides:
        """Return the supported sides."""
        return _sides(self.transformer_module.config, self.vae_module.config)

    def check(self, request: GenerateRequest) -> None:
        """Reject a request that this model does not support. Raises UsageError."""
        check_request(request, self.sides, self.least_memory, self.budget.total)
        if request.control is not None and request.controlnet is None:
            self.use_control(None)
        for text in _texts(request):
            self.ids(text)
        self.budget.check(self.stages(request))

    def least_memory(self, width: int, height: int) -> int:
        """Return the bytes of the arrays at full size that the decoder has at the same time."""
        narrow, *wide = self.vae_module.config.block_out_channels[:2]
        channels = max(narrow, *wide) + 2 * narrow  # of the last block, and of a convolution in it
        return channels * width * height * self.dtype.size

    def stages(self, request: GenerateRequest) -> tuple[Stage, Stage, Stage]:
        """Return the parts of a generation, with estimates of their memory."""
        pixels, dtype = request.width * request.height, self.dtype
        text, config = self.text_encoder_module.config, self.transformer_module.config
        tokens = max(padded(len(self.tokens(text))) for text in _texts(request))
        length = tokens + padded(pixels // self.sides.multiple**2)
        widest = max(self.vae_module.config.block_out_channels[:2])
        sizes = text.hidden_size, text.intermediate_size, text.num_attention_heads
        encode = transforming(*sizes, tokens, dtype)
        denoise = transforming(config.dim, config.ffn_dim, config.n_heads, length, dtype)
        decodes = request.previews > 0 and not has_colours(self.vae_module.config)
        drawing = "previews" if decodes else "denoise"
        denoise = self.budget.work(drawing, pixels, denoise)
        if request.cache_threshold:
            denoise += StepCache.ARRAYS * len(_texts(request)) * length * config.dim * dtype.size
        decode = self.budget.work("decode", pixels, decoding(widest, pixels, dtype))
        used: tuple[Module, ...] = (self.transformer_module,)
        if request.control is not None and self._control:
            hints = len(self._control[0].config.places) + 1
            used = (*used, *self._control)
            denoise += hints * length * config.dim * dtype.size
        if decodes:
            used, denoise = (*used, self.vae_module), max(denoise, decode)
        return (
            Stage("encode", (self.text_encoder_module,), encode),
            Stage(drawing, used, denoise),
            Stage("decode", (self.vae_module,), decode),
        )

    def generate(
        self, request: GenerateRequest, given: PictureInput | None = None
    ) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        ``given`` is the picture to begin with, of the request's size.

        Raises:
            UsageError: Immediately, if this model does not support the request.
            ModelError: Later, if the model computes values that are not finite.
        """
        self.check(request)
        return self._generate(request, self.schedule(request), given)

    def _generate(
        self, request: GenerateRequest, schedule: Schedule, given: PictureInput | None
    ) -> Generator[PipelineEvent, None, None]:
        conditioning = self.conditioning(request)
        encoded = None
        if given is not None:
            encoded, control = self.inputs(request, given)
            conditioning = replace(conditioning, control=control)
        _, denoise, decode = self.stages(request)
        pixels = request.width * request.height
        waiting: list[tuple[mx.array, int, int]] = []
        for picture in range(request.n):
            seed = request.seed + picture
            latents, keep = self._begin(request, encoded, schedule, seed)
            self.budget.use(denoise)
            with self.budget.measure(denoise, pixels):
                steps = self._steps(request, latents, schedule, conditioning, picture, keep)
                for event, state in steps:
                    yield event
                    latents = state
            waiting.append((latents, seed, picture))
            is_last = picture == request.n - 1
            if is_last:
                self.budget.finish(self.transformer_module, *self._control)
            elif not self.budget.keeps((denoise, decode)):
                continue  # the transformer is released once, not after each picture
            self.budget.use(decode)
            for latents, seed, number in waiting:
                with self.budget.measure(decode, pixels):
                    image = self.decode(latents)
                yield Image(image, seed, number)
            waiting.clear()

    def _begin(
        self,
        request: GenerateRequest,
        encoded: EncodedPicture | None,
        schedule: Schedule,
        seed: int,
    ) -> tuple[mx.array, Keep]:
        """Return the latents before the first step, and what keeps a part of them after each."""
        if encoded is None:
            return mx.array(self.noise(request, seed)), lambda latents, _: latents
        begun = start(encoded, self.vae_module.config, seed, schedule)
        return begun.latents, begun.keep

    def inputs(
        self, request: GenerateRequest, given: PictureInput
    ) -> tuple[EncodedPicture | None, Control | None]:
        """Return the picture to begin with and the control, evaluated.

        A control network that has inputs for the mask paints around it itself: all of the picture
        begins as noise then, unless the strength is below 1. Raises as ``ModelWeights.apply`` does.
        """
        control, is_inside = None, False
        if given.control is not None:
            config = self._control[0].config
            is_inside = given.mask is not None and config.has_mask
            hidden = self._masked(given) if is_inside else None
            cells = to_input(config, self._mode(to_values(given.control)), hidden)
            mx.eval(cells)
            control = Control(self._control[0].get, cells, request.control_strength or 0.0)
        encoded = None
        if given.pixels is not None and not (is_inside and request.strength == 1):
            means, deviations = self._encode(to_values(given.pixels))
            scale, mask = self.vae_module.config.scale, given.mask
            painted = None if mask is None else cells_of(mask, scale)
            encoded = EncodedPicture(means, deviations, painted)
        self.budget.finish(self.picture_encoder())
        return encoded, control

    def _masked(self, given: PictureInput) -> tuple[mx.array, mx.array]:
        """Return the cells to paint, and the scaled latents of the picture without them."""
        assert given.pixels is not None and given.mask is not None  # noqa: S101 - was checked
        values = to_values(given.pixels) * mx.array(given.mask < 128)[..., None]
        return cells_of(given.mask, self.vae_module.config.scale), self._mode(values)

    def _mode(self, values: mx.array) -> mx.array:
        """Return the scaled mode of the latents of a picture: (channels, height, width)."""
        config = self.vae_module.config
        return (self._encode(values)[0] - config.shift_factor) * config.scaling_factor

    def _encode(self, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the means and deviations of the latents of a picture, evaluated."""
        module, pixels = self.picture_encoder(), values.size // 3
        widest = max(module.config.block_out_channels[:2])
        work = self.budget.work("picture", pixels, decoding(widest, pixels, self.dtype))
        self.budget.use(stage := Stage("picture", (module,), work))
        with self.budget.measure(stage, pixels):
            means, deviations = module.get().encode(values.astype(self.dtype))
            means, deviations = means.astype(mx.float32), deviations.astype(mx.float32)
            mx.eval(means, deviations)
        return means, deviations

    def _steps(
        self,
        request: GenerateRequest,
        latents: mx.array,
        schedule: Schedule,
        conditioning: Conditioning,
        picture: int,
        keep: Keep,
    ) -> Iterator[tuple[PipelineEvent, mx.array]]:
        """Yield the steps and previews of a picture, each with the latents after it."""
        total = len(schedule.times)
        previewed = sorted(previews_after(request.previews, total))
        states = self.denoise(latents, schedule, conditioning, request.cache_threshold, keep)
        for index, state in enumerate(states, 1):
            before, latents = latents, state
            yield Step(index, total, picture), latents
            if index in previewed:
                small = self.preview(before, latents, schedule, index - 1)
                yield Preview(small, previewed.index(index), picture), latents

    def preview(
        self, before: mx.array, after: mx.array, schedule: Schedule, step: int
    ) -> npt.NDArray[np.uint8]:
        """Return the picture predicted at step ``step`` (from 0), at half its size.

        It shows the end of the straight line from ``before`` through ``after``: decoded, or
        approximated where the factors of the VAE are known.
        """
        sigma, lower = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
        end = float(schedule.sigmas[-1])
        predicted = before + (after - before) * ((sigma - end) / (sigma - lower))
        if has_colours(config := self.vae_module.config):
            return colours(np.array(predicted), config.scale // 2)
        return downsample(self.decode(predicted))  # smaller latents could change the colours

    def schedule(self, request: GenerateRequest) -> Schedule:
        """Return the noise levels of the request's steps, size and shift. Raises UsageError."""
        rows, columns = request.height // self.sides.multiple, request.width // self.sides.multiple
        tokens, steps = rows * columns, request.steps
        if request.strength is None:
            return self.scheduler.schedule(steps, tokens, request.shift)
        if request.fine:
            whole = whole_steps(steps, request.strength)
            return self.scheduler.schedule(whole, tokens, request.shift).after(whole - steps)
        first = first_step(steps, request.strength)
        return self.scheduler.schedule(steps, tokens, request.shift).after(first)

    def conditioning(self, request: GenerateRequest) -> Conditioning:
        """Return the request's texts, encoded and refined; recent ones are cached.

        The text encoder is loaded for new texts only. Raises as ``encode`` does.
        """
        texts, (encode, denoise, _) = _texts(request), self.stages(request)
        keys = {text: self._caption_key(text) for text in texts}
        found = {text: self._captions[key] for text, key in keys.items() if key in self._captions}
        if new := [text for text in dict.fromkeys(texts) if text not in found]:
            self.budget.use(encode)
            features = {text: self.encode(text) for text in new}
            mx.eval(features)  # a lazy array keeps the text encoder in memory
            self.budget.finish(self.text_encoder_module)
            self.budget.use(denoise)
            found |= {text: self._refined(features[text]) for text in new}
        captions = [
            _cached(self._captions, keys[text], lambda key: found[key[0]]) for text in texts
        ]
        negative = captions[1] if captions[1:] else None
        guidance = request.guidance, request.guidance_end, request.cfg_normalization
        return Conditioning(captions[0], negative, *guidance)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text; recent ones are cached."""
        return _cached(self._tokens, text, self.tokenizer.encode)

    def _refined(self, features: mx.array) -> Caption:
        caption = self.transformer.caption(features)
        mx.eval(caption.tokens, *caption.rope)
        return caption

    def denoise(
        self,
        latents: mx.array,
        schedule: Schedule,
        conditioning: Conditioning,
        threshold: float = 0.0,
        keep: Keep = lambda latents, _: latents,
    ) -> Iterator[mx.array]:
        """Yield the latents after every Euler step, in float32 and evaluated.

        With a ``threshold``, steps between the first and the last may reuse the work of others.
        ``keep`` changes the latents after each step, given its noise level.
        """
        caches = (StepCache(threshold), StepCache(threshold)) if threshold else _NO_CACHES
        last = len(schedule.times) - 1
        steps = zip(schedule.times, np.diff(schedule.sigmas), strict=True)
        for index, (time, change) in enumerate(steps):
            used = caches if index < last else _NO_CACHES
            velocity = self.velocity(latents, float(time), conditioning, used)
            latents = latents - float(change) * velocity
            latents = keep(latents, float(schedule.sigmas[index + 1]))
            mx.eval(latents)
            yield latents

    def encode(self, prompt: str) -> mx.array:
        """Return the text features of a prompt, (tokens, hidden size). Raises as ``ids``."""
        return self.text_encoder(mx.array(self.ids(prompt)))

    def ids(self, prompt: str) -> list[int]:
        """Return the checked tokens of a prompt.

        Raises:
            UsageError: The prompt needs more positions than the transformer has.
            ModelError: The tokenizer does not match the text encoder.
        """
        tokens = self.tokens(prompt)
        positions = self.transformer_module.config.axes_lens[0]
        if padded(len(tokens)) + 2 > positions:
            raise UsageError(
                f"the prompt is too long: {len(tokens)} tokens and padding exceed {positions} "
                "positions"
            )
        if max(tokens) >= self.text_encoder_module.config.vocab_size:
            raise ModelError("the tokenizer returned tokens that the text encoder does not have")
        return tokens

    def noise(self, request: GenerateRequest, seed: int) -> npt.NDArray[np.float32]:
        """Return the latents as drawn by torch, (channels, height / scale, width / scale)."""
        scale = self.vae_module.config.scale
        channels = self.transformer_module.config.in_channels
        return randn(seed, (channels, request.height // scale, request.width // scale))

    def velocity(
        self,
        latents: mx.array,
        time: float,
        conditioning: Conditioning,
        caches: Caches = _NO_CACHES,
    ) -> mx.array:
        """Return the predicted direction from noise to picture, in float32.

        With guidance it is positive + weight * (positive - negative). ``caches`` are of the
        positive and the negative caption.
        """
        typed, control = latents.astype(self.dtype), conditioning.control

        def direction(caption: Caption, cache: StepCache | None) -> mx.array:
            given = typed, time, caption
            hints: Callable[[], Hints] = dict
            if control:
                hints = partial(control.hints, self.transformer, *given)
            return self.transformer(*given, cache, hints).astype(mx.float32)

        towards = direction(conditioning.positive, caches[0])
        if conditioning.negative is None or time > conditioning.end:
            return towards
        away = direction(conditioning.negative, caches[1])
        guided = towards + conditioning.weight * (towards - away)
        if not conditioning.normalization:
            return guided
        limit = conditioning.normalization * mx.linalg.norm(towards)
        length = mx.linalg.norm(guided)
        return mx.where(length > limit, guided * (limit / length), guided)

    def decode(self, latents: mx.array) -> npt.NDArray[np.uint8]:
        """Decode latents (channels, height, width) to RGB. Raises ModelError: NaN or infinity."""
        values = self.vae.decode(latents.astype(self.dtype))
        pixels = np.array(mx.clip(values * 0.5 + 0.5, 0, 1).astype(mx.float32))
        if not np.isfinite(pixels).all():
            raise ModelError("the model computed NaN or infinite values")
        return to_pixels(pixels)


def to_values(pixels: npt.NDArray[np.uint8]) -> mx.array:
    """Return pixels as values from -1 to 1, in float32."""
    return mx.array(pixels).astype(mx.float32) / 127.5 - 1


def _cached(cache: dict[K, T], key: K, make: Callable[[K], T]) -> T:
    value = cache.pop(key) if key in cache else make(key)
    while len(cache) >= CACHED_TEXTS:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def _texts(request: GenerateRequest) -> list[str]:
    return [request.prompt, *([request.negative or ""] if request.guidance else [])]


def _sides(transformer: TransformerConfig, vae: VaeConfig) -> Sides:
    multiple = vae.scale * PATCH
    _, rows, columns = transformer.axes_lens
    return Sides(multiple, columns * multiple, rows * multiple)


def _check_sides(store: BlobFiles, aimage: AImage, request: GenerateRequest) -> None:
    file = "transformer/config.json"
    transformer = TransformerConfig.parse(file, read_object(store, aimage, file))
    file = "vae/config.json"
    _sides(transformer, VaeConfig.parse(file, read_object(store, aimage, file))).check(request)


def _check_fit(
    text_encoder: TextEncoderConfig, transformer: TransformerConfig, vae: VaeConfig
) -> None:
    hidden = text_encoder.hidden_size
    if hidden != transformer.cap_feat_dim:
        raise ModelError(
            f"the text encoder returns {hidden} features, "
            f"the transformer requires {transformer.cap_feat_dim}"
        )
    if vae.latent_channels != transformer.in_channels:
        raise ModelError(
            f"the vae has {vae.latent_channels} latent channels, "
            f"the transformer requires {transformer.in_channels}"
        )
    if vae.out_channels != 3:
        raise ModelError(f"the vae has {vae.out_channels} output channels, pictures have 3")
