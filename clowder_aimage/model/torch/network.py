"""Networks that families share: text encoders of transformers, autoencoders of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import transformers

from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.torch.library import computing

_KINDS = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2Model),
}
_STATED = ("quantization_config", "quantization", "dtype", "torch_dtype")  # of the files


class QwenEncoder:
    """The first layers of a Qwen3 or Qwen2 decoder, without its last norm.

    ``outputs`` counts the layers before each state; the default is all but the last layer.
    """

    def __init__(
        self, config: TextEncoderConfig, fields: Mapping[str, Any], outputs: tuple[int, ...] = ()
    ) -> None:
        self._config = config
        self._outputs = outputs or (config.num_hidden_layers - 1,)
        self._count = max(self._outputs)
        kind, network = _KINDS[fields["model_type"]]
        own = {key: value for key, value in fields.items() if key not in _STATED}
        own["num_hidden_layers"] = self._count
        if isinstance(own.get("layer_types"), list):
            own["layer_types"] = own["layer_types"][: self._count]
        self.module = network(kind(**own))
        self.module.norm = torch.nn.Identity()

    @computing
    def __call__(self, tokens: torch.Tensor, known: int | None = None) -> torch.Tensor:
        """Encode tokens: (length,) integers; returns (length, states * hidden).

        The tokens from ``known`` on are padding.
        """
        mask = None
        if known is not None:
            mask = (torch.arange(len(tokens), device=tokens.device) < known).long()[None]
        found = self.module(
            input_ids=tokens[None],
            attention_mask=mask,
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states
        return torch.cat([found[index][0] for index in self._outputs], dim=-1)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a Hugging Face tensor."""
        return name.removeprefix("model.")

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used: last layers, final norm, language head."""
        return self._config.is_unused(self.sanitize(name), self._count)


class AutoencoderHalf:
    """One half of an autoencoder of diffusers.

    ``OTHERS``: the parts that it does not have, and the beginnings of their tensors' names.
    """

    OTHERS: ClassVar[tuple[str, ...]]

    def __init__(self, module: Any) -> None:
        self.module = module
        for name in self.OTHERS:
            setattr(module, name, None)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor: the same."""
        return name

    def skip(self, name: str) -> bool:
        """Return True for tensors of the other half, and for counters of the training."""
        others = tuple(f"{one}." for one in self.OTHERS)
        return name.startswith(others) or name.endswith("num_batches_tracked")


class EncoderHalf(AutoencoderHalf):
    """The encoder alone."""

    OTHERS: ClassVar[tuple[str, ...]] = ("decoder", "post_quant_conv")

    @computing
    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pixels (height, width, 3), -1 to 1.

        Returns the means and standard deviations of the latents, (channels, height, width), not
        yet scaled and shifted.
        """
        found = self.module.encode(pixels.permute(2, 0, 1)[None]).latent_dist
        return found.mean[0], found.std[0]


class DecoderHalf(AutoencoderHalf):
    """The decoder alone."""

    OTHERS: ClassVar[tuple[str, ...]] = ("encoder", "quant_conv")

    def to_pixels(self, cells: torch.Tensor) -> torch.Tensor:
        """Decode (channels, height, width), as encoded, to (scale * height, scale * width, 3)."""
        pixels: torch.Tensor = self.module.decode(cells[None], return_dict=False)[0][0]
        return pixels.permute(1, 2, 0)
