"""Z-Image from prompt to picture: encode, denoise, decode.

Follows ``ZImagePipeline`` of diffusers 0.42, with pictures one after another and texts never
padded (the reference masks its padding away). Latents stay float32 between steps whatever the
networks compute in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.backend import mx
from clowder_aimage.model.component_file import read_object
from clowder_aimage.model.memory_budget import (
    MemoryBudget,
    OffloadedModule,
    decoding,
    scores,
    size_of,
    surroundings,
)
from clowder_aimage.model.pipeline import (
    Arrays,
    GenerateRequest,
    Image,
    Made,
    Preview,
    Step,
    check_request,
    halved,
    to_pixels,
)
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.model.zimage.config import (
    PATCH,
    TextEncoderConfig,
    TransformerConfig,
    VaeConfig,
)
from clowder_aimage.model.zimage.noise import randn
from clowder_aimage.model.zimage.scheduler import Schedule, Scheduler
from clowder_aimage.model.zimage.text_encoder import TextEncoder
from clowder_aimage.model.zimage.tokenizer import Tokenizer
from clowder_aimage.model.zimage.transformer import Caption, Transformer, padded
from clowder_aimage.model.zimage.vae import Vae

Network = TypeVar("Network", TextEncoder, Transformer, Vae)
CAPTIONS = 32  # texts that are remembered, the last used


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """What leads the denoising: a caption, and with guidance one to lead away from."""

    positive: Caption
    negative: Caption | None = None
    weight: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ZImagePipeline:
    """The loaded networks. ``skipped`` names the tensors that were left out on purpose; ``room``
    says whether the text encoder stays in memory when it has done its work."""

    tokenizer: Tokenizer
    held: OffloadedModule[TextEncoder]
    transformer: Transformer
    vae: Vae
    scheduler: Scheduler
    dtype: mx.Dtype
    skipped: tuple[str, ...] = ()
    room: MemoryBudget = field(default_factory=MemoryBudget)
    _captions: dict[str, Caption] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        store: ContentStore,
        aimage: AImage,
        dtype: mx.Dtype,
        *,
        keep_quantized: bool | None = None,
    ) -> ZImagePipeline:
        """Load every component strictly. ``keep_quantized`` is as ``ModelWeights.apply`` has it.

        Raises:
            ModelError: for configurations or weights that do not fit, or not each other.
            FormatError: for blobs that are not what they claim to be.
        """
        scheduler_file = "scheduler/scheduler_config.json"
        scheduler = Scheduler.parse(scheduler_file, read_object(store, aimage, scheduler_file))
        tokenizer = Tokenizer.load(store, aimage)
        skipped: list[str] = []

        def network(component: str, make: Callable[[ModelWeights], Network]) -> Network:
            weights = ModelWeights.open(store, aimage, component)
            module = make(weights)
            left_out = weights.apply(
                module, skip=module.skip, dtype=dtype, keep_quantized=keep_quantized
            )
            skipped.extend(f"{component}/{name}" for name in left_out)
            return module

        held = OffloadedModule(lambda: network("text_encoder", _text_encoder))
        transformer = network("transformer", _transformer)
        vae = network("vae", _vae)
        _check_fit(held.get(), transformer, vae)
        return cls(tokenizer, held, transformer, vae, scheduler, dtype, tuple(skipped))

    @property
    def text_encoder(self) -> TextEncoder:
        """Loaded again if it was let go. Raises as ``load`` does."""
        return self.held.get()

    def make_room(self, wish: str, memory: int | None, whole: int | None = None) -> None:
        """Have the text encoder stay or go as ``MemoryBudget`` says; pictures are the same."""
        self.room.wish, self.room.memory = wish, memory
        self.room.whole = whole or self.room.whole

    @property
    def multiple(self) -> int:
        """Pixels of which both sides must be multiples."""
        return self.vae.config.scale * PATCH

    def check(self, request: GenerateRequest) -> None:
        """Refuse what this model cannot make. Raises UsageError."""
        _, rows, columns = self.transformer.config.axes_lens
        check_request(
            request,
            multiple=self.multiple,
            max_width=columns * self.multiple,
            max_height=rows * self.multiple,
            needs=lambda width, height: self.arrays(request, width, height),
            most=self.room.most,
        )

    def arrays(self, request: GenerateRequest, width: int, height: int) -> Arrays:
        """The largest arrays of a picture: scores of attention, and the decoder's at full size."""
        cells = width * height // self.vae.config.scale**2
        widths, config = self.vae.config.block_out_channels, self.transformer.config
        texts = [request.prompt, *([request.negative or ""] if request.guidance else [])]
        words = max(padded(len(self.tokenizer.encode(text))) for text in texts)
        image = padded(width * height // self.multiple**2)
        numbers = scores(config.n_heads, config.head_dim, image + words)
        if self.vae.config.mid_block_add_attention:
            numbers = max(numbers, scores(1, widths[-1], cells))
        decoded = surroundings(max(widths[:2]), width * height, self.dtype)
        return Arrays(max(numbers * self.dtype.size, decoded), numbers)

    def generate(self, request: GenerateRequest) -> Generator[Made, None, None]:
        """Steps, previews and pictures, as they come; closing the generator cancels.

        Raises:
            UsageError: at once, for a request that this model cannot serve.
            ModelError: while it runs, when the model computes what is not a picture.
        """
        self.check(request)
        return self._generate(request, self.schedule(request))

    def _generate(
        self, request: GenerateRequest, schedule: Schedule
    ) -> Generator[Made, None, None]:
        guide = self.guide(request)
        self._settle(request)
        wanted = sorted(request.previews_after())
        for picture in range(request.n):
            seed = request.seed + picture
            self.room.begin()
            latents = mx.array(self.noise(request, seed))
            for index, state in enumerate(self.denoise(latents, schedule, guide), 1):
                before, latents = latents, state
                yield Step(index, request.steps, picture)
                if index in wanted:
                    small = self.preview(before, latents, schedule, index - 1)
                    yield Preview(small, wanted.index(index), picture)
            pixels = self.decode(latents)
            self.room.end(request.width * request.height)
            yield Image(pixels, seed, picture)

    def _settle(self, request: GenerateRequest) -> None:
        """Let the text encoder go where the picture needs its room."""
        networks = self.held.size + size_of(self.transformer) + size_of(self.vae)
        guess = decoding(max(self.vae.config.block_out_channels[:2]), self.dtype)
        if not self.room.has_room(networks, request.width * request.height, guess):
            self.held.release()

    def preview(
        self, before: mx.array, after: mx.array, schedule: Schedule, step: int
    ) -> npt.NDArray[np.uint8]:
        """The picture at half its size, as step ``step`` (from 0) sees it: the latents that the
        straight way from ``before`` through ``after`` ends at, decoded."""
        sigma, lower = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
        end = float(schedule.sigmas[-1])
        seen = before + (after - before) * ((sigma - end) / (sigma - lower))
        return halved(self.decode(seen))  # smaller latents may mean other colours

    def schedule(self, request: GenerateRequest) -> Schedule:
        """The noise levels for the request's steps, size and shift. Raises UsageError."""
        rows, columns = request.height // self.multiple, request.width // self.multiple
        return self.scheduler.schedule(request.steps, rows * columns, request.shift)

    def guide(self, request: GenerateRequest) -> Conditioning:
        """The request's texts, encoded and refined. Raises as ``encode`` does."""
        positive = self.caption(request.prompt)
        if not request.guidance:
            return Conditioning(positive)
        return Conditioning(positive, self.caption(request.negative or ""), request.guidance)

    def caption(self, text: str) -> Caption:
        """A text, encoded and refined; the last ones are remembered. Raises as ``encode`` does."""
        known = self._captions.pop(text, None)
        if known is None:
            known = self.transformer.caption(self.encode(text))
            mx.eval(known.tokens, *known.rope)  # or else it would hold on to the text encoder
            while len(self._captions) >= CAPTIONS:
                del self._captions[next(iter(self._captions))]
        self._captions[text] = known
        return known

    def denoise(
        self, latents: mx.array, schedule: Schedule, guide: Conditioning
    ) -> Iterator[mx.array]:
        """The latents after every Euler step, in float32 and evaluated."""
        changes = np.diff(schedule.sigmas)
        for time, change in zip(schedule.times, changes, strict=True):
            latents = latents - float(change) * self.velocity(latents, float(time), guide)
            mx.eval(latents)
            yield latents

    def encode(self, prompt: str) -> mx.array:
        """The text features of a prompt, (tokens, hidden size).

        Raises:
            UsageError: when the transformer has fewer positions than the prompt needs.
            ModelError: when tokenizer and text encoder are not of one mind.
        """
        tokens = self.tokenizer.encode(prompt)
        positions = self.transformer.config.axes_lens[0]
        if padded(len(tokens)) + 2 > positions:
            raise UsageError(f"the prompt is too long: {len(tokens)} tokens, {positions} positions")
        encoder = self.text_encoder
        if max(tokens) >= encoder.config.vocab_size:
            raise ModelError("the tokenizer makes tokens that the text encoder does not know")
        return encoder(mx.array(tokens))

    def noise(self, request: GenerateRequest, seed: int) -> npt.NDArray[np.float32]:
        """The initial latents, (channels, height / scale, width / scale), as torch draws them."""
        scale = self.vae.config.scale
        channels = self.transformer.config.in_channels
        return randn(seed, (channels, request.height // scale, request.width // scale))

    def velocity(self, latents: mx.array, time: float, guide: Conditioning) -> mx.array:
        """The predicted direction from noise to picture, in float32.

        Guided, it is positive + weight * (positive - negative).
        """
        typed = latents.astype(self.dtype)
        towards = self.transformer(typed, time, guide.positive).astype(mx.float32)
        if guide.negative is None:
            return towards
        away = self.transformer(typed, time, guide.negative).astype(mx.float32)
        return towards + guide.weight * (towards - away)

    def decode(self, latents: mx.array) -> npt.NDArray[np.uint8]:
        """Latents (channels, height, width) to RGB pixels.

        Raises:
            ModelError: when values are infinite or not numbers.
        """
        values = self.vae.decode(latents.astype(self.dtype))
        shown = np.array(mx.clip(values * 0.5 + 0.5, 0, 1).astype(mx.float32))
        if not np.isfinite(shown).all():
            raise ModelError("the model computed values that are not numbers")
        return to_pixels(shown)


def _text_encoder(weights: ModelWeights) -> TextEncoder:
    return TextEncoder(TextEncoderConfig.parse("text_encoder/config.json", weights.config))


def _transformer(weights: ModelWeights) -> Transformer:
    return Transformer(TransformerConfig.parse("transformer/config.json", weights.config))


def _vae(weights: ModelWeights) -> Vae:
    return Vae(VaeConfig.parse("vae/config.json", weights.config))


def _check_fit(text_encoder: TextEncoder, transformer: Transformer, vae: Vae) -> None:
    """Refuse components that are not of one model."""
    hidden = text_encoder.config.hidden_size
    if hidden != transformer.config.cap_feat_dim:
        raise ModelError(
            f"the text encoder gives {hidden} features, "
            f"the transformer takes {transformer.config.cap_feat_dim}"
        )
    if vae.config.latent_channels != transformer.config.in_channels:
        raise ModelError(
            f"the vae has {vae.config.latent_channels} latent channels, "
            f"the transformer {transformer.config.in_channels}"
        )
    if vae.config.out_channels != 3:
        raise ModelError(f"the vae makes {vae.config.out_channels} channels, pictures have 3")
