"""The networks of a model in one library, loaded when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import controlnet
from clowder_aimage.model.flow.array_library import ArrayLibrary
from clowder_aimage.model.flow.component import ModelComponents, NetworkKinds
from clowder_aimage.model.flow.config import AutoencoderConfig, TextEncoderConfig
from clowder_aimage.model.flow.memory_budget import MemoryBudget, Module, OffloadedModule
from clowder_aimage.model.flow.state import CACHED_TEXTS
from clowder_aimage.model.flow.tokenizer import PromptTokens, Tokenizer
from clowder_aimage.model.pipeline import StoredControlNet
from clowder_aimage.model.weights import ModelWeights


class NetworkConfigs(Protocol):
    """The matching configurations of the networks of a model."""

    # The chat template's option
    IS_THINKING: ClassVar[bool]

    @property
    def text_encoder(self) -> TextEncoderConfig: ...

    @property
    def transformer(self) -> Any: ...

    @property
    def vae(self) -> AutoencoderConfig: ...


class FlowNetworks:
    """The networks and the tokenizer of a model; ``budget`` decides on their release.

    ``weights`` are those of the components that adapters may change. ``tokens`` returns the tokens
    of a text; recent ones are cached.
    """

    def __init__(
        self, components: ModelComponents, kinds: NetworkKinds, configs: NetworkConfigs
    ) -> None:
        """Check every component strictly: headers are read, and weights when a network is used.

        Raises:
            ModelError: Weights are invalid or do not match, or the tokenizer is malformed.
            FormatError: A blob is invalid.
        """
        self._components, self._kinds = components, kinds
        store, aimage = components.store, components.aimage
        tokenizer = Tokenizer.load(store, aimage, is_thinking=configs.IS_THINKING)
        self.tokenizer = tokenizer
        self.tokens: Callable[[str], PromptTokens] = lru_cache(CACHED_TEXTS)(tokenizer.encode)
        self.weights = {"text_encoder": ModelWeights.open(store, aimage, "text_encoder")}
        self.text_encoder: OffloadedModule[Any, TextEncoderConfig] = components.build_module(
            self.weights["text_encoder"], configs.text_encoder, kinds.text_encoder
        )
        self.weights["transformer"] = ModelWeights.open(store, aimage, "transformer")
        self.transformer: Module = components.build_module(
            self.weights["transformer"], configs.transformer, kinds.transformer
        )
        self._vae_weights = ModelWeights.open(store, aimage, "vae")
        self.vae: OffloadedModule[Any, AutoencoderConfig] = components.build_module(
            self._vae_weights, configs.vae, kinds.vae
        )
        # In the order of release: the transformer is the largest, and is loaded again slowest
        self.budget = MemoryBudget(
            self.library.memory, self.text_encoder, self.vae, self.transformer
        )

    @property
    def library(self) -> ArrayLibrary:
        """Return the library that computes the networks."""
        return self._components.library

    @property
    def skipped(self) -> tuple[str, ...]:
        """Return the names of the skipped tensors."""
        modules = self.text_encoder, self.transformer, self.vae
        return tuple(name for module in modules for name in module.skipped)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that adapters may change, by ``component/name``."""
        return {
            f"{component}/{name}": shape
            for component, weights in self.weights.items()
            for name, shape in weights.get_shapes().items()
        }

    @cached_property
    def picture_encoder(self) -> OffloadedModule[Any, AutoencoderConfig]:
        """Return the encoder of pictures. Raises as the constructor.

        It is checked on first use only: models without these weights can still make pictures.
        """
        return self._components.build_module(
            self._vae_weights, self.vae.config, self._kinds.picture_encoder
        )

    @cached_property
    def packed_control(self) -> Module | None:
        """Return the control network that is packed with the model, or None.

        Raises as ``open_control``.
        """
        aimage, component = self._components.aimage, controlnet.COMPONENT
        if self._kinds.control is None or not controlnet.is_packed_with(aimage):
            return None
        store = self._components.store
        return self.open_control(StoredControlNet(store, aimage, component, component))

    def open_control(self, stored: StoredControlNet) -> Module:
        """Check a control network against the transformer.

        Raises:
            UsageError: The family has no control networks.
            FormatError: The network is of another base, damaged, or has an unsupported
                configuration.
            ModelError: It has no tensors.
        """
        label = f"the ControlNet {stored.name}"
        if (kind := self._kinds.control) is None:
            raise UsageError(
                f"{label} cannot be used: the family of this model has no control networks"
            )
        weights = ModelWeights.open(stored.files, stored.aimage, stored.component, has_config=False)
        controlnet.check_fit(weights.get_shapes(), self.shapes, label, "the model")
        try:
            config = kind.read(weights, self.transformer.config)
            return self._components.build_module(weights, config, kind.make, is_adapted=False)
        except ModelError as error:
            message = f"{label} does not fit the model: {error.message}"
            raise FormatError(message, hint=error.hint) from None

    def decode(self, latents: Any) -> npt.NDArray[np.uint8]:
        """Decode held latents (channels, height, width) to RGB. Raises ModelError: NaN."""
        return self.library.to_pixels(self.vae.get().decode(self.library.to_array(latents)))
