"""The Qwen3 or Qwen2 text encoder of Z-Image, up to its second to last hidden state.

Z-Image conditions on ``hidden_states[-2]``: the output of the second to last layer, before the
final norm. So the last layer and the final norm are never built, and their weights are skipped.
Reference: transformers, models/qwen3 and models/qwen2 (arXiv 2505.09388, 2407.10671).
"""

from __future__ import annotations

import re

from clowder_aimage.model.backend import Embedding, Network, RMSNorm, mx
from clowder_aimage.model.operation import Linear, attention, swiglu_in_place
from clowder_aimage.model.zimage.config import TextEncoderConfig
from clowder_aimage.model.zimage.rope import Table, rotate_halves


class TextAttention(Network):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        width, kv_width = self.heads * config.head_dim, self.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rope: Table, mask: mx.array) -> mx.array:
        """Apply the layer to x: (1, length, hidden); returns the same shape."""
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self.heads, -1)
        keys = self.k_proj(x).reshape(batch, length, self.kv_heads, -1)
        values = self.v_proj(x).reshape(batch, length, self.kv_heads, -1)
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate_halves([queries, keys], rope)
        mixed = attention(queries, keys, values, self.scale, mask)
        return self.o_proj(mixed.reshape(batch, length, -1))


class MLP(Network):
    """SwiGLU feed-forward network."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu_in_place(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(Network):
    """Attention and feed-forward network, each with a norm and a residual connection."""

    def __init__(self, config: TextEncoderConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.self_attn = TextAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rope: Table, mask: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def _mask(length: int, window: int | None) -> mx.array:
    """Return True where a row sees a column: none that follow it, and only ``window`` of them."""
    back = mx.arange(length)[:, None] - mx.arange(length)[None, :]
    return (back >= 0) & (back < (window or length))


class TextEncoder(Network):
    """A network from token ids to the hidden states that Z-Image conditions on."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, window) for window in config.windows[:-1]]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Encode tokens: (length,) integers; returns (length, hidden)."""
        rope = self.config.rope.table(tokens.shape[0])
        masks = {layer.window: _mask(tokens.shape[0], layer.window) for layer in self.layers}
        hidden: mx.array = self.embed_tokens(tokens[None])
        for layer in self.layers:
            hidden = layer(hidden, rope, masks[layer.window])
        return hidden[0]

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a Hugging Face tensor."""
        return name.removeprefix("model.")

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used: last layer, final norm, language head."""
        last = len(self.layers)
        own = self.sanitize(name)
        return own in ("norm.weight", "lm_head.weight") or bool(re.match(rf"layers\.{last}\.", own))
