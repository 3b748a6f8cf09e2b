"""A Qwen3 or Qwen2 text encoder, up to the last hidden state that a family conditions on.

Hidden states are outputs of layers, before the final norm. Layers after the last required state
and the final norm are never built, and their weights are skipped.
Reference: transformers, models/qwen3 and models/qwen2 (arXiv 2505.09388, 2407.10671).
"""

from __future__ import annotations

from clowder_aimage.model.backend import Embedding, Network, mx
from clowder_aimage.model.compute.array_block import Array, to_fastest, to_mlx
from clowder_aimage.model.compute.attention import attention
from clowder_aimage.model.compute.operation import (
    Linear,
    RMSNorm,
    add,
    get_library,
    swiglu_in_place,
)
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.rope import Table, build_text_table, rotate_halves


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

    def __call__(self, x: Array, rope: Table, mask: mx.array) -> Array:
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

    def __call__(self, x: Array) -> Array:
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

    def __call__(self, x: Array, rope: Table, mask: mx.array) -> Array:
        x = add(x, self.self_attn(self.input_layernorm(x), rope, mask))
        return add(x, self.mlp(self.post_attention_layernorm(x)))


def _mask(length: int, window: int | None, text_length: int) -> mx.array:
    """Return a (length, length) mask: True where a token attends to one of the last ``window``.

    Tokens from ``text_length`` on are padding, which none attends to.
    """
    columns = mx.arange(length)[None, :]
    back = mx.arange(length)[:, None] - columns
    return (back >= 0) & (back < (window or length)) & (columns < text_length)


class TextEncoder(Network):
    """A network from token ids to hidden states.

    ``outputs`` are the indexes of the states in transformers' ``hidden_states`` (0 is the
    embedding); the default is the state before the last layer.
    """

    def __init__(self, config: TextEncoderConfig, outputs: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.outputs = outputs or (config.num_hidden_layers - 1,)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        windows = config.windows[: max(self.outputs)]
        self.layers = [DecoderLayer(config, window) for window in windows]

    def __call__(self, tokens: mx.array, text_length: int | None = None) -> mx.array:
        """Encode tokens: (length,) integers; returns (length, states * hidden).

        The tokens from ``text_length`` on are padding.
        """
        length = tokens.shape[0]
        rope = build_text_table(self.config.rope, length)
        masks = {
            decoder_layer.window: _mask(length, decoder_layer.window, text_length or length)
            for decoder_layer in self.layers
        }
        hidden = to_fastest(self.embed_tokens(tokens[None]))
        states = {0: hidden}
        for index, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, rope, masks[layer.window])
            if index in self.outputs:
                states[index] = hidden
        selected = [states[index][0] for index in self.outputs]
        return to_mlx(get_library(hidden).concatenate(selected, axis=-1))

    @staticmethod
    def sanitize(name: str) -> str:
        """Return the name of the parameter for a Hugging Face tensor."""
        return name.removeprefix("model.")

    def skip(self, name: str) -> bool:
        """Return True for tensors that are not used: layers after the last state, norm and head."""
        return self.config.is_unused(self.sanitize(name), len(self.layers))
