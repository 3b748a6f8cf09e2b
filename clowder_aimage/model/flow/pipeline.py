"""The pipeline of all families: encode, denoise, decode.

Follows the pipelines of diffusers 0.42, but makes pictures, and both directions of guidance, one
after another: on a CPU two at once took 0.93 of the time of two, with twice the memory. Latents are
numpy's float32 between steps, whatever the library and the dtype of the networks. A family is a
subclass, which answers the questions of ``FlowFamily``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.errors import UsageError
from clowder_aimage.model.flow.array_library import Floats
from clowder_aimage.model.flow.conditioning import Caption, Conditioning
from clowder_aimage.model.flow.config import AutoencoderConfig
from clowder_aimage.model.flow.family import CaptionKey, FlowFamily, recent
from clowder_aimage.model.flow.flow_scheduler import Schedule
from clowder_aimage.model.flow.memory_budget import Stage
from clowder_aimage.model.flow.noise import randn
from clowder_aimage.model.flow.picture_start import EncodedPicture, cells_of, start
from clowder_aimage.model.pipeline import (
    REFERENCE_PIXELS,
    GenerateRequest,
    Image,
    PictureInput,
    PipelineEvent,
    Preview,
    Step,
    check_request,
    first_step,
    previews_after,
    whole_steps,
)

Keep = Callable[[Floats, float], Floats]
Caches = tuple[Any, Any]  # of the positive and the negative caption
_NO_CACHES: Caches = (None, None)
CACHED_ARRAYS = 2  # of the size of a layer's input, in a step cache


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowPipeline(FlowFamily):
    """A model that makes the pictures of requests, step by step."""

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

    def _caption_key(self, text: str) -> CaptionKey:
        """Return the key of a text's caption: adapters of the other layers do not change it."""
        return text, tuple(
            (adapter.key, strength)
            for adapter, strength in self._adapters
            if strength and adapter.touches(self.CAPTIONING)
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
        stages = *self._picture_stages(request), *self.stages(request)
        if self.budget.keeps(stages) and not self.budget.is_last:
            for stage in stages:
                self.budget.use(stage)
        return self.budget.describe(stages)

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of a request; they are cached. Raises as ``generate`` does."""
        self.check(request)
        self.conditioning(request)

    def check(self, request: GenerateRequest, given: PictureInput | None = None) -> None:
        """Reject a request that this model does not support. Raises UsageError.

        ``given`` is the picture of a request with an image.
        """
        check_request(request, self.sides, self.least_memory, self.budget.total)
        self.refuse(request)
        for text in self.texts(request):
            self.ids(text)
        if given is not None and given.mask is not None:
            cells_of(given.mask, self.vae_module.config.scale)
        self.budget.check((*self._picture_stages(request), *self.stages(request)))

    def least_memory(self, width: int, height: int) -> int:
        """Return the bytes of the arrays at full size that the decoder has at the same time."""
        config: AutoencoderConfig = self.vae_module.config
        narrow, *wide = config.block_out_channels[:2]
        channels = max(narrow, *wide) + narrow  # of the input and the result of a convolution
        return channels * width * height * self.library.itemsize

    def stages(self, request: GenerateRequest) -> tuple[Stage, Stage, Stage]:
        """Return the parts of a generation, with estimates of their memory."""
        pixels, area, library = request.width * request.height, self.area(request), self.library
        text, layer = self.text_encoder_module.config, self.layer()
        tokens, length = self.lengths(request)
        sizes = text.hidden_size, text.intermediate_size, text.num_attention_heads
        encode = library.transforming(*sizes, tokens)
        denoise = library.transforming(*layer, length)
        decodes = request.previews > 0 and not self.has_drafts
        drawing = "previews" if decodes else "denoise"
        measured = self.budget.work(drawing, area, denoise)
        # on a CPU, numpy's arrays are not measured
        denoise = max(denoise, measured) if library.memory.is_shared else measured
        if request.cache_threshold:
            count = CACHED_ARRAYS * len(self.texts(request))
            denoise += count * length * layer[0] * library.itemsize
        widest = self.vae_module.config.widest
        decode = self.budget.work("decode", pixels, library.decoding(widest, pixels))
        more, work = self.beside(request, length)
        used, denoise = (self.transformer_module, *more), denoise + work
        if decodes:
            used, denoise = (*used, self.vae_module), max(denoise, decode)
        return (
            Stage("encode", (self.text_encoder_module,), encode),
            Stage(drawing, used, denoise),
            Stage("decode", (self.vae_module,), decode),
        )

    def _picture_stages(self, request: GenerateRequest) -> list[Stage]:
        """Return the stage that encodes the pictures of a request, if it has any."""
        if request.image is None and request.control is None and not request.references:
            return []
        area = request.width * request.height
        return [self._encoding(REFERENCE_PIXELS if request.references else area)]

    def _encoding(self, pixels: int) -> Stage:
        module = self.picture_encoder()
        guess = self.library.decoding(module.config.widest, pixels)
        return Stage("picture", (module,), self.budget.work("picture", pixels, guess))

    def generate(
        self, request: GenerateRequest, given: PictureInput | None = None
    ) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        ``given`` is the picture to begin with, of the request's size, or references of any size.

        Raises:
            UsageError: Immediately, if this model does not support the request.
            ModelError: Later, if the model computes values that are not finite.
        """
        self.check(request, given)
        count = 0 if given is None else len(given.references)
        if count < len(request.references):
            raise UsageError(f"{count} of {len(request.references)} reference pictures are given")
        given = None if given is None else self.fit(given)
        return self._generate(request, self.schedule(request), given)

    def _generate(
        self, request: GenerateRequest, schedule: Schedule, given: PictureInput | None
    ) -> Generator[PipelineEvent, None, None]:
        conditioning = self.conditioning(request)
        encoded = None
        if given is not None:
            encoded, pictures = self.inputs(request, given)
            conditioning = replace(conditioning, pictures=pictures)
        _, denoise, decode = self.stages(request)
        pixels = request.width * request.height
        waiting: list[tuple[Floats, int, int]] = []
        for picture in range(request.n):
            seed = request.seed + picture
            latents, keep = self._begin(request, encoded, schedule, seed)
            self.budget.use(denoise)
            with self.budget.measure(denoise, self.area(request)):
                steps = self._steps(request, latents, schedule, conditioning, picture, keep)
                for event, state in steps:
                    yield event
                    latents = state
            waiting.append((latents, seed, picture))
            is_last = picture == request.n - 1
            if is_last:
                self.budget.finish(*denoise.modules)
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
    ) -> tuple[Floats, Keep]:
        """Return the latents before the first step, and what keeps a part of them after each."""
        if encoded is None:
            return self.noise(request, seed), lambda latents, _: latents
        begun = start(encoded, self.normalize, seed, schedule)
        return begun.latents, begun.keep

    def encoded(self, given: PictureInput) -> EncodedPicture | None:
        """Return the distribution of the latents of the picture to begin with, if there is one."""
        if given.pixels is None:
            return None
        means, deviations = self.distribution(to_values(given.pixels))
        scale, mask = self.vae_module.config.scale, given.mask
        return EncodedPicture(means, deviations, None if mask is None else cells_of(mask, scale))

    def mode(self, values: Floats) -> Floats:
        """Return the normalized mode of the latents of a picture: (channels, height, width)."""
        return self.normalize(self.distribution(values)[0])

    def distribution(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the means and deviations of the latents of a picture."""
        pixels = values.size // 3
        self.budget.use(stage := self._encoding(pixels))
        with self.budget.measure(stage, pixels):
            encoded = self.picture_encoder().get().encode(self.library.array(values))
            means, deviations = (self.library.floats(one) for one in encoded)
        return means, deviations

    def _steps(
        self,
        request: GenerateRequest,
        latents: Floats,
        schedule: Schedule,
        conditioning: Conditioning,
        picture: int,
        keep: Keep,
    ) -> Iterator[tuple[PipelineEvent, Floats]]:
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
        self, before: Floats, after: Floats, schedule: Schedule, step: int
    ) -> npt.NDArray[np.uint8]:
        """Return the picture predicted at step ``step`` (from 0), at half its size.

        It shows the end of the straight line from ``before`` through ``after``: decoded, or
        approximated where the factors of the VAE are known.
        """
        sigma, lower = float(schedule.sigmas[step]), float(schedule.sigmas[step + 1])
        end = float(schedule.sigmas[-1])
        predicted = before + (after - before) * ((sigma - end) / (sigma - lower))
        return self.draft(predicted)

    def schedule(self, request: GenerateRequest) -> Schedule:
        """Return the noise levels of the request's steps, size and shift. Raises UsageError."""
        rows, columns = request.height // self.sides.multiple, request.width // self.sides.multiple
        tokens, steps = rows * columns, request.steps
        if request.strength is None:
            return self.levels(steps, tokens, request.shift)
        if request.fine:
            whole = whole_steps(steps, request.strength)
            return self.levels(whole, tokens, request.shift).after(whole - steps)
        first = first_step(steps, request.strength)
        return self.levels(steps, tokens, request.shift).after(first)

    def conditioning(self, request: GenerateRequest) -> Conditioning:
        """Return the request's texts, encoded and refined; recent ones are cached.

        The text encoder is loaded for new texts only. Raises as ``encode`` does.
        """
        texts, (encode, denoise, _) = self.texts(request), self.stages(request)
        keys = {text: self._caption_key(text) for text in texts}
        found = {text: self._captions[key] for text, key in keys.items() if key in self._captions}
        if new := [text for text in dict.fromkeys(texts) if text not in found]:
            self.budget.use(encode)
            features = {text: self.encode(text) for text in new}
            self.library.evaluate(*features.values())  # a lazy array keeps the text encoder
            self.budget.finish(self.text_encoder_module)
            self.budget.use(denoise)
            found |= {text: self._refined(features[text]) for text in new}
        captions = [recent(self._captions, keys[text], lambda key: found[key[0]]) for text in texts]
        negative = captions[1] if captions[1:] else None
        guidance = self.weight(request), request.guidance_end, request.cfg_normalization
        return Conditioning(captions[0], negative, *guidance)

    def _refined(self, features: Any) -> Caption:
        caption: Caption = self.transformer.caption(features)
        self.library.evaluate(caption.tokens, *caption.rope)
        return caption

    def denoise(
        self,
        latents: Floats,
        schedule: Schedule,
        conditioning: Conditioning,
        threshold: float = 0.0,
        keep: Keep = lambda latents, _: latents,
    ) -> Iterator[Floats]:
        """Yield the latents after every Euler step, in float32.

        With a ``threshold``, steps between the first and the last may reuse the work of others.
        ``keep`` changes the latents after each step, given its noise level.
        """
        caches = _NO_CACHES
        if threshold:
            caches = self.library.step_cache(threshold), self.library.step_cache(threshold)
        last = len(schedule.times) - 1
        steps = zip(schedule.times, np.diff(schedule.sigmas), strict=True)
        for index, (time, change) in enumerate(steps):
            used = caches if index < last else _NO_CACHES
            velocity = self.velocity(latents, float(time), conditioning, used)
            latents = latents - np.float32(change) * velocity
            latents = keep(latents, float(schedule.sigmas[index + 1]))
            yield latents

    def noise(self, request: GenerateRequest, seed: int) -> npt.NDArray[np.float32]:
        """Return the latents as drawn by torch, (channels, height, width)."""
        return randn(seed, self.latent_shape(request))

    def velocity(
        self,
        latents: Floats,
        time: float,
        conditioning: Conditioning,
        caches: Caches = _NO_CACHES,
    ) -> Floats:
        """Return the predicted direction from noise to picture, in float32.

        With guidance it is positive + weight * (positive - negative). ``caches`` are of the
        positive and the negative caption.
        """
        typed, pictures = self.library.array(latents), conditioning.pictures

        def direction(caption: Caption, cache: Any) -> Floats:
            return self.library.floats(self.direction(typed, time, caption, pictures, cache))

        towards = direction(conditioning.positive, caches[0])
        if conditioning.negative is None or time > conditioning.end:
            return towards
        away = direction(conditioning.negative, caches[1])
        guided: Floats = towards + np.float32(conditioning.weight) * (towards - away)
        if not conditioning.normalization:
            return guided
        limit = conditioning.normalization * float(np.linalg.norm(towards))
        length = float(np.linalg.norm(guided))
        return guided * np.float32(limit / length) if length > limit else guided


def to_values(pixels: npt.NDArray[np.uint8]) -> Floats:
    """Return pixels as values from -1 to 1, in float32."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)
