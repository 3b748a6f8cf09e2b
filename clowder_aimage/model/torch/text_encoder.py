"""A Qwen3 or Qwen2 text encoder on PyTorch, up to the last hidden state that is used.

Reference: transformers, models/qwen3 and models/qwen2 (arXiv 2505.09388, 2407.10671).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.rope_table import compute_text_table
from clowder_aimage.model.torch.attention import attend
from clowder_aimage.model.torch.library import TorchLibrary, computing
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import (
    Linear,
    LinearGroup,
    RMSNorm,
    Table,
    build_parameter,
    rotate_halves,
    swiglu,
    to_table,
)


class TextAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.head_dim, hidden, bias = config.head_dim, config.hidden_size, config.qkv_bias
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, width, bias=bias)
        self.k_proj, self.v_proj = (Linear(hidden, kv_width, bias=bias) for _ in range(2))
        self.qkv = LinearGroup(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(width, hidden, bias=config.output_bias)
        self.has_norms = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2)
            )

    def forward(self, x: torch.Tensor, rope: Table, mask: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer to x: (1, length, hidden); returns the same shape."""
        queries, keys, values = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x))
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate_halves(queries, rope), rotate_halves(keys, rope)
        mixed: torch.Tensor = self.o_proj(
            attend(queries, keys, values, mask, is_causal=mask is None).flatten(2)
        )
        return mixed


class FeedForward(torch.nn.Module):  # type: ignore[misc]
    """SwiGLU feed-forward network."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (Linear(hidden, inner, bias=False) for _ in range(2))
        self.gate_up = LinearGroup(self.gate_proj, self.up_proj)
        self.down_proj = Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(swiglu(*self.gate_up(x)))
        return y


class DecoderLayer(torch.nn.Module):  # type: ignore[misc]
    """Attention and feed-forward network, each with a norm and a residual connection."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = TextAttention(config), FeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, rope: Table, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Embedding(torch.nn.Module):  # type: ignore[misc]
    """The vectors of tokens."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = build_parameter(count, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight)


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """The embedding and the first ``count`` layers."""

    def __init__(self, config: TextEncoderConfig, count: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(DecoderLayer(config) for _ in range(count))


class TextEncoder(TorchNetwork):
    """A network from tokens to hidden states.

    ``outputs`` counts the layers before each state; the default is all but the last layer.
    """

    module: Decoder

    def __init__(
        self, config: TextEncoderConfig, library: TorchLibrary, outputs: tuple[int, ...] = ()
    ) -> None:
        self._config, self._device = config, library.device
        self._outputs = outputs or (config.num_hidden_layers - 1,)
        self._count = max(self._outputs)
        self.module = Decoder(config, self._count)

    @computing
    def __call__(self, tokens: torch.Tensor, text_length: int | None = None) -> torch.Tensor:
        """Encode tokens: (length,) integers; returns (length, states * hidden).

        The tokens from ``text_length`` on are padding.
        """
        length, windows = len(tokens), self._config.windows[: self._count]
        rope = to_table(compute_text_table(self._config.rope, length), self._device)
        masks = {
            window: _build_mask(length, window, text_length or length, self._device)
            for window in windows
        }
        hidden = self.module.embed_tokens(tokens[None])
        states = {0: hidden}
        for index, (layer, window) in enumerate(zip(self.module.layers, windows, strict=True), 1):
            hidden = layer(hidden, rope, masks[window])
            if index in self._outputs:
                states[index] = hidden
        return torch.cat([states[index][0] for index in self._outputs], dim=-1)

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a Hugging Face tensor."""
        return name.removeprefix("model.")

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used: last layers, final norm, language head."""
        return self._config.is_unused(self.sanitize(name), self._count)


def _build_mask(
    length: int, window: int | None, text_length: int, device: str
) -> torch.Tensor | None:
    """Return a (length, length) mask: True where a token attends to one of the last ``window``.

    Tokens from ``text_length`` on are padding, which none attends to. None if all tokens attend to
    all that precede them.
    """
    if window is None and text_length == length:
        return None
    columns = torch.arange(length, device=device)[None]
    back = columns.T - columns
    return (back >= 0) & (back < (window or length)) & (columns < text_length)
