"""The networks of a pipeline, and the questions that a family of models answers about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.flow.array_library import ArrayLibrary, Floats
from clowder_aimage.model.flow.component import ModelComponents, NetworkKind
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.flow_scheduler import FlowScheduler, Schedule
from clowder_aimage.model.flow.memory_budget import MemoryBudget, Module, OffloadedModule
from clowder_aimage.model.flow.picture_start import EncodedPicture
from clowder_aimage.model.flow.tokenizer import Tokenizer
from clowder_aimage.model.pipeline import (
    REFERENCE_PIXELS,
    GenerateRequest,
    PictureInput,
    Sides,
    StoredControlNet,
    downsample,
    to_pixels,
)
from clowder_aimage.model.weights import ModelWeights, read_object

K = TypeVar("K")
T = TypeVar("T")
CACHED_TEXTS = 32  # the most recently used
CaptionKey = tuple[str, tuple[tuple[str, float], ...]]  # a text, and the adapters that touch it
_NETWORKS = ("text_encoder", "transformer", "vae")


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowFamily(ABC):
    """The networks, of any library, loaded when they are used.

    ``skipped`` names the tensors that were left out; ``budget`` decides which networks stay in
    memory after use; ``weights`` are those of the components that adapters may change.

    A family sets NETWORKS: text_encoder, transformer, vae, and picture_encoder, which only requests
    with a picture need; and CAPTIONING: beginnings of names of tensors that captions depend on.
    """

    NETWORKS: ClassVar[Mapping[str, NetworkKind]]
    CAPTIONING: ClassVar[tuple[str, ...]]
    IS_THINKING: ClassVar[bool] = True  # the chat template's option
    SEES_REFERENCES: ClassVar[bool] = False  # instead of a picture to begin with

    tokenizer: Tokenizer
    text_encoder_module: OffloadedModule[Any, TextEncoderConfig]
    transformer_module: OffloadedModule[Any, Any]
    vae_module: OffloadedModule[Any, Any]
    picture_encoder: Callable[[], OffloadedModule[Any, Any]]
    scheduler: FlowScheduler
    library: ArrayLibrary
    budget: MemoryBudget
    skipped: tuple[str, ...] = ()
    weights: Mapping[str, ModelWeights] = field(default_factory=dict)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _captions: dict[CaptionKey, Caption] = field(default_factory=dict)
    _adapters: list[Use] = field(default_factory=list)

    # -- a family

    @staticmethod
    @abstractmethod
    def sides_of(transformer: Any, vae: Any) -> Sides:
        """Return the sides that networks of these configurations support."""

    @staticmethod
    @abstractmethod
    def check_fit(text_encoder: TextEncoderConfig, transformer: Any, vae: Any) -> None:
        """Reject networks that do not fit together. Raises ModelError."""

    def refuse(self, request: GenerateRequest) -> None:
        """Reject a request with what only other families have. Raises UsageError."""
        if request.image is not None and self.SEES_REFERENCES:
            raise UsageError(
                "this model does not begin with a picture: it edits reference pictures",
                hint="give the picture as a reference",
            )
        if request.references and not self.SEES_REFERENCES:
            raise UsageError(
                "this model does not see reference pictures",
                hint="give the picture as the image to begin with",
            )
        if request.control is not None and request.controlnet is None:
            self.use_control(None)

    @abstractmethod
    def weight(self, request: GenerateRequest) -> float:
        """Return the weight of the guidance, 0 without: of positive - negative velocity."""

    @abstractmethod
    def lengths(self, request: GenerateRequest) -> tuple[int, int]:
        """Return the most tokens of a text, and those of the transformer's sequence."""

    @abstractmethod
    def layer(self) -> tuple[int, int, int]:
        """Return the width, the hidden channels and the heads of the transformer's layers."""

    @abstractmethod
    def latent_shape(self, request: GenerateRequest) -> tuple[int, int, int]:
        """Return the shape of the latents: (channels, height, width)."""

    @abstractmethod
    def normalize(self, latents: Floats) -> Floats:
        """Return latents as the encoder computes them, scaled for the transformer."""

    @abstractmethod
    def direction(
        self,
        latents: Any,
        time: float,
        caption: Caption,
        pictures: Any,
        cache: Any,
    ) -> Any:
        """Return the transformer's velocity from noise to picture, for one caption.

        latents, velocity: arrays of the library, (channels, height, width). time: 0 (noise) to 1
        (picture). pictures: what ``inputs`` returned. With a ``cache``, layers may be skipped.
        """

    def ids(self, prompt: str) -> list[int]:
        """Return the checked tokens of a prompt.

        Raises:
            UsageError: The prompt is too long for the model.
            ModelError: The tokenizer does not match the text encoder.
        """
        tokens = self.tokens(prompt)
        if max(tokens) >= self.text_encoder_module.config.vocab_size:
            raise ModelError("the tokenizer returned tokens that the text encoder does not have")
        return tokens

    def encode(self, prompt: str) -> Any:
        """Return the text features of a prompt, (tokens, channels). Raises as ``ids``."""
        return self.text_encoder(self.library.array(np.array(self.ids(prompt))))

    def beside(self, request: GenerateRequest, length: int) -> tuple[tuple[Module, ...], float]:  # noqa: ARG002
        """Return modules that steps use beside the transformer, and the bytes of their arrays."""
        return (), 0

    def fit(self, given: PictureInput) -> PictureInput:
        """Return pictures in the sizes that the family sees. Raises UsageError: unsuitable."""
        return given

    @abstractmethod
    def inputs(
        self, request: GenerateRequest, given: PictureInput
    ) -> tuple[EncodedPicture | None, Any]:
        """Return the picture to begin with, and what steps see beside the latents, evaluated.

        Raises as ``ModelWeights.apply`` does.
        """

    def levels(self, steps: int, tokens: int, shift: float | None) -> Schedule:
        """Return the noise levels for a picture of ``tokens`` tokens. Raises UsageError."""
        return self.scheduler.schedule(steps, tokens, shift)

    @property
    def has_drafts(self) -> bool:
        """Return whether previews are made without the decoder."""
        return False

    def draft(self, latents: Floats) -> npt.NDArray[np.uint8]:
        """Return a preview of latents, at half the size."""
        return downsample(self.decode(latents))  # smaller latents could change the colours

    def use_control(self, stored: StoredControlNet | None) -> None:
        """Use a control network from now on, or the model's own.

        Raises:
            UsageError: The model has none, or its family supports none.
            FormatError: The network is of another base model, or damaged.
        """
        name = "a control picture" if stored is None else f"the ControlNet {stored.name}"
        raise UsageError(f"{name} cannot be used: the family of this model has no control networks")

    # -- loading

    @classmethod
    def load(cls, components: ModelComponents, request: GenerateRequest | None = None) -> Self:
        """Check every component strictly.

        The sides of the first ``request`` are checked first. Headers are read and checked; weights
        are read when a network is used.

        Raises:
            UsageError: The model does not support the sides.
            ModelError: Configurations or weights are invalid, or do not match each other.
            FormatError: A blob is invalid.
        """
        return cls(**cls.parts(components, request))

    @classmethod
    def parts(cls, components: ModelComponents, request: GenerateRequest | None) -> dict[str, Any]:
        """Return the arguments of the constructor; a family may add some. Raises as ``load``."""
        store, aimage = components.store, components.aimage
        if request is not None:
            kinds = cls.NETWORKS["transformer"], cls.NETWORKS["vae"]
            cls.sides_of(*(kind.config(store, aimage) for kind in kinds)).check(request)
        file = "scheduler/scheduler_config.json"
        scheduler = FlowScheduler.parse(file, read_object(store, aimage, file))
        tokenizer = Tokenizer.load(store, aimage, is_thinking=cls.IS_THINKING)
        modules = [components.open(cls.NETWORKS[name]) for name in _NETWORKS]
        cls.check_fit(*(module.config for module in modules))
        text_encoder, transformer, vae = modules
        budget = MemoryBudget(components.library.memory, text_encoder, vae, transformer)
        skipped = tuple(components.skipped)
        weights = {name: components.weights[name] for name in _NETWORKS[:2]}

        @cache
        def picture_encoder() -> Module:
            loaded = components.open(cls.NETWORKS["picture_encoder"])
            loaded.policy = transformer.policy
            budget.modules = (loaded, *budget.modules)
            return loaded

        return {
            **{f"{name}_module": one for name, one in zip(_NETWORKS, modules, strict=True)},
            "tokenizer": tokenizer,
            "scheduler": scheduler,
            "picture_encoder": picture_encoder,
            "library": components.library,
            "budget": budget,
            "skipped": skipped,
            "weights": weights,
        }

    @property
    def text_encoder(self) -> Any:
        """Return the text encoder, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.text_encoder_module.get()

    @property
    def transformer(self) -> Any:
        """Return the transformer, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.transformer_module.get()

    @property
    def vae(self) -> Any:
        """Return the decoder, loaded if it is not. Raises as ``ModelWeights.apply`` does."""
        return self.vae_module.get()

    @property
    def sides(self) -> Sides:
        """Return the supported sides."""
        return self.sides_of(self.transformer_module.config, self.vae_module.config)

    @staticmethod
    def area(request: GenerateRequest) -> int:
        """Return the pixels that a step sees: of the picture and of reference pictures, at most."""
        return request.width * request.height + len(request.references) * REFERENCE_PIXELS

    def texts(self, request: GenerateRequest) -> list[str]:
        """Return the texts of a request: the negative one only with guidance."""
        return [request.prompt, *([request.negative or ""] if self.weight(request) else [])]

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text; recent ones are cached."""
        return recent(self._tokens, text, self.tokenizer.encode)

    def decode(self, latents: Floats) -> npt.NDArray[np.uint8]:
        """Decode latents (channels, height, width) to RGB. Raises ModelError: NaN or infinity."""
        pixels = self.library.colours(self.vae.decode(self.library.array(latents)))
        if not np.isfinite(pixels).all():
            raise ModelError("the model computed NaN or infinite values")
        return to_pixels(pixels)


def recent(cache: dict[K, T], key: K, make: Callable[[K], T]) -> T:
    """Return the value of a key from a cache of the most recently used, or a new one."""
    value = cache.pop(key) if key in cache else make(key)
    while len(cache) >= CACHED_TEXTS:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def check_channels(text_encoder: int, required: int, vae: int, latents: int, colours: int) -> None:
    """Reject features of a text encoder, and channels of a vae, that do not fit a transformer.

    Raises:
        ModelError: They do not fit.
    """
    if text_encoder != required:
        raise ModelError(
            f"the text encoder returns {text_encoder} features, the transformer requires {required}"
        )
    if vae != latents:
        raise ModelError(f"the vae has {vae} latent channels, the transformer requires {latents}")
    if colours != 3:
        raise ModelError(f"the vae has {colours} output channels, pictures have 3")
