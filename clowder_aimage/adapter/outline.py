"""The layers of Z-Image by name, for adapters whose base is not there: shapes are the adapter's.

Names: diffusers, models/transformers/transformer_z_image.py; transformers, Qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clowder_aimage.adapter.adapter_layer import AdapterLayer, Shape
from clowder_aimage.adapter.target import TargetTable

NAME = "Z-Image"
_MATRIX, _VECTOR = (3, 3), (3,)  # places for shapes
_BLOCKS = ("layers", "noise_refiner", "context_refiner")
_MATRICES = (
    *(f"attention.to_{part}" for part in ("q", "k", "v", "out.0")),
    *(f"feed_forward.w{part}" for part in (1, 2, 3)),
    "adaLN_modulation.0",
)
_NORMS = (
    *("attention.norm_q", "attention.norm_k", "attention_norm1", "attention_norm2"),
    *("ffn_norm1", "ffn_norm2"),
)
_OTHERS = (
    *("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2", "all_x_embedder.2-1"),
    *("all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"),
)
_BIASED = (*_OTHERS, "adaLN_modulation.0")
_TEXT_MATRICES = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_TEXT_NORMS = (
    *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
)
_NUMBER = re.compile(r"[0-9]+")
_MOST = 255  # the number of a block


def outline_shapes(layers: Iterable[AdapterLayer]) -> dict[str, Shape]:
    """Return the shapes of the tensors of Z-Image that an adapter is for.

    The layers that are stacked with one of them have the same shape. Layers with other names are
    left out.
    """
    layers = list(layers)
    numbers = {int(n) for layer in layers for n in _NUMBER.findall(layer.stem[:1024]) if len(n) < 4}
    names = dict(_names(min(max(numbers, default=0), _MOST) + 1))
    table = TargetTable(names)
    found: dict[str, Shape] = {}
    for layer in layers:
        target = table.find(layer.stem)
        if target is None:
            continue
        shape = next((shape for _, shape in layer.changes), None)
        if shape is None:  # a bias alone
            shape = (max(layer.shapes[part][0] for part in layer.biases), 1)
        whole = (shape[0] // len(target.parts), *shape[1:])
        for part in target.parts:
            found[part.tensor] = whole
            for letter in "kvq" if ".to_" in part.tensor[-12:-8] else "":
                found.setdefault(f"{part.tensor[:-8]}{letter}.weight", whole)
            if part.bias in names:
                found[part.bias] = whole[:1]
    return found


def _names(count: int) -> Iterator[tuple[str, Shape]]:
    for block in (f"{name}.{number}" for name in _BLOCKS for number in range(count)):
        yield from ((f"transformer/{block}.{name}.weight", _MATRIX) for name in _MATRICES)
        yield from ((f"transformer/{block}.{name}.weight", _VECTOR) for name in _NORMS)
        yield f"transformer/{block}.adaLN_modulation.0.bias", _VECTOR
    for name in _OTHERS:
        yield f"transformer/{name}.weight", _MATRIX
        yield f"transformer/{name}.bias", _VECTOR
    yield "transformer/cap_embedder.0.weight", _VECTOR
    yield from ((f"transformer/{name}_pad_token", _MATRIX) for name in ("x", "cap"))
    yield "text_encoder/model.embed_tokens.weight", _MATRIX
    for number in range(count):
        block = f"text_encoder/model.layers.{number}"
        yield from ((f"{block}.{name}.weight", _MATRIX) for name in _TEXT_MATRICES)
        yield from ((f"{block}.{name}.weight", _VECTOR) for name in _TEXT_NORMS)
