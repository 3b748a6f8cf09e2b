"""Write random Z-Image models for benchmarks: ``python -m benchmarks.models DIR --shape medium``.

The widths are those of the real model, or reduced; the values are random, float32 and the same in
each run. diffusers and ``aimage create`` read the directories. Tokenizer and schedule are those of
examples/tiny.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor import encode_header

TINY = Path(__file__).parents[1] / "examples" / "tiny"
HEAD = 128  # channels of an attention head
_CHUNK = 1 << 24  # values written at a time

Shape = Literal["tiny", "small", "medium", "large", "full"]
Tensor = tuple[str, tuple[int, ...]]  # name and shape
Write = Callable[[Path, str, dict[str, Any], Iterator[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Widths:
    """The dimensions of a model; ``side`` is the side of its pictures in pixels."""

    dim: int
    layers: int
    refiners: int
    text_hidden: int
    text_layers: int
    text_heads: int
    vocabulary: int
    vae: tuple[int, ...]
    side: int


# The text encoders have 0.6 to 0.7 times as many values as the transformers, as in the real model
SHAPES: dict[Shape, Widths] = {
    "tiny": Widths(128, 1, 1, 64, 1, 4, 512, (32, 32, 32, 32), 64),
    "small": Widths(256, 4, 2, 256, 8, 4, 4096, (32, 64, 128, 128), 256),
    "medium": Widths(1024, 8, 2, 640, 15, 8, 16384, (64, 128, 256, 256), 256),
    "large": Widths(3840, 2, 1, 1280, 16, 16, 32768, (128, 256, 512, 512), 512),
    # Z-Image itself: 41 GB in float32
    "full": Widths(3840, 30, 2, 2560, 36, 32, 151936, (128, 256, 512, 512), 1024),
}


def build(
    directory: Path, shape: Shape, *, text_layers: int | None = None, write: Write | None = None
) -> Path:
    """Write a model as a diffusers directory, unless it is there already; return ``directory``.

    ``text_layers`` replaces the number of layers of the text encoder, and ``write`` the function
    that writes a component.
    """
    write = write or _write
    if (directory / "model_index.json").exists():
        return directory
    widths = SHAPES[shape]
    for folder in ("tokenizer", "scheduler"):
        shutil.copytree(TINY / folder, directory / folder, dirs_exist_ok=True)
    layers = text_layers or widths.text_layers
    write(directory, "transformer", _transformer_config(widths), _transformer(widths))
    write(directory, "text_encoder", _text_config(widths, layers), _text_encoder(widths, layers))
    write(directory, "vae", _vae_config(widths), _vae(widths.vae))
    shutil.copy(TINY / "model_index.json", directory)  # the last one: the directory is complete
    return directory


def _write(
    directory: Path, component: str, config: dict[str, Any], tensors: Iterator[Tensor]
) -> None:
    named = list(tensors)
    with open_component(directory, component, config, named, "F32") as file:
        for name, shape in named:
            for part in _values(name, shape):
                file.write(part.data)


@contextmanager
def open_component(
    directory: Path, component: str, config: dict[str, Any], named: Sequence[Tensor], dtype: str
) -> Iterator[BinaryIO]:
    """Write the configuration of a component, and open the file for the values of its tensors."""
    folder = directory / component
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads((TINY / component / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config, indent=2))
    stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(encode_header([(name, dtype, shape) for name, shape in named]))
        yield file


def find_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the deviation of the values of a tensor; activations stay near 1."""
    if name.endswith(".bias"):
        return 0.0, 0.02
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    return 0.0, 0.5 if name.endswith("_token") else float(np.prod(shape[1:])) ** -0.5


def _values(name: str, shape: tuple[int, ...]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the values of a tensor in parts."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    base, scale = find_spread(name, shape)
    count = int(np.prod(shape))
    for start in range(0, count, _CHUNK):
        values = random.standard_normal(min(_CHUNK, count - start), np.float32)
        values *= np.float32(scale)
        values += np.float32(base)
        yield values


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Iterator[Tensor]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _transformer_config(widths: Widths) -> dict[str, Any]:
    heads = widths.dim // HEAD
    return {
        "dim": widths.dim,
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": widths.layers,
        "n_refiner_layers": widths.refiners,
        "axes_dims": [32, 48, 48],
        "cap_feat_dim": widths.text_hidden,
    }


def _transformer(widths: Widths) -> Iterator[Tensor]:
    dim, modulation = widths.dim, min(widths.dim, 256)
    yield from _linear("all_x_embedder.2-1", dim, 64)
    yield from _linear("all_final_layer.2-1.linear", 64, dim)
    yield from _linear("all_final_layer.2-1.adaLN_modulation.1", dim, modulation)
    yield from _linear("t_embedder.mlp.0", 1024, 256)
    yield from _linear("t_embedder.mlp.2", modulation, 1024)
    yield "cap_embedder.0.weight", (widths.text_hidden,)
    yield from _linear("cap_embedder.1", dim, widths.text_hidden)
    yield "x_pad_token", (1, dim)
    yield "cap_pad_token", (1, dim)
    for index in range(widths.refiners):
        yield from _block(f"noise_refiner.{index}", dim, modulation)
        yield from _block(f"context_refiner.{index}", dim)
    for index in range(widths.layers):
        yield from _block(f"layers.{index}", dim, modulation)


def _block(name: str, dim: int, modulation: int = 0) -> Iterator[Tensor]:
    hidden = int(dim / 3 * 8)
    for each in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from _linear(f"{name}.attention.{each}", dim, dim, bias=False)
    for each in ("norm_q", "norm_k"):
        yield f"{name}.attention.{each}.weight", (HEAD,)
    for each in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        yield f"{name}.{each}.weight", (dim,)
    yield f"{name}.feed_forward.w1.weight", (hidden, dim)
    yield f"{name}.feed_forward.w2.weight", (dim, hidden)
    yield f"{name}.feed_forward.w3.weight", (hidden, dim)
    if modulation:
        yield from _linear(f"{name}.adaLN_modulation.0", 4 * dim, modulation)


def _text_config(widths: Widths, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": widths.text_hidden,
        "intermediate_size": widths.text_hidden * 19 // 5,
        "num_hidden_layers": layers,
        "num_attention_heads": widths.text_heads,
        "num_key_value_heads": widths.text_heads // 4,
        "head_dim": HEAD,
        "vocab_size": widths.vocabulary,
        "layer_types": ["full_attention"] * layers,
        "dtype": "float32",
    }


def _text_encoder(widths: Widths, layers: int) -> Iterator[Tensor]:
    hidden, inner = widths.text_hidden, widths.text_hidden * 19 // 5
    heads, kv_heads = widths.text_heads * HEAD, widths.text_heads // 4 * HEAD
    yield "embed_tokens.weight", (widths.vocabulary, hidden)
    for index in range(layers):
        name = f"layers.{index}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_norm.weight", (HEAD,)
        yield f"{name}.self_attn.k_norm.weight", (HEAD,)
        yield f"{name}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{name}.self_attn.k_proj.weight", (kv_heads, hidden)
        yield f"{name}.self_attn.v_proj.weight", (kv_heads, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "norm.weight", (hidden,)


def _vae_config(widths: Widths) -> dict[str, Any]:
    return {"block_out_channels": widths.vae, "layers_per_block": 2, "norm_num_groups": 32}


def _vae(widths: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the tensors of both halves: two residual blocks per level, three to decode."""
    for half, order, ends, block, sampler in (
        ("encoder", widths, (3, 32), "down_blocks", "downsamplers"),
        ("decoder", widths[::-1], (16, 3), "up_blocks", "upsamplers"),
    ):
        last = len(order) - 1
        yield from _convolution(f"{half}.conv_in", order[0], ends[0])
        before = order[0]
        for index, after in enumerate(order):
            name = f"{half}.{block}.{index}"
            for layer in range(2 if half == "encoder" else 3):
                yield from _resnet(f"{name}.resnets.{layer}", after, after if layer else before)
            if index < last:
                yield from _convolution(f"{name}.{sampler}.0.conv", after, after)
            before = after
        yield from _mid_block(f"{half}.mid_block", widths[-1])
        yield from _norm(f"{half}.conv_norm_out", order[-1])
        yield from _convolution(f"{half}.conv_out", ends[1], order[-1])


def _mid_block(name: str, width: int) -> Iterator[Tensor]:
    for index in range(2):
        yield from _resnet(f"{name}.resnets.{index}", width, width)
    yield from _norm(f"{name}.attentions.0.group_norm", width)
    for each in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from _linear(f"{name}.attentions.0.{each}", width, width)


def _resnet(name: str, outputs: int, inputs: int) -> Iterator[Tensor]:
    yield from _norm(f"{name}.norm1", inputs)
    yield from _convolution(f"{name}.conv1", outputs, inputs)
    yield from _norm(f"{name}.norm2", outputs)
    yield from _convolution(f"{name}.conv2", outputs, outputs)
    if outputs != inputs:
        yield from _convolution(f"{name}.conv_shortcut", outputs, inputs, 1)


def _convolution(name: str, outputs: int, inputs: int, side: int = 3) -> Iterator[Tensor]:
    yield f"{name}.weight", (outputs, inputs, side, side)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Iterator[Tensor]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--text-layers", type=int, help="instead of those of the shape")
    options = parser.parse_args()
    print(build(options.directory, options.shape, text_layers=options.text_layers))


if __name__ == "__main__":
    main()
