"""The Z-Image pipeline: encode, denoise, decode.

Follows ``ZImagePipeline`` of diffusers 0.42, but makes pictures one after another and never
pads texts (the reference masks its padding). Latents are float32 between steps, whatever the
dtype of the networks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.backend import mx
from clowder_aimage.model.memory_budget import (
    MemoryBudget,
    OffloadedModule,
    decoding,
    scores,
    size_of,
    unfolded,
)
from clowder_aimage.model.pipeline import (
    Arrays,
    GenerateRequest,
    Image,
    PipelineEvent,
    Preview,
    Sides,
    Step,
    check_request,
    downsample,
    to_pixels,
)
from clowder_aimage.model.weights import ModelWeights, read_object
from clowder_aimage.model.zimage.config import (
    PATCH,
    TextEncoderConfig,
    TransformerConfig,
    VaeConfig,
)
from clowder_aimage.model.zimage.flow_scheduler import FlowScheduler, Schedule
from clowder_aimage.model.zimage.noise import randn
from clowder_aimage.model.zimage.text_encoder import TextEncoder
from clowder_aimage.model.zimage.tokenizer import Tokenizer
from clowder_aimage.model.zimage.transformer import Caption, Transformer, padded
from clowder_aimage.model.zimage.vae import Vae

T = TypeVar("T")
C = TypeVar("C")
N = TypeVar("N", TextEncoder, Transformer, Vae)
CACHED_TEXTS = 32  # the most recently used


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The captions of a generation; ``negative`` and its ``weight`` only with guidance."""

    positive: Caption
    negative: Caption | None = None
    weight: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ZImagePipeline:
    """The loaded networks.

    ``skipped`` names the tensors that were left out; ``budget`` decides whether the text encoder
    stays in memory after use.
    """

    tokenizer: Tokenizer
    offloaded: OffloadedModule[TextEncoder]
    transformer: Transformer
    vae: Vae
    scheduler: FlowScheduler
    dtype: mx.Dtype
    skipped: tuple[str, ...] = ()
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _captions: dict[str, Caption] = field(default_factory=dict)

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
        """Load every component strictly; ``keep_quantized`` is as in ``ModelWeights.apply``.

        The sides of the first ``request`` are checked before any weights are read.

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

        def network(component: str, kind: Callable[[C], N], config: Callable[..., C]) -> N:
            weights = ModelWeights.open(store, aimage, component)
            module = kind(config(f"{component}/config.json", weights.config))
            left_out = weights.apply(
                module, skip=module.skip, dtype=dtype, keep_quantized=keep_quantized
            )
            skipped.extend(f"{component}/{name}" for name in left_out)
            return module

        offloaded = OffloadedModule(
            lambda: network("text_encoder", TextEncoder, TextEncoderConfig.parse)
        )
        transformer = network("transformer", Transformer, TransformerConfig.parse)
        vae = network("vae", Vae, VaeConfig.parse)
        _check_fit(offloaded.get(), transformer, vae)
        return cls(tokenizer, offloaded, transformer, vae, scheduler, dtype, tuple(skipped))

    @property
    def text_encoder(self) -> TextEncoder:
        """Return the text encoder, reloaded if it was released. Raises as ``load`` does."""
        return self.offloaded.get()

    def set_memory(self, policy: str, memory: int | None, total: int | None = None) -> None:
        """Set the fields of the budget; they do not affect the pictures."""
        self.budget.policy, self.budget.memory = policy, memory
        self.budget.total = total or self.budget.total

    @property
    def sides(self) -> Sides:
        """Return the supported sides."""
        return _sides(self.transformer.config, self.vae.config)

    def check(self, request: GenerateRequest) -> None:
        """Reject a request that this model does not support. Raises UsageError."""
        needs = partial(self.arrays, request)
        check_request(request, self.sides, needs, self.budget.arrays)

    def arrays(self, request: GenerateRequest, width: int, height: int) -> Arrays:
        """Return the largest arrays of a picture: attention scores, full-size decoder layers."""
        cells = width * height // self.vae.config.scale**2
        widths, config = self.vae.config.block_out_channels, self.transformer.config
        texts = [request.prompt, *([request.negative or ""] if request.guidance else [])]
        tokens = max(padded(len(self.tokens(text))) for text in texts)
        image = padded(width * height // self.sides.multiple**2)
        numbers = scores(config.n_heads, config.head_dim, image + tokens)
        if self.vae.config.mid_block_add_attention:
            numbers = max(numbers, scores(1, widths[-1], cells))
        decoded = unfolded(max(widths[:2]), width * height, self.dtype)
        return Arrays(max(numbers * self.dtype.size, decoded), numbers)

    def generate(self, request: GenerateRequest) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        Raises:
            UsageError: Immediately, if this model does not support the request.
            ModelError: Later, if the model computes values that are not finite.
        """
        self.check(request)
        return self._generate(request, self.schedule(request))

    def _generate(
        self, request: GenerateRequest, schedule: Schedule
    ) -> Generator[PipelineEvent, None, None]:
        conditioning = self.conditioning(request)
        self._offload(request)
        previewed = sorted(request.previews_after())
        for picture in range(request.n):
            seed = request.seed + picture
            self.budget.begin()
            latents = mx.array(self.noise(request, seed))
            for index, state in enumerate(self.denoise(latents, schedule, conditioning), 1):
                before, latents = latents, state
                yield Step(index, request.steps, picture)
                if index in previewed:
                    small = self.preview(before, latents, schedule, index - 1)
                    yield Preview(small, previewed.index(index), picture)
            pixels = self.decode(latents)
            self.budget.end(request.width * request.height)
            yield Image(pixels, seed, picture)

    def _offload(self, request: GenerateRequest) -> None:
        networks = self.offloaded.size + size_of(self.transformer) + size_of(self.vae)
        guess = decoding(max(self.vae.config.block_out_channels[:2]), self.dtype)
        if not self.budget.fits(networks, request.width * request.height, guess):
            self.offloaded.release()

    def preview(
        self, before: mx.array, after: mx.array, schedule: Schedule, step: int
    ) -> npt.NDArray[np.uint8]:
        """Return the picture predicted at step ``step`` (from 0), at half its size.

        It is decoded from the end of the straight line from ``before`` through ``after``.
        """
        sigma, lower = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
        end = float(schedule.sigmas[-1])
        predicted = before + (after - before) * ((sigma - end) / (sigma - lower))
        return downsample(self.decode(predicted))  # smaller latents could change the colours

    def schedule(self, request: GenerateRequest) -> Schedule:
        """Return the noise levels of the request's steps, size and shift. Raises UsageError."""
        rows, columns = request.height // self.sides.multiple, request.width // self.sides.multiple
        return self.scheduler.schedule(request.steps, rows * columns, request.shift)

    def conditioning(self, request: GenerateRequest) -> Conditioning:
        """Return the request's texts, encoded and refined. Raises as ``encode`` does."""
        positive = self.caption(request.prompt)
        if not request.guidance:
            return Conditioning(positive)
        return Conditioning(positive, self.caption(request.negative or ""), request.guidance)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text; recent ones are cached."""
        return _cached(self._tokens, text, self.tokenizer.encode)

    def caption(self, text: str) -> Caption:
        """Return a text, encoded and refined; recent ones are cached. Raises as ``encode``."""
        return _cached(self._captions, text, self._refined)

    def _refined(self, text: str) -> Caption:
        caption = self.transformer.caption(self.encode(text))
        mx.eval(caption.tokens, *caption.rope)  # a lazy array keeps the text encoder in memory
        return caption

    def denoise(
        self, latents: mx.array, schedule: Schedule, conditioning: Conditioning
    ) -> Iterator[mx.array]:
        """Yield the latents after every Euler step, in float32 and evaluated."""
        changes = np.diff(schedule.sigmas)
        for time, change in zip(schedule.times, changes, strict=True):
            latents = latents - float(change) * self.velocity(latents, float(time), conditioning)
            mx.eval(latents)
            yield latents

    def encode(self, prompt: str) -> mx.array:
        """Return the text features of a prompt, (tokens, hidden size).

        Raises:
            UsageError: The prompt needs more positions than the transformer has.
            ModelError: The tokenizer does not match the text encoder.
        """
        tokens = self.tokens(prompt)
        positions = self.transformer.config.axes_lens[0]
        if padded(len(tokens)) + 2 > positions:
            raise UsageError(
                f"the prompt is too long: {len(tokens)} tokens and padding exceed {positions} "
                "positions"
            )
        encoder = self.text_encoder
        if max(tokens) >= encoder.config.vocab_size:
            raise ModelError("the tokenizer returned tokens that the text encoder does not have")
        return encoder(mx.array(tokens))

    def noise(self, request: GenerateRequest, seed: int) -> npt.NDArray[np.float32]:
        """Return the latents as drawn by torch, (channels, height / scale, width / scale)."""
        scale = self.vae.config.scale
        channels = self.transformer.config.in_channels
        return randn(seed, (channels, request.height // scale, request.width // scale))

    def velocity(self, latents: mx.array, time: float, conditioning: Conditioning) -> mx.array:
        """Return the predicted direction from noise to picture, in float32.

        With guidance it is positive + weight * (positive - negative).
        """
        typed = latents.astype(self.dtype)
        towards = self.transformer(typed, time, conditioning.positive).astype(mx.float32)
        if conditioning.negative is None:
            return towards
        away = self.transformer(typed, time, conditioning.negative).astype(mx.float32)
        return towards + conditioning.weight * (towards - away)

    def decode(self, latents: mx.array) -> npt.NDArray[np.uint8]:
        """Decode latents (channels, height, width) to RGB pixels.

        Raises:
            ModelError: Values are infinite or NaN.
        """
        values = self.vae.decode(latents.astype(self.dtype))
        pixels = np.array(mx.clip(values * 0.5 + 0.5, 0, 1).astype(mx.float32))
        if not np.isfinite(pixels).all():
            raise ModelError("the model computed NaN or infinite values")
        return to_pixels(pixels)


def _cached(cache: dict[str, T], text: str, make: Callable[[str], T]) -> T:
    value = cache.pop(text) if text in cache else make(text)
    while len(cache) >= CACHED_TEXTS:
        del cache[next(iter(cache))]
    cache[text] = value
    return value


def _sides(transformer: TransformerConfig, vae: VaeConfig) -> Sides:
    multiple = vae.scale * PATCH
    _, rows, columns = transformer.axes_lens
    return Sides(multiple, columns * multiple, rows * multiple)


def _check_sides(store: BlobFiles, aimage: AImage, request: GenerateRequest) -> None:
    file = "transformer/config.json"
    transformer = TransformerConfig.parse(file, read_object(store, aimage, file))
    file = "vae/config.json"
    _sides(transformer, VaeConfig.parse(file, read_object(store, aimage, file))).check(request)


def _check_fit(text_encoder: TextEncoder, transformer: Transformer, vae: Vae) -> None:
    hidden = text_encoder.config.hidden_size
    if hidden != transformer.config.cap_feat_dim:
        raise ModelError(
            f"the text encoder returns {hidden} features, "
            f"the transformer requires {transformer.config.cap_feat_dim}"
        )
    if vae.config.latent_channels != transformer.config.in_channels:
        raise ModelError(
            f"the vae has {vae.config.latent_channels} latent channels, "
            f"the transformer requires {transformer.config.in_channels}"
        )
    if vae.config.out_channels != 3:
        raise ModelError(f"the vae has {vae.config.out_channels} output channels, pictures have 3")
