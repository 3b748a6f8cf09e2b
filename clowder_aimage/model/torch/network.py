"""Networks that families share: text encoders of transformers, autoencoders of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import transformers

from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.torch.library import computing


class _Qwen3(transformers.Qwen3Model):  # type: ignore[misc]
    def init_weights(self) -> None:
        """Draw no values: this halves the time to make the network."""


class _Qwen2(transformers.Qwen2Model):  # type: ignore[misc]
    init_weights = _Qwen3.init_weights


_KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, _Qwen3),
    "qwen2": (transformers.Qwen2Config, _Qwen2),
}
# Fields of the files that the constructors must not get
_STATED = ("quantization_config", "quantization", "dtype", "torch_dtype")


def stack_layers(kind: Any, fields: Mapping[str, Any], **counts: tuple[str, int]) -> Any:
    """Make a network of diffusers from the fields of its config, without values.

    ``counts`` has, by lists of equal layers, the field of the length and the length. Of each list
    one layer is made, and copied: making all takes a third of a load.
    """
    config = {name: value for name, value in fields.items() if not name.startswith("quantization")}
    few = {field: min(1, count) for field, count in counts.values()}
    module = kind.from_config({**config, **few})
    for name, (_, count) in counts.items():
        layers = getattr(module, name)
        layers.extend(_copy_module(layers[0]) for _ in range(count - 1))
    module.register_to_config(**dict(counts.values()))
    return module


def _copy_module(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a network; values, and objects that are not modules, stay those of ``module``."""
    copy = object.__new__(type(module))
    attributes: dict[str, Any] = {
        name: value.copy() if isinstance(value, (dict, set)) else value
        for name, value in vars(module).items()
    }
    for name, child in attributes["_modules"].items():
        attributes["_modules"][name] = None if child is None else _copy_module(child)
    vars(copy).update(attributes)
    return copy


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
        options = {key: value for key, value in fields.items() if key not in _STATED}
        options["num_hidden_layers"] = self._count
        if isinstance(options.get("layer_types"), list):
            options["layer_types"] = options["layer_types"][: self._count]
        self.module = network(kind(**options))
        self.module.norm = torch.nn.Identity()

    @computing
    def __call__(self, tokens: torch.Tensor, text_length: int | None = None) -> torch.Tensor:
        """Encode tokens: (length,) integers; returns (length, states * hidden).

        The tokens from ``text_length`` on are padding.
        """
        mask = None
        if text_length is not None:
            mask = (torch.arange(len(tokens), device=tokens.device) < text_length).long()[None]
        states = self.module(
            input_ids=tokens[None], attention_mask=mask, use_cache=False, output_hidden_states=True
        ).hidden_states
        return torch.cat([states[index][0] for index in self._outputs], dim=-1)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a Hugging Face tensor."""
        return name.removeprefix("model.")

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used: last layers, final norm, language head."""
        return self._config.is_unused(self.sanitize(name), self._count)


class DiffusersNetwork:
    """A network of diffusers, whose parameters have the names of the tensors."""

    module: Any

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a tensor: the same."""
        return name

    def skip(self, name: str) -> bool:  # noqa: ARG002 - of those that do not use all
        """Return True for tensors that are not used."""
        return False


class AutoencoderHalf(DiffusersNetwork):
    """One half of an autoencoder of diffusers.

    ``OTHERS``: the parts of the other half, and the prefixes of their tensors' names. ``BLOCKS``:
    the field of the config with the blocks of the other half; they are not made.
    """

    OTHERS: ClassVar[tuple[str, ...]]
    BLOCKS: ClassVar[str]

    def __init__(self, kind: Any, fields: Mapping[str, Any]) -> None:
        self.module = kind.from_config({**fields, self.BLOCKS: []})
        for name in self.OTHERS:
            setattr(self.module, name, None)

    def skip(self, name: str) -> bool:
        """Return True for tensors of the other half, and for counters of the training."""
        prefixes = tuple(f"{component}." for component in self.OTHERS)
        return name.startswith(prefixes) or name.endswith("num_batches_tracked")


class EncoderHalf(AutoencoderHalf):
    """The encoder alone."""

    OTHERS: ClassVar[tuple[str, ...]] = ("decoder", "post_quant_conv")
    BLOCKS: ClassVar[str] = "up_block_types"

    @computing
    def encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode pixels (height, width, 3), -1 to 1.

        Returns the means and standard deviations of the latents, (channels, height, width), not
        yet scaled and shifted.
        """
        distribution = self.module.encode(pixels.permute(2, 0, 1)[None]).latent_dist
        return distribution.mean[0], distribution.std[0]


class DecoderHalf(AutoencoderHalf):
    """The decoder alone."""

    OTHERS: ClassVar[tuple[str, ...]] = ("encoder", "quant_conv")
    BLOCKS: ClassVar[str] = "down_block_types"

    def to_pixels(self, cells: torch.Tensor) -> torch.Tensor:
        """Decode (channels, height, width), as encoded, to (scale * height, scale * width, 3)."""
        pixels: torch.Tensor = self.module.decode(cells[None], return_dict=False)[0][0]
        return pixels.permute(1, 2, 0)
