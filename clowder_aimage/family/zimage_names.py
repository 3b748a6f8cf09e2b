"""Names and shapes of Z-Image's tensors, in all layouts.

Sources of the names: diffusers' ``transformer_z_image.py`` and ``single_file_utils.py``, ComfyUI's
``comfy/utils.py`` (``z_image_to_diffusers``), Z-Image-Turbo-MLX, mflux's ``z_image`` models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.family.name_table import NameTable, TensorChange

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]
ORIGINAL, MLX, MFLUX, BARE = "original", "mlx", "mflux", "bare"
_END = r"(?=\.|$)"

TRANSFORMER = {
    "diffusers": NameTable(),
    ORIGINAL: NameTable(
        renames=(
            (r"^all_(x_embedder|final_layer)\.[0-9]+-[0-9]+", r"\1"),
            (rf"attention\.to_out\.0{_END}", "attention.out"),
            (rf"attention\.norm_([qk]){_END}", r"attention.\1_norm"),
        ),
        stacked=(("attention.qkv", tuple(f"attention.to_{projection}" for projection in "qkv")),),
    ),
    MLX: NameTable(
        renames=(
            (r"^all_(x_embedder|final_layer)\.[0-9]+-[0-9]+", r"\1"),
            (rf"(to_out|adaLN_modulation)\.[01]{_END}", r"\1"),
            (rf"^(t_embedder\.mlp|cap_embedder)\.([012]){_END}", r"\1.layers.\2"),
        )
    ),
    MFLUX: NameTable(
        renames=(
            (rf"^t_embedder\.mlp\.0{_END}", "t_embedder.linear1"),
            (rf"^t_embedder\.mlp\.2{_END}", "t_embedder.linear2"),
            (rf"^(all_final_layer\..*adaLN_modulation)\.1{_END}", r"\1.0"),
        )
    ),
}
TEXT_ENCODER = {
    "diffusers": NameTable(),
    BARE: NameTable(renames=((r"^model\.", ""),)),
    # llama.cpp, gguf-py/gguf/tensor_mapping.py.
    "gguf": NameTable(
        renames=(
            (r"^model\.layers\.", "blk."),
            (r"^model\.embed_tokens", "token_embd"),
            (r"^model\.norm", "output_norm"),
            (r"input_layernorm", "attn_norm"),
            (r"post_attention_layernorm", "ffn_norm"),
            (r"self_attn\.o_proj", "attn_output"),
            (r"self_attn\.([qkv])_proj", r"attn_\1"),
            (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
            (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
        )
    ),
}

_CONVOLUTIONS = ((r"\.weight$", TensorChange.CHANNELS_LAST),)
# Levels of every VAE with these names.
_LEVELS = 4
VAE = {
    "diffusers": NameTable(),
    ORIGINAL: NameTable(
        renames=(
            (r"down_blocks\.([0-9]+)\.resnets\.", r"down.\1.block."),
            (r"down_blocks\.([0-9]+)\.downsamplers\.0\.", r"down.\1.downsample."),
            *(
                (rf"up_blocks\.{level}\.resnets\.", f"up.{_LEVELS - 1 - level}.block.")
                for level in range(_LEVELS)
            ),
            *(
                (rf"up_blocks\.{level}\.upsamplers\.0\.", f"up.{_LEVELS - 1 - level}.upsample.")
                for level in range(_LEVELS)
            ),
            (r"mid_block\.resnets\.0\.", "mid.block_1."),
            (r"mid_block\.resnets\.1\.", "mid.block_2."),
            (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
            (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
            (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
            (r"conv_norm_out", "norm_out"),
            (r"conv_shortcut", "nin_shortcut"),
        ),
        changes=((r"mid_block\.attentions\.0\.to_.*\.weight$", TensorChange.UNIT_KERNEL),),
    ),
    MLX: NameTable(
        renames=(
            (r"(down_blocks|up_blocks)\.([0-9]+)\.resnets\.", r"\1.\2.layers."),
            (r"(down_blocks\.[0-9]+)\.downsamplers\.0\.", r"\1.layers.2."),
            (r"(up_blocks\.[0-9]+)\.upsamplers\.0\.", r"\1.layers.3."),
            (r"mid_block\.resnets\.1\.", "mid_block.layers.2."),
            (r"mid_block\.resnets\.0\.", "mid_block.layers.0."),
            (r"mid_block\.attentions\.0\.", "mid_block.layers.1."),
            (r"to_out\.0", "to_out"),
        ),
        changes=_CONVOLUTIONS,
    ),
    MFLUX: NameTable(
        renames=(
            (r"^encoder\.conv_(in|out)\.", r"encoder.conv_\1.conv2d."),
            (r"^decoder\.conv_(in|out)\.", r"decoder.conv_\1.conv."),
            (r"conv_norm_out\.", "conv_norm_out.norm."),
        ),
        changes=_CONVOLUTIONS,
    ),
}


def build_transformer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a transformer."""
    dim, width = config["dim"], min(config["dim"], 256)
    text, patch, middle = config["cap_feat_dim"], 4 * config["in_channels"], 1024
    shapes = {
        **_build_linear_shapes("all_x_embedder.2-1", dim, patch),
        **_build_linear_shapes("all_final_layer.2-1.linear", patch, dim),
        **_build_linear_shapes("all_final_layer.2-1.adaLN_modulation.1", dim, width),
        "cap_embedder.0.weight": (text,),
        **_build_linear_shapes("cap_embedder.1", dim, text),
        **_build_linear_shapes("t_embedder.mlp.0", middle, 256),
        **_build_linear_shapes("t_embedder.mlp.2", width, middle),
        "x_pad_token": (1, dim),
        "cap_pad_token": (1, dim),
    }
    refiners = config["n_refiner_layers"]
    counts = {"layers": config["n_layers"], "noise_refiner": refiners, "context_refiner": refiners}
    for kind, count in counts.items():
        for number in range(count):
            block = f"{kind}.{number}"
            shapes |= _build_block_shapes(block, dim, dim // config["n_heads"])
            if kind != "context_refiner":
                shapes |= _build_linear_shapes(f"{block}.adaLN_modulation.0", 4 * dim, width)
    return shapes


def _build_block_shapes(block: str, dim: int, head: int) -> dict[str, tuple[int, ...]]:
    hidden = int(dim / 3 * 8)
    projections = {
        f"attention.to_{projection}": (dim, dim) for projection in ("q", "k", "v", "out.0")
    }
    layers = {
        **{f"attention.norm_{projection}": (head,) for projection in "qk"},
        **{f"{name}_norm{number}": (dim,) for name in ("attention", "ffn") for number in (1, 2)},
        **{f"feed_forward.w{number}": (hidden, dim) for number in (1, 3)},
        "feed_forward.w2": (dim, hidden),
    }
    return {f"{block}.{name}.weight": shape for name, shape in (projections | layers).items()}


def _build_linear_shapes(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def build_text_encoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a Qwen3 decoder without its output layer."""
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    block = {
        "self_attn.q_proj": (query, size),
        **{f"self_attn.{projection}_proj": (key, size) for projection in "kv"},
        "self_attn.o_proj": (size, query),
        **{f"self_attn.{projection}_norm": (head,) for projection in "qk"},
        **{f"mlp.{projection}_proj": (inner, size) for projection in ("gate", "up")},
        "mlp.down_proj": (size, inner),
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
    }
    shapes = {"embed_tokens": (config["vocab_size"], size), "norm": (size,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in block.items()}
    return {f"model.{name}.weight": shape for name, shape in shapes.items()}


def build_vae_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of an ``AutoencoderKL``."""
    channels, layers = list(config["block_out_channels"]), config["layers_per_block"]
    latent, last_level = config["latent_channels"], len(channels) - 1
    shapes = dict(
        _iter_end_shapes(
            "encoder", channels[0], channels[-1], config.get("in_channels", 3), 2 * latent
        )
    )
    shapes |= dict(
        _iter_end_shapes(
            "decoder", channels[-1], channels[0], latent, config.get("out_channels", 3)
        )
    )
    for side in ("encoder", "decoder"):
        shapes |= dict(_iter_middle_shapes(f"{side}.mid_block", channels[-1]))
    for name, size in (("quant_conv", 2 * latent), ("post_quant_conv", latent)):
        if config.get(f"use_{name}"):
            shapes |= dict(_iter_convolution_shapes(name, size, size, 1))
    for level, width in enumerate(channels):
        in_width = channels[max(level - 1, 0)]
        name = f"encoder.down_blocks.{level}"
        shapes |= dict(_iter_resnet_shapes(name, in_width, width, layers))
        if level < last_level:
            shapes |= dict(_iter_convolution_shapes(f"{name}.downsamplers.0.conv", width, width))
        decoder_in_width = channels[min(last_level, last_level - level + 1)]
        name, width = f"decoder.up_blocks.{level}", channels[last_level - level]
        shapes |= dict(_iter_resnet_shapes(name, decoder_in_width, width, layers + 1))
        if level < last_level:
            shapes |= dict(_iter_convolution_shapes(f"{name}.upsamplers.0.conv", width, width))
    return shapes


def _iter_end_shapes(
    side: str, first_width: int, last_width: int, in_channels: int, out_channels: int
) -> NamedShapes:
    yield from _iter_convolution_shapes(f"{side}.conv_in", first_width, in_channels)
    yield from _iter_convolution_shapes(f"{side}.conv_out", out_channels, last_width)
    yield from _iter_norm_shapes(f"{side}.conv_norm_out", last_width)


def _iter_middle_shapes(name: str, width: int) -> NamedShapes:
    yield from _iter_resnet_shapes(name, width, width, 2)
    attention = f"{name}.attentions.0"
    yield from _iter_norm_shapes(f"{attention}.group_norm", width)
    for projection in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from _build_linear_shapes(f"{attention}.{projection}", width, width).items()


def _iter_resnet_shapes(name: str, in_width: int, width: int, count: int) -> NamedShapes:
    for number in range(count):
        block, block_in = f"{name}.resnets.{number}", in_width if number == 0 else width
        yield from _iter_norm_shapes(f"{block}.norm1", block_in)
        yield from _iter_convolution_shapes(f"{block}.conv1", width, block_in)
        yield from _iter_norm_shapes(f"{block}.norm2", width)
        yield from _iter_convolution_shapes(f"{block}.conv2", width, width)
        if block_in != width:
            yield from _iter_convolution_shapes(f"{block}.conv_shortcut", width, block_in, 1)


def _iter_convolution_shapes(
    name: str, out_channels: int, in_channels: int, side: int = 3
) -> NamedShapes:
    yield f"{name}.weight", (out_channels, in_channels, side, side)
    yield f"{name}.bias", (out_channels,)


def _iter_norm_shapes(name: str, width: int) -> NamedShapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
