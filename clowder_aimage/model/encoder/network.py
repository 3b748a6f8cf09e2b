"""The network of an encoder: layers with the norm after each part, and no mask.

Texts are not padded: the tokens of several texts are the rows of one array, and attention is
computed for each text alone. So a text has the same states with others as by itself.
Reference: transformers, ``modeling_bert.py``, ``modeling_roberta.py``, ``modeling_mpnet.py``,
``modeling_distilbert.py``, ``modeling_electra.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import Embedding, LayerNorm, Network, mx
from clowder_aimage.model.compute.attention import attention
from clowder_aimage.model.compute.operation import Linear
from clowder_aimage.model.text.encoder_config import BUCKETS, EncoderConfig
from clowder_aimage.tensor.wrapper_name import strip_all_wrappers

# Distances beyond it share a bucket (MPNet)
_MAX_DISTANCE = 128
# Parts of the names of tensors, in order, and of parameters
_NAMES = (
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "tokens."),
    (r"^embeddings\.position_embeddings\.", "positions."),
    (r"^embeddings\.token_type_embeddings\.", "types."),
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^embeddings_project\.", "widening."),
    (r"^encoder\.relative_attention_bias\.", "distances."),
    (r"^(?:encoder\.layer|transformer\.layer)\.", "layers."),
    (r"\.attention\.(?:self\.query|attn\.q|q_lin)\.", ".query."),
    (r"\.attention\.(?:self\.key|attn\.k|k_lin)\.", ".key."),
    (r"\.attention\.(?:self\.value|attn\.v|v_lin)\.", ".value."),
    (r"\.attention\.(?:output\.dense|attn\.o|out_lin)\.", ".out."),
    (r"\.(?:attention\.output\.LayerNorm|attention\.LayerNorm|sa_layer_norm)\.", ".first_norm."),
    (r"\.(?:intermediate\.dense|ffn\.lin1)\.", ".up."),
    (r"\.(?:output\.dense|ffn\.lin2)\.", ".down."),
    (r"\.(?:output\.LayerNorm|output_layer_norm)\.", ".second_norm."),
)
# Of no use for the states: the first token's state through a layer, and constants
_UNUSED = re.compile(r"^pooler\.|^embeddings\.(position|token_type)_ids$")


class Layer(Network):
    """Attention and a feed-forward network, each added to its input and normed."""

    def __init__(self, config: EncoderConfig, act: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        width, eps = config.width, config.eps
        self.heads, self.act = config.heads, act
        self.query, self.key = Linear(width, width), Linear(width, width)
        self.value, self.out = Linear(width, width), Linear(width, width)
        self.up, self.down = Linear(width, config.inner), Linear(config.inner, width)
        self.first_norm = LayerNorm(width, eps=eps)
        self.second_norm = LayerNorm(width, eps=eps)

    def __call__(self, x: mx.array, ends: list[int], biases: list[mx.array | None]) -> mx.array:
        """Apply the layer to x: (tokens of all texts, width)."""
        x = self.first_norm(x + self.out(self._attend(x, ends, biases)))
        output: mx.array = self.second_norm(x + self.down(self.act(self.up(x))))
        return output

    def _attend(self, x: mx.array, ends: list[int], biases: list[mx.array | None]) -> mx.array:
        """Return the attention of each text; texts end before the rows ``ends``."""
        size = x.shape[-1] // self.heads
        projected = [part(x) for part in (self.query, self.key, self.value)]
        outputs = []
        for start, end, bias in zip([0, *ends], ends, biases, strict=False):
            parts = [y[start:end].reshape(1, end - start, self.heads, size) for y in projected]
            mixed = attention(parts[0], parts[1], parts[2], size**-0.5, bias=bias)
            outputs.append(mixed.reshape(end - start, -1))
        return mx.concatenate(outputs)


class Encoder(Network):
    """A network from tokens to the states of the last layer."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.tokens, config.embedding)
        self.positions = Embedding(config.positions, config.embedding)
        if config.types:
            self.types = Embedding(config.types, config.embedding)
        if config.embedding != config.width:
            self.widening = Linear(config.embedding, config.width)
        if config.has_distances:
            self.distances = Embedding(BUCKETS, config.heads)
        self.norm = LayerNorm(config.embedding, eps=config.eps)
        act = _ACTIVATIONS[config.activation]
        self.layers = [Layer(config, act) for _ in range(config.layers)]

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[mx.array]:
        """Return the states of each text, (tokens, width); at most ``config.context`` tokens."""
        counts = [len(text) for text in texts]
        ends = [*accumulate(counts)]
        x = self._embed(texts)
        by_count = {count: self._build_bias(count) for count in set(counts)}
        biases = [by_count[count] for count in counts]
        for layer in self.layers:
            x = layer(x, ends, biases)
        return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _embed(self, texts: Sequence[Sequence[int]]) -> mx.array:
        tokens = mx.array([token for text in texts for token in text])
        positions = mx.array([index for text in texts for index in self._list_positions(text)])
        x = self.tokens(tokens) + self.positions(positions)
        x = self.norm(x + self.types.weight[0] if "types" in self else x)
        embedded: mx.array = self.widening(x) if "widening" in self else x
        return embedded

    def _list_positions(self, text: Sequence[int]) -> Sequence[int]:
        """Return the positions of tokens; padding that a text contains is not counted."""
        padding = self.config.padding
        if padding is None:
            return range(len(text))
        counts = accumulate(token != padding for token in text)
        return [
            padding if token == padding else padding + count
            for token, count in zip(text, counts, strict=True)
        ]

    def _build_bias(self, count: int) -> mx.array | None:
        """Return what attention adds to the scores of ``count`` tokens, (heads, count, count)."""
        if "distances" not in self:
            return None
        bias: mx.array = self.distances(mx.array(find_buckets(count))).transpose(2, 0, 1)
        return bias

    def sanitize(self, name: str) -> str:
        """Return the name of the parameter of a tensor."""
        name = strip_all_wrappers(name).removeprefix(self.config.prefix)
        for pattern, part in _NAMES:
            name = re.sub(pattern, part, name)
        return name

    def list_unused(self, names: Sequence[str]) -> frozenset[str]:
        """Return the tensors of heads, and those that do not change the states."""
        prefix = self.config.prefix
        plain = {name: strip_all_wrappers(name) for name in names}
        has_head = any(name.startswith(prefix) for name in plain.values())
        return frozenset(
            name
            for name, inner in plain.items()
            if (has_head and not inner.startswith(prefix))
            or _UNUSED.search(inner.removeprefix(prefix))
        )


def find_buckets(count: int) -> npt.NDArray[np.int32]:
    """Return the bucket of each pair of tokens: small distances have their own, others share them.

    Source: transformers, ``MPNetEncoder.relative_position_bucket``.
    """
    rows = np.arange(count)
    distances = rows[None] - rows[:, None]
    half, exact = BUCKETS // 2, BUCKETS // 4
    sizes = np.abs(distances)
    # float32, as in the reference: the edges of buckets depend on the rounding
    ratios = np.log(np.maximum(sizes, 1).astype(np.float32) / exact)
    ratios = ratios / np.float32(math.log(_MAX_DISTANCE / exact)) * (half - exact)
    shared = np.minimum(half - 1, exact + ratios.astype(np.int32))
    buckets = np.where(sizes < exact, sizes, shared) + np.where(distances > 0, half, 0)
    result: npt.NDArray[np.int32] = buckets.astype(np.int32)
    return result


def _gelu(x: mx.array) -> mx.array:
    return x * 0.5 * (1 + mx.erf(x * 0.5**0.5))


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "swish": _silu,
}
